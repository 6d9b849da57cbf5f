"""The sum of the spans of a projection, and the diffusion of the result, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.spans import sum_of_spans
from diffnet.ops.common.tiling import SIZES, cdiv


@launched
@triton.jit(do_not_specialize=SIZES)
def diffusion_features_forward_spectrum_kernel(
    partial, evals, time, ptr, factor, spectrum, diffused, span, spans, size: tl.constexpr, c_size: tl.constexpr,
    FACTOR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Sum `partial` over the spans of each mesh to S, and diffuse it to D."""
    blocks = tl.cdiv(size, BLOCK)
    mesh = tl.program_id(0) // blocks
    cell = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = sum_of_spans(partial, cell, size, mesh * 0, mesh, ptr, span, spans, False, BLOCK, BLOCK_SPANS)
    if FACTOR:
        total *= tl.load(factor)
    inside = cell < size
    k_size = size // c_size
    value = tl.load(evals + mesh.to(tl.int64) * k_size + cell // c_size, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(time + cell % c_size, mask=inside, other=0.0).to(tl.float32)
    t = tl.where(t < 0.0, 0.0, t)  # lets NaN through
    place = mesh.to(tl.int64) * size + cell
    tl.store(spectrum + place, total, mask=inside)
    tl.store(diffused + place, tl.exp(-value * t) * total, mask=inside)


def sum_and_diffuse(
    partial: Tensor, span: int, factor: Tensor | None, ptr: Tensor, evals: Tensor, time: Tensor
) -> tuple[Tensor, Tensor]:
    """S = factor Σ partial over the spans of each mesh, and D = exp(−λ tᵀ) ∘ S with t = max(time, 0)

    partial (1, spans, K, C) float32, evals (B, K), time (C,) → two (B, K, C) float32
    """
    meshes, k, c = ptr.shape[0] - 1, *partial.shape[2:]
    spectrum = torch.empty(meshes, k, c, dtype=torch.float32, device=partial.device)
    diffused = torch.empty_like(spectrum)
    if spectrum.numel():
        block = 64
        diffusion_features_forward_spectrum_kernel[(cdiv(k * c, block) * meshes,)](
            partial, evals.contiguous(), time.contiguous(), ptr, partial if factor is None else factor,
            spectrum, diffused, span, partial.shape[1], k * c, c,
            FACTOR=factor is not None, BLOCK=block, BLOCK_SPANS=64, num_warps=4,
        )  # fmt: skip
    return spectrum, diffused
