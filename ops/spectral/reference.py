"""The spectral operations in plain PyTorch: the CPU path, and the reference for the kernels.

Arguments are as in `ops.spectral.op`. Mixed dtypes are promoted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.precision import compute_dtype, promoted_dtype
from diffnet.ops.common.ragged import row_lengths


def to_spectral(x: Tensor, evecs: Tensor, mass: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Φᵀ (m ∘ x) for each mesh, in the promoted dtype."""
    dtype = promoted_dtype(x, evecs, mass)
    weighted, evecs = (x * mass[:, None]).to(dtype), evecs.to(dtype)
    if len(ptr) <= 2:
        return (evecs.mT @ weighted)[None][: len(ptr) - 1]
    sizes = row_lengths(ptr, lengths)
    return torch.stack([e.mT @ w for e, w in zip(torch.split(evecs, sizes), torch.split(weighted, sizes), strict=True)])


def from_spectral(coefficients: Tensor, evecs: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Φ D for each mesh, computed in the promoted dtype and rounded to the dtype of the evecs."""
    dtype = promoted_dtype(coefficients, evecs)
    out = _evaluate(coefficients.to(dtype), evecs.to(dtype), ptr, lengths)
    return out if coefficients.dtype == evecs.dtype else out.to(compute_dtype(evecs))


def _evaluate(coefficients: Tensor, evecs: Tensor, ptr: Tensor, lengths: Sequence[int] | None) -> Tensor:
    if len(ptr) <= 2:
        return evecs @ (coefficients[0] if len(ptr) == 2 else coefficients.sum(0))  # a batch of no meshes has no rows
    sizes = row_lengths(ptr, lengths)
    return torch.cat([e @ d for e, d in zip(torch.split(evecs, sizes), coefficients, strict=True)])


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """exp(−λ tᵀ) ∘ S"""
    return torch.exp(-evals[..., None] * time) * spectrum
