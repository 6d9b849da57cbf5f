"""Heat diffusion of coefficients: D = exp(−λ tᵀ) ∘ S in one kernel, its gradients in another.

Their rows are the rows of all meshes' spectra, (B·K, C). A third kernel computes S too, from the spans of a projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.spans import sum_of_spans
from diffnet.ops.common.tiling import SIZES, cdiv, interpreted


@triton.jit
def _load_tile(
    spectrum, evals, time, rows_size, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Return λ, exp(−λ tᵀ) and S of a tile, its columns, the offsets of its elements, and which of them exist."""
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < rows_size)[:, None] & (c < c_size)[None, :]
    at = rows.to(tl.int64)[:, None] * c_size + c[None, :]
    value = tl.load(evals + rows, mask=rows < rows_size, other=0.0).to(tl.float32)[:, None]
    t = tl.load(time + c, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
    s = tl.load(spectrum + at, mask=inside, other=0.0)
    return value, tl.exp(-value * t), s, c, at, inside


@launched
@triton.jit(do_not_specialize=SIZES)
def diffuse_forward_kernel(
    spectrum, evals, time, out, rows_size, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    _, decay, s, _, at, inside = _load_tile(spectrum, evals, time, rows_size, c_size, BLOCK_V, BLOCK_C)
    tl.store(out + at, decay * s, mask=inside)


@launched
@triton.jit(do_not_specialize=SIZES)
def diffuse_backward_kernel(
    grad, spectrum, evals, time, spectrum_grad, time_partial, rows_size, c_size: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dS, and Σ −λ ∘ dS ∘ S over the rows of this program."""
    value, decay, s, c, at, inside = _load_tile(spectrum, evals, time, rows_size, c_size, BLOCK_V, BLOCK_C)
    g = tl.load(grad + at, mask=inside, other=0.0) * decay
    tl.store(spectrum_grad + at, g, mask=inside)
    total = tl.sum(-value * g * s, axis=0)
    tl.store(time_partial + tl.program_id(0).to(tl.int64) * c_size + c, total, mask=c < c_size)


def _blocks(spectrum: Tensor) -> tuple[int, int]:
    return (16, 16) if interpreted(spectrum) else (32, 64)


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """D = exp(−λ tᵀ) ∘ S: spectrum (B, K, C) float32, evals (B, K), time (C,) → (B, K, C) float32"""
    meshes, k, c = spectrum.shape
    block_v, block_c = _blocks(spectrum)
    check_rows("diffuse", meshes * k)
    check_programs("diffuse", cdiv(meshes * k, block_v), cdiv(c, block_c))
    spectrum = spectrum.contiguous()
    out = torch.empty_like(spectrum)
    if out.numel():
        diffuse_forward_kernel[(cdiv(meshes * k, block_v), cdiv(c, block_c))](
            spectrum, evals.contiguous(), time.contiguous(), out, meshes * k, c,
            BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out


def diffuse_backward(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """dS (B, K, C) and dt (C,), float32"""
    meshes, k, c = spectrum.shape
    spectrum, block_v, block_c = spectrum.contiguous(), *_blocks(spectrum)
    spectrum_grad, blocks = torch.empty_like(spectrum), cdiv(meshes * k, block_v)
    time_partial = torch.empty(blocks, c, dtype=torch.float32, device=spectrum.device)
    if spectrum_grad.numel():
        diffuse_backward_kernel[(blocks, cdiv(c, block_c))](
            grad.contiguous(), spectrum, evals.contiguous(), time.contiguous(), spectrum_grad, time_partial,
            meshes * k, c, BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return spectrum_grad, time_partial.sum(0)


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
    total = sum_of_spans(partial, cell, size, 0, mesh, ptr, span, spans, False, BLOCK, BLOCK_SPANS)
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
