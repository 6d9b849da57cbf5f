"""Projection onto an eigenbasis and evaluation in it, on packed ragged batches, and heat diffusion of coefficients.

Diffusion, D = exp(−λ tᵀ) ∘ S, has one kernel and its gradients another. Their rows are the rows of all meshes' spectra,
(B·K, C). A third kernel computes S too, from the spans of a projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_matrix, check_programs, check_rows
from diffnet.ops.common.matmul import product, split, split_transpose
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import choose_span, span_count, span_rows, sum_of_spans, sum_spans
from diffnet.ops.common.tiling import (
    SIZES,
    Tiling,
    cdiv,
    interpreted,
    planned,
    processors,
    row_major,
    small_tiling,
    starts_early,
    tile,
)


def project_tiling(evecs: Tensor, k: int, c: int, precision: str) -> Tiling:
    """Return the tiles of a projection, by the size of the meshes.

    Small meshes have fewer tiles than there are multiprocessors, so they get smaller tiles. Medium meshes get half the
    channels: this reads the evecs twice, mostly from the cache, but halves the partial sums, which cost more there.
    """
    if evecs.dtype != torch.float32:
        if evecs.shape[0] < 128 * processors(evecs):
            return Tiling(64, tile(k, 64), tile(c, 64), 4, 3, 1)
        large = evecs.shape[0] >= 3072 * processors(evecs)
        if c <= 128:
            return Tiling(128, tile(k, 128), tile(c, 128 if large else 64), 8, 3, 1)
        return Tiling(64, tile(k, 128), 256, 8, 4, 1) if large else Tiling(128, tile(k, 128), 128, 8, 3, 1)
    if precision == "bf16x3":
        return Tiling(32, tile(k, 128), tile(c, 128), 8, 3, 2)  # 128 registers, so two programs fit
    return Tiling(32, tile(k, 64), tile(c, 128), 4, 3, 2) if k <= 64 else Tiling(32, 128, tile(c, 128), 8, 3, 1)


def evaluate_tiling(evecs: Tensor, k: int, c: int, precision: str) -> Tiling:
    if evecs.dtype != torch.float32:
        return Tiling(64, tile(k, 128), tile(c, 64), 4, 3, 8) if c <= 64 else Tiling(64, tile(k, 128), 128, 8, 3, 2)
    if precision == "bf16x6" and k > 128:  # registers would spill otherwise
        return Tiling(64, 32, tile(c, 64), 4, 3, 4)
    return Tiling(64, tile(k, 128), tile(c, 64), 4, 2, 4)


@triton.jit
def _load_scale(scale, row, v, last):
    """Load the scale of a tile. Callers do so one tile ahead, because Triton doesn't start such small loads early."""
    return tl.load(scale + row + v, mask=row + v < last, other=0.0)


@launched
@triton.jit(do_not_specialize=SIZES)
def project_forward_kernel(
    x, evecs, scale, ptr, partial, rows_size, meshes, span,
    k_size: tl.constexpr, c_size: tl.constexpr, x_stride: tl.constexpr, evecs_stride: tl.constexpr,
    SCALED: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial[s] = Φᵀ(scale ∘ x) over the rows of span s, zeros for an empty span. EARLY: see `tiling.starts_early`."""
    if EARLY:
        gdc_launch_dependents()
    columns = tl.cdiv(c_size, BLOCK_C)
    which = tl.program_id(1)
    index = tl.program_id(0)
    k = (which // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = (which % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    _, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    v = tl.arange(0, BLOCK_V)[:, None]
    if SCALED:
        s = _load_scale(scale, first, v, last)
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        row64 = tl.cast(row, tl.int64)  # rows times channels may exceed 2³¹; offsets in a tile don't
        phi_at = evecs + row64 * evecs_stride + (v * evecs_stride + k[None, :])
        phi = tl.load(phi_at, mask=live & (k < k_size)[None, :], other=0.0)
        x_at = x + row64 * x_stride + (v * x_stride + c[None, :])
        value = tl.load(x_at, mask=live & (c < c_size)[None, :], other=0.0)
        if SCALED:
            value = (value.to(tl.float32) * s.to(tl.float32)).to(value.dtype)
            s = _load_scale(scale, row + BLOCK_V, v, last)
        total = product(split_transpose(phi, PRECISION), split(value, PRECISION), total, PRECISION)
    place = partial + (index.to(tl.int64) * k_size + k)[:, None] * c_size + c[None, :]
    tl.store(place, total, mask=(k < k_size)[:, None] & (c < c_size)[None, :])


@planned
def _plan_projection(
    evecs: Tensor, rows: int, k: int, c: int, meshes: int, precision: str
) -> tuple[Tiling, int, int, int]:
    """The tiling, the rows of a span, the number of spans, and the tiles of the result of one span."""
    t = small_tiling(evecs, k, c) or project_tiling(evecs, k, c, precision)
    tiles = cdiv(k, t.k) * cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(evecs) * t.programs // max(tiles, 1))
    spans = span_count(rows, meshes, span)
    check_rows("to_spectral", rows)
    check_matrix("to_spectral", k, c)
    check_programs("to_spectral", spans, tiles)
    return t, span, spans, tiles


def project_spans(x: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> tuple[Tensor, int, Tensor | None]:
    """Compute Φᵀ(scale ∘ x) of each span of rows.

    Returns the sums (1, spans, K, C) in float32, the rows of a span, and a factor that all sums have to be multiplied
    by, or None.
    """
    (rows, c), k, meshes = x.shape, evecs.shape[1], ptr.shape[0] - 1
    x, evecs = row_major(x), row_major(evecs)
    factor = None
    if scale is not None and rows and x.dtype == torch.float16:  # areas of a fine mesh are too small for float16
        finite = scale.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # so NaN stays in its mesh
        factor = finite.mean().clamp(min=1e-30)
        scale = scale / factor
    precision = dot_precision(evecs)
    t, span, spans, tiles = _plan_projection(evecs, rows, k, c, meshes, precision)
    partial = torch.empty(1, spans, k, c, dtype=torch.float32, device=x.device)
    if partial.numel():
        project_forward_kernel[(spans, tiles)](
            x, evecs, x if scale is None else scale.contiguous(), ptr, partial,
            rows, meshes, span, k, c, x.stride(0), evecs.stride(0),
            SCALED=scale is not None, ONE_MESH=meshes == 1, PRECISION=precision, EARLY=starts_early(x),
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return partial, span, factor


def project(x: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    """S = Φᵀ(scale ∘ x) for each mesh: x (V, C), evecs (V, K), scale (V,) → (B, K, C) float32

    Each program adds up one span of rows. A second kernel adds the sums of the spans in a fixed order.
    """
    partial, span, factor = project_spans(x, evecs, scale, ptr)
    return sum_spans(partial, ptr, span, factor)[0]


@launched
@triton.jit(do_not_specialize=SIZES)
def evaluate_forward_kernel(
    coefficients, evecs, scale, added, ptr, out, rows_size, meshes, span,
    k_size: tl.constexpr, c_size: tl.constexpr, evecs_stride: tl.constexpr, added_stride: tl.constexpr,
    SCALED: tl.constexpr, ADDED: tl.constexpr, ONE_MESH: tl.constexpr, ONE_STEP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = scale ∘ (Φ D) + added at the rows of one span. ONE_STEP: D fits into one tile and is read once."""
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0) // columns
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    coefficients += mesh.to(tl.int64) * k_size * c_size
    in_c = (c < c_size)[None, :]
    if ONE_STEP:
        d = split(load_coefficients(coefficients, k, c, k_size, c_size).to(evecs.dtype.element_ty), PRECISION)
    v = tl.arange(0, BLOCK_V)[:, None]
    if SCALED:
        s = _load_scale(scale, first, v, last)
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        row64 = tl.cast(row, tl.int64)
        phi_at = evecs + row64 * evecs_stride + v * evecs_stride
        if ONE_STEP:
            phi = tl.load(phi_at + k[None, :], mask=live & (k < k_size)[None, :], other=0.0)
            value = product(split(phi, PRECISION), d, None, PRECISION)
        else:
            value = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
            for step in range(0, k_size, BLOCK_K):
                ks = step + k
                phi = tl.load(phi_at + ks[None, :], mask=live & (ks < k_size)[None, :], other=0.0)
                d = load_coefficients(coefficients, ks, c, k_size, c_size).to(phi.dtype)
                value = product(split(phi, PRECISION), split(d, PRECISION), value, PRECISION)
        if SCALED:
            value *= s.to(tl.float32)
            s = _load_scale(scale, row + BLOCK_V, v, last)
        if ADDED:
            at = added + row64 * added_stride + (v * added_stride + c[None, :])
            value += tl.load(at, mask=live & in_c, other=0.0).to(tl.float32)
        place = out + row64 * c_size + (v * c_size + c[None, :])
        tl.store(place, value.to(out.dtype.element_ty), mask=live & in_c)


@triton.jit
def load_coefficients(coefficients, k, c, k_size: tl.constexpr, c_size: tl.constexpr):
    inside = (k < k_size)[:, None] & (c < c_size)[None, :]
    return tl.load(coefficients + k[:, None] * c_size + c[None, :], mask=inside, other=0.0)


@planned
def _plan_evaluation(evecs: Tensor, rows: int, k: int, c: int, meshes: int, precision: str) -> tuple[Tiling, int, int]:
    """The tiling, the rows of a span, and the number of programs."""
    t = small_tiling(evecs, k, c) or evaluate_tiling(evecs, k, c, precision)
    columns = cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(evecs) * t.programs // columns)
    return t, span, span_count(rows, meshes, span) * columns


def evaluate(
    coefficients: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor, *, added: Tensor | None = None
) -> Tensor:
    """scale ∘ (Φ D) + added for each mesh, in the dtype of the evecs

    coefficients (B, K, C), evecs (V, K), scale (V,), added (V, C) → (V, C)
    """
    (rows, k), c, meshes = evecs.shape, coefficients.shape[2], ptr.shape[0] - 1
    coefficients, evecs = coefficients.contiguous(), row_major(evecs)
    check_rows("from_spectral", rows)
    check_matrix("from_spectral", k, c)
    out = torch.empty(rows, c, dtype=evecs.dtype, device=evecs.device)
    if out.numel():
        precision = dot_precision(evecs)
        t, span, programs = _plan_evaluation(evecs, rows, k, c, meshes, precision)
        other = out if added is None else row_major(added)
        evaluate_forward_kernel[(programs,)](
            coefficients, evecs, evecs if scale is None else scale.contiguous(), other, ptr, out,
            rows, meshes, span, k, c, evecs.stride(0), other.stride(0),
            SCALED=scale is not None, ADDED=added is not None, ONE_MESH=meshes == 1, ONE_STEP=k <= t.k,
            PRECISION=precision, BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


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
