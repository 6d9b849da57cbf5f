"""Spectral diffusion on packed ragged batches (Sharp et al. 2022, "Learned Diffusion", spectral acceleration).

Shapes: V packed vertices, B meshes, K eigenpairs, C channels; mesh b owns rows ptr[b]:ptr[b+1]. `lengths` are the
same extents as Python integers; passing them saves a read-back of `ptr` where B > 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.ragged import row_lengths


def to_spectral(x: Tensor, evecs: Tensor, mass: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Project onto the basis: S = Φᵀ (m ∘ x) for each mesh.

    x (V, C), evecs (V, K), mass (V,), ptr (B+1,) int → (B, K, C)
    """
    weighted = x * mass[:, None]
    if len(ptr) == 2:
        return (evecs.mT @ weighted)[None]
    sizes = row_lengths(ptr, lengths)
    return torch.stack([e.mT @ w for e, w in zip(torch.split(evecs, sizes), torch.split(weighted, sizes), strict=True)])


def from_spectral(coefficients: Tensor, evecs: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Evaluate coefficients at the vertices: Φ D for each mesh.

    coefficients (B, K, C), evecs (V, K), ptr (B+1,) int → (V, C)
    """
    if len(ptr) == 2:
        return evecs @ coefficients[0]
    sizes = row_lengths(ptr, lengths)
    return torch.cat([e @ d for e, d in zip(torch.split(evecs, sizes), coefficients, strict=True)])


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """Heat diffusion in the basis: D = exp(−λ tᵀ) ∘ S, one time per channel.

    spectrum (B, K, C), evals (B, K), time (C,) ≥ 0 → (B, K, C)
    """
    return torch.exp(-evals[..., None] * time) * spectrum
