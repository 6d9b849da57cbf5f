"""The work of a block on coefficients, between its passes over the vertices.

There are few coefficients, so the number of kernels matters more than their speed. Rows are the rows of all meshes'
coefficients, (B·K, C). Coefficients are float32 in every arithmetic, because every vertex is computed from them;
"tf32x3" products are as accurate as float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_cuda

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_matrix, check_programs, check_rows
from diffnet.ops.common.matmul import store
from diffnet.ops.common.precision import dot_precision, empty_table
from diffnet.ops.common.spans import Unsummed, sum_spans
from diffnet.ops.common.tiling import SIZES, cdiv, interpreted, planned, tile

# Rows of a program. Matrix units take no fewer, and more would leave multiprocessors without rows.
ROWS = 16


@triton.jit
def _dot(a, b, total):
    """Return total + a b as accurate as float32. Compilers for AMD know no "tf32x3"."""
    return tl.dot(a, b, total, input_precision="tf32x3" if is_cuda() else "ieee")


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_forward_table_kernel(
    d, a_re, a_im, table, rows_size, c_size: tl.constexpr,
    ROTATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """D, P = D A_reᵀ and Q = D A_imᵀ, into the planes of `table`, as operands (`matmul.store`)."""
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_rows = (rows < rows_size)[:, None]
    d_at = d + rows.to(tl.int64)[:, None] * c_size
    p = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    q = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, c_size, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        x = tl.load(d_at + k[None, :], mask=in_rows & (k < c_size)[None, :], other=0.0)
        at = c[:, None] * c_size + k[None, :]
        inside = (c < c_size)[:, None] & (k < c_size)[None, :]
        a = tl.load(a_re + at, mask=inside, other=0.0).to(tl.float32)
        p = _dot(x, tl.trans(a), p)
        if ROTATION:
            a = tl.load(a_im + at, mask=inside, other=0.0).to(tl.float32)
            q = _dot(x, tl.trans(a), q)
    inside = in_rows & (c < c_size)[None, :]
    plane = tl.cast(rows_size, tl.int64) * c_size
    place = table + rows.to(tl.int64)[:, None] * c_size + c[None, :]
    own = tl.load(d_at + c[None, :], mask=inside, other=0.0)
    apart = (2 + ROTATION) * plane
    store(place, apart, own, inside, PRECISION)
    store(place + plane, apart, p, inside, PRECISION)
    if ROTATION:
        store(place + 2 * plane, apart, q, inside, PRECISION)


def table(d: Tensor, a_re: Tensor, a_im: Tensor | None, evecs: Tensor) -> Tensor:
    """D, P = D A_reᵀ and, with rotations, Q = D A_imᵀ, see `empty_table`: d (B, K, C) float32, a_re, a_im (C, C)"""
    meshes, k, c = d.shape
    check_rows("spectral_gradient_features", meshes * k)
    check_matrix("spectral_gradient_features", c, c)
    d = d.contiguous()
    out = empty_table(evecs, d, a_im is not None)
    if out.numel():
        block_k, block_c = (16, 16) if interpreted(d) else (tile(c, 64), tile(c, 32))
        spectral_gradient_features_forward_table_kernel[(cdiv(meshes * k, ROWS), cdiv(c, block_c))](
            d, a_re.contiguous(), a_re if a_im is None else a_im.contiguous(), out, meshes * k, c,
            ROTATION=a_im is not None, PRECISION=dot_precision(evecs),
            BLOCK_V=ROWS, BLOCK_K=block_k, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _coefficients(
    program, sums, spectrum, evals, time, a_re, a_im, out, time_partial, rows_size, c_size: tl.constexpr,
    PROJECTED: tl.constexpr, DIFFUSED: tl.constexpr, ROTATION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dD' or, if DIFFUSED, dS and one row of partial sums of dt; see `backward`."""
    columns = tl.cdiv(c_size, BLOCK_C)
    rows = (program // columns) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = (program % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_rows = (rows < rows_size)[:, None]
    inside = in_rows & (c < c_size)[None, :]
    at = rows.to(tl.int64)[:, None] * c_size
    plane = tl.cast(rows_size, tl.int64) * c_size
    total = tl.load(sums + at + c[None, :], mask=inside, other=0.0)
    if PROJECTED:
        total += tl.load(sums + (2 + ROTATION) * plane + at + c[None, :], mask=inside, other=0.0)
    for step in range(0, c_size, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        p_at = sums + plane + at + k[None, :]
        in_p = in_rows & (k < c_size)[None, :]
        a_at = k[:, None] * c_size + c[None, :]
        in_a = (k < c_size)[:, None] & (c < c_size)[None, :]
        p = tl.load(p_at, mask=in_p, other=0.0)
        a = tl.load(a_re + a_at, mask=in_a, other=0.0).to(tl.float32)
        total = _dot(p, a, total)
        if ROTATION:
            q = tl.load(p_at + plane, mask=in_p, other=0.0)
            a = tl.load(a_im + a_at, mask=in_a, other=0.0).to(tl.float32)
            total = _dot(q, a, total)
    if DIFFUSED:
        value = tl.load(evals + rows, mask=rows < rows_size, other=0.0).to(tl.float32)[:, None]
        t = tl.load(time + c, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
        total *= tl.exp(-value * tl.where(t < 0.0, 0.0, t))
        s = tl.load(spectrum + at + c[None, :], mask=inside, other=0.0)
        slope = tl.sum(tl.where(t < 0.0, 0.0, -value * total * s), axis=0)
        tl.store(time_partial + (program // columns).to(tl.int64) * c_size + c, slope, mask=c < c_size)
    tl.store(out + at + c[None, :], total, mask=inside)


@triton.jit
def _matrices(
    program, sums, d, partial, rows_size, c_size: tl.constexpr, size: tl.constexpr,
    SPAN: tl.constexpr, ROTATION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum a tile of dPᵀ D and of dQᵀ D over SPAN rows."""
    columns = tl.cdiv(c_size, BLOCK_C)
    index = program // (columns * columns)
    i = (program // columns % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    c = (program % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = index * SPAN
    last = tl.minimum(first + SPAN, rows_size)
    plane = tl.cast(rows_size, tl.int64) * c_size
    re = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    im = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for row in range(first, last, BLOCK_V):
        rows = row + tl.arange(0, BLOCK_V)
        at = rows.to(tl.int64)[:, None] * c_size
        live = (rows < last)[:, None]
        x = tl.load(d + at + c[None, :], mask=live & (c < c_size)[None, :], other=0.0)
        p = tl.load(sums + plane + at + i[None, :], mask=live & (i < c_size)[None, :], other=0.0)
        re = _dot(tl.trans(p), x, re)
        if ROTATION:
            q = tl.load(sums + 2 * plane + at + i[None, :], mask=live & (i < c_size)[None, :], other=0.0)
            im = _dot(tl.trans(q), x, im)
    inside = (i < c_size)[:, None] & (c < c_size)[None, :]
    place = partial + index.to(tl.int64) * size + i[:, None] * c_size + c[None, :]
    tl.store(place, re, mask=inside)
    if ROTATION:
        tl.store(place + c_size * c_size, im, mask=inside)


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_backward_coefficients_kernel(
    sums, d, spectrum, evals, time, a_re, a_im, out, time_partial, partial, meshes, programs,
    k_size: tl.constexpr, c_size: tl.constexpr, size: tl.constexpr,
    PROJECTED: tl.constexpr, DIFFUSED: tl.constexpr, ROTATION: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    MATRICES_V: tl.constexpr, MATRICES_C: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs compute gradients of coefficients, the others those of the matrices A."""
    program = tl.program_id(0)
    rows_size = meshes * k_size
    if program < programs:
        _coefficients(
            program, sums, spectrum, evals, time, a_re, a_im, out, time_partial, rows_size, c_size,
            PROJECTED, DIFFUSED, ROTATION, BLOCK_V, BLOCK_K, BLOCK_C,
        )  # fmt: skip
    else:
        _matrices(program - programs, sums, d, partial, rows_size, c_size, size, SPAN, ROTATION, MATRICES_V, MATRICES_C)


@planned
def _plan_backward(d: Tensor, rows: int, k: int, c: int) -> tuple[int, int, int, int, dict[str, int]]:
    """The blocks of rows, the spans of the matrices, the programs for coefficients, those for both, and the tiles.

    The matrices have spans of rows and tiles of their own.
    """
    small = interpreted(d)
    # A program takes many rows and few columns, so that a mesh has one row of partial sums of dt.
    block_v, block_k, block_c = (ROWS, 16, 16) if small else (tile(k, 128), tile(c, 32), 16)
    span = 2 * ROWS if small else 64 * ROWS  # rows that one program adds up for the matrices
    blocks, spans = cdiv(rows, block_v), max(1, cdiv(rows, span))
    matrices_v, matrices_c = (16, 16) if small else (64, tile(c, 32))
    programs = blocks * cdiv(c, block_c)
    all_programs = programs + spans * cdiv(c, matrices_c) ** 2
    check_programs("spectral_gradient_features", all_programs)
    tiles = {"SPAN": span, "BLOCK_V": block_v, "BLOCK_K": block_k, "BLOCK_C": block_c}
    return blocks, spans, programs, all_programs, tiles | {"MATRICES_V": matrices_v, "MATRICES_C": matrices_c}


def backward(
    sums: Tensor, d: Tensor, a_re: Tensor, a_im: Tensor | None, diffused: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of D or, if it was diffused, of S (B, K, C), of A_re and A_im (C, C), and of time (C,).

    All are float32. The gradient of A_im is None without rotations; the gradient of time is empty if nothing diffused.

    sums: dD, dP and, with rotations, dQ of the gradient features, (2 or 3, B, K, C). If x_d = Φ D was computed,
        Φᵀ dx_d is one more plane.
    d, a_re, a_im: D (B, K, C) and A, (C, C) each
    diffused: S (B, K, C), evals (B, K) and time (C,), which D was computed from, or None

    With dD' = Φᵀ dx_d + dD + dP A_re + dQ A_im, the results are dA_re = dPᵀ D, dA_im = dQᵀ D,
    dS = exp(−λ tᵀ) ∘ dD' and dt = −Σ λ dS ∘ S. A negative time counts as 0 and has gradient 0.
    """
    meshes, k, c = d.shape
    blocks, spans, programs, all_programs, tiles = _plan_backward(d, meshes * k, k, c)
    matrices, d = 1 if a_im is None else 2, d.contiguous()
    grad = torch.empty_like(d)
    time_partial = d.new_empty(1, blocks if diffused else 0, c)
    size = matrices * c * c
    partial = d.new_empty(1, spans, size)
    spectrum, evals, time = (x.contiguous() for x in diffused) if diffused else (d, d, d)
    a_re, a_im = a_re.contiguous(), a_re if a_im is None else a_im.contiguous()
    if c:
        spectral_gradient_features_backward_coefficients_kernel[(all_programs,)](
            sums, d, spectrum, evals, time, a_re, a_im, grad, time_partial, partial,
            meshes, programs, k, c, size,
            PROJECTED=sums.shape[0] == 2 + matrices, DIFFUSED=diffused is not None, ROTATION=matrices == 2,
            **tiles, num_warps=4,
        )  # fmt: skip
    time_grad = time_partial.view(-1, c)[0] if blocks == 1 and diffused else d.new_empty(c if diffused else 0)
    unsummed = Unsummed(time_partial, time_grad) if diffused and blocks != 1 else None
    if spans > 1:
        partial = sum_spans(partial, None, tiles["SPAN"], unsummed=unsummed)
    elif unsummed:
        time_grad = sum_spans(time_partial, None, tiles["SPAN"]).view(c)
    re, *im = partial.view(matrices, c, c)
    return grad, re, im[0] if im else None, time_grad
