"""Gradient features in the eigenbasis, and the diffused function with them, from one pass over the rows.

D (K, C) are the coefficients of the diffused function, P = D A_reᵀ, Q = D A_imᵀ, and G̃ = GΦ are the gradient_evecs.
A program computes some columns of the features from the same columns of D, P and Q:

    g_x = G̃_X D,  g_y = G̃_Y D,  b_x = G̃_X P − G̃_Y Q,  b_y = G̃_Y P + G̃_X Q,  f = tanh(g_x ∘ b_x + g_y ∘ b_y)

With SWAPPED, b_y = G̃_X P + G̃_Y Q, see `ops.gradient_features.op.gradient_features`.

docs/kernels.md derives these formulas and their gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_matrix, check_programs, check_rows
from diffnet.ops.common.matmul import less_product, load, negated, product, split, split_transpose, store, transposed
from diffnet.ops.common.precision import dot_precision, empty_operand, part_count
from diffnet.ops.common.spans import Unsummed, choose_span, span_count, span_rows, sum_spans
from diffnet.ops.common.tiling import (
    SIZES,
    Tiling,
    cdiv,
    has_large_shared_memory,
    interpreted,
    planes_apart,
    planned,
    processors,
    row_major,
    small_tiling,
    starts_early,
    tile,
)
from diffnet.ops.spectral.kernels import load_coefficients, project_spans


def forward_tiling(evecs: Tensor, k: int, c: int, precision: str, diffused: bool) -> Tiling:
    if evecs.dtype != torch.float32:
        # Two programs fit on one multiprocessor, so one can multiply while the other waits for memory.
        return Tiling(64, tile(k, 128), tile(c, 32 if diffused else 64), 4, 2, 2)
    if precision == "bf16x3":
        # Registers would spill if a program held all of the table at once.
        return Tiling(64, tile(k, 32), tile(c, 64), 4, 3, 4)
    return Tiling(64, tile(k, 32), tile(c, 64), 4, 2, 4)  # spills 20 registers, and is faster than 32 columns


def backward_tiling(evecs: Tensor, k: int, c: int, precision: str) -> Tiling:
    # Registers hold three K×C sums and four V×C products at once. With more columns they spill, and the compiler then
    # serializes the matrix instructions.
    if interpreted(evecs):
        return Tiling(16, 16, 16, 4, 1, 1)
    if not has_large_shared_memory(evecs):
        return Tiling(32, tile(k, 32 if evecs.dtype == torch.float32 else 128), tile(c, 32), 4, 1, 2)
    if evecs.dtype != torch.float32:
        return Tiling(64, tile(k, 128), tile(c, 32), 4, 2, 2)
    if precision == "bf16x3":  # for the kernel of the three sums
        return Tiling(32, tile(k, 128), tile(c, 128), 8, 2, 1)
    if k <= 64:  # for the kernel of one sum
        return Tiling(32, tile(k, 64), tile(c, 128), 4, 3, 2)
    return Tiling(32, 128, tile(c, 64), 8, 3, 2)


def is_half(x: Tensor) -> bool:
    """Return whether x has 16 bits and is on a GPU of NVIDIA, see `tanh` and `in_registers`."""
    return x.dtype != torch.float32 and not interpreted(x) and torch.version.hip is None


@triton.jit
def tanh(z, HALF: tl.constexpr):
    """tanh that is finite for every finite z. Near 0, where 1 − e⁻²ᶻ cancels, it is a series.

    HALF takes the GPU's instruction instead. It is accurate to 11 bits, which is enough for results that are rounded
    to 11 bits or fewer. The other way takes about 40 instructions, a quarter of the kernel's time.
    """
    if HALF:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    s = z * z
    near = z * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0.0, -far, far))


@triton.jit
def in_registers(x):
    """Keep an operand of several products in registers.

    Matrix units would fetch an operand that comes straight from a load from shared memory in every product, and wait
    for it. They take it from registers after any instruction, so this is a move that changes nothing.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def side_by_side(a, b):
    """Return [a b]. Each thread keeps the columns of a and b that it had, so threads exchange nothing."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def halves(ab):
    """Return a and b of [a b]."""
    return tl.split(tl.permute(tl.reshape(ab, (ab.shape[0], 2, ab.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _tables(
    coefficients, mesh, meshes, k_size: tl.constexpr, c_size: tl.constexpr,
    ROTATION: tl.constexpr, ONE_MESH: tl.constexpr,
):  # fmt: skip
    """Return the addresses of D, P and Q of a mesh, and the distance between the parts of a number."""
    if ONE_MESH:
        plane: tl.constexpr = k_size * c_size
    else:
        plane = tl.cast(meshes, tl.int64) * k_size * c_size
    d_at = coefficients + mesh.to(tl.int64) * k_size * c_size
    return d_at, d_at + plane, d_at + plane + plane, (2 + ROTATION) * plane


@triton.jit
def _load_table(at, apart, k, c, k_size: tl.constexpr, c_size: tl.constexpr, PRECISION: tl.constexpr):
    inside = (k < k_size)[:, None] & (c < c_size)[None, :]
    return load(at + k[:, None] * c_size + c[None, :], apart, inside, PRECISION)


@triton.jit
def _products(
    gx_at, gy_at, d_at, p_at, q_at, apart, live, k, c, k_size: tl.constexpr, c_size: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return g_x, g_y, b_x and b_y (V, C) of a block of rows, in several steps over K."""
    gx = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    gy = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    bx = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    by = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, k_size, BLOCK_K):
        ks = step + k
        inside = live & (ks < k_size)[None, :]
        x = split(tl.load(gx_at + ks[None, :], mask=inside, other=0.0), PRECISION)
        d = _load_table(d_at, apart, ks, c, k_size, c_size, PRECISION)
        p = _load_table(p_at, apart, ks, c, k_size, c_size, PRECISION)
        gx = product(x, d, gx, PRECISION)
        bx = product(x, p, bx, PRECISION)
        if ROTATION:
            q = _load_table(q_at, apart, ks, c, k_size, c_size, PRECISION)
        if ROTATION and not SWAPPED:
            by = product(x, q, by, PRECISION)
        y = split(tl.load(gy_at + ks[None, :], mask=inside, other=0.0), PRECISION)
        gy = product(y, d, gy, PRECISION)
        if SWAPPED:
            by = product(y, q, by, PRECISION)
        else:
            by = product(y, p, by, PRECISION)
            if ROTATION:
                bx = less_product(y, q, bx, PRECISION)
    if SWAPPED:
        return gx, gy, bx - by, bx + by
    return gx, gy, bx, by


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_forward_kernel(
    coefficients, evecs, gradient_evecs, ptr, diffused, features,
    rows_size, meshes, span, plane_rows,
    k_size: tl.constexpr, c_size: tl.constexpr, evecs_stride: tl.constexpr, gradient_stride: tl.constexpr,
    DIFFUSED: tl.constexpr, ROTATION: tl.constexpr, SWAPPED: tl.constexpr, ONE_MESH: tl.constexpr,
    ONE_STEP: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x = Φ D (if DIFFUSED) and f at the rows of one span.

    ONE_STEP: D, P and Q fit into one tile each and are read once. Numbers have one part then, because more operands
    would not fit.
    """
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0) // columns
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    d_at, p_at, q_at, apart = _tables(coefficients, mesh, meshes, k_size, c_size, ROTATION, ONE_MESH)
    in_c = (c < c_size)[None, :]
    if ONE_STEP:
        d = load_coefficients(d_at, k, c, k_size, c_size)
        p = load_coefficients(p_at, k, c, k_size, c_size)
        if ROTATION:
            q = load_coefficients(q_at, k, c, k_size, c_size)
    component = tl.cast(plane_rows, tl.int64) * gradient_stride
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        row64 = tl.cast(row, tl.int64)
        gx_at = gradient_evecs + row64 * gradient_stride + v * gradient_stride
        gy_at = gradient_evecs + component + row64 * gradient_stride + v * gradient_stride
        out = v * c_size + c[None, :]
        if ONE_STEP:
            inside = live & (k < k_size)[None, :]
            x = tl.load(gx_at + k[None, :], mask=inside, other=0.0)
            y = tl.load(gy_at + k[None, :], mask=inside, other=0.0)
            if HALF:
                x = in_registers(x)
                y = in_registers(y)
            # One component after the other, so that few accumulators are live at a time.
            bx = tl.dot(x, p, input_precision=PRECISION)
            by = bx
            if ROTATION:
                yq = tl.dot(y, q, input_precision=PRECISION)
                bx -= yq
            z = tl.dot(x, d, input_precision=PRECISION) * bx
            if SWAPPED:
                by += yq
            else:
                by = tl.dot(y, p, input_precision=PRECISION)
                if ROTATION:
                    by = tl.dot(x, q, by, input_precision=PRECISION)
            z += tl.dot(y, d, input_precision=PRECISION) * by
        else:
            gx, gy, bx, by = _products(
                gx_at, gy_at, d_at, p_at, q_at, apart, live, k, c, k_size, c_size,
                ROTATION, SWAPPED, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            z = gx * bx + gy * by
        tl.store(features + row64 * c_size + out, tanh(z, HALF).to(features.dtype.element_ty), mask=live & in_c)
        if DIFFUSED:
            phi_at = evecs + row64 * evecs_stride + v * evecs_stride
            if ONE_STEP:
                phi = tl.load(phi_at + k[None, :], mask=live & (k < k_size)[None, :], other=0.0)
                value = tl.dot(phi, d, input_precision=PRECISION)
            else:
                value = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
                for step in range(0, k_size, BLOCK_K):
                    ks = step + k
                    phi = tl.load(phi_at + ks[None, :], mask=live & (ks < k_size)[None, :], other=0.0)
                    part = _load_table(d_at, apart, ks, c, k_size, c_size, PRECISION)
                    value = product(split(phi, PRECISION), part, value, PRECISION)
            tl.store(diffused + row64 * c_size + out, value.to(diffused.dtype.element_ty), mask=live & in_c)


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_backward_kernel(
    grad, coefficients, gradient_evecs, ptr, partial,
    rows_size, meshes, spans, span, plane_rows,
    k_size: tl.constexpr, c_size: tl.constexpr, grad_stride: tl.constexpr, gradient_stride: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, PAIRED: tl.constexpr, ONE_MESH: tl.constexpr,
    ONE_STEP: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dD, dP and dQ (K, C) over the rows of one span, into the planes of `partial`.

    EARLY: see `tiling.starts_early`; the kernel that adds up the spans may follow.

    The kernel reads inputs only and computes the products of the forward again. It takes numbers of one part, see
    `backward`.

    PAIRED: P and Q, and also their gradients, stand side by side in one product. With few columns, one product takes as
    long as each of the two, because it fetches the other operand once.
    """
    if EARLY:
        gdc_launch_dependents()
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0)
    which = tl.program_id(1)
    c = (which % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = (which // columns) * BLOCK_K + tl.arange(0, BLOCK_K)  # the rows of dD, dP and dQ of this program
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    d_at, p_at, q_at, apart = _tables(coefficients, mesh, meshes, k_size, c_size, ROTATION, ONE_MESH)
    dtype = gradient_evecs.dtype.element_ty
    if ONE_STEP:
        d = load_coefficients(d_at, k, c, k_size, c_size)
        p = load_coefficients(p_at, k, c, k_size, c_size)
        if ROTATION:
            q = load_coefficients(q_at, k, c, k_size, c_size)
            n = -q
            if PAIRED:
                pq = side_by_side(p, q)
    d_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    p_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    q_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    pq_sum = tl.zeros((BLOCK_K, 2 * BLOCK_C), tl.float32)
    component = tl.cast(plane_rows, tl.int64) * gradient_stride
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        row64 = tl.cast(row, tl.int64)
        gx_at = gradient_evecs + row64 * gradient_stride + v * gradient_stride
        gy_at = gradient_evecs + component + row64 * gradient_stride + v * gradient_stride
        own_inside = live & (own < k_size)[None, :]
        inside = live & (c < c_size)[None, :]
        x = tl.load(gx_at + own[None, :], mask=own_inside, other=0.0)
        y = tl.load(gy_at + own[None, :], mask=own_inside, other=0.0)
        if PAIRED:
            xp, xq = halves(tl.dot(x, pq, input_precision=PRECISION))
            yp, yq = halves(tl.dot(y, pq, input_precision=PRECISION))
            bx = xp - yq
            by = yp + xq
            gx = tl.dot(x, d, input_precision=PRECISION)
            gy = tl.dot(y, d, input_precision=PRECISION)
            z = gx * bx + gy * by
        elif ONE_STEP:
            # One component after the other. Each product is rounded to the operands' dtype as soon as z contains it,
            # which halves the registers that hold it until the sums below.
            bx = tl.dot(x, p, input_precision=PRECISION)
            if SWAPPED:
                yq = tl.dot(y, q, input_precision=PRECISION)
                by = bx + yq
                bx -= yq
            elif ROTATION:
                bx = tl.dot(y, n, bx, input_precision=PRECISION)
            gx = tl.dot(x, d, input_precision=PRECISION)
            z = gx * bx
            gx = gx.to(dtype)
            bx = bx.to(dtype)
            if not SWAPPED:
                by = tl.dot(y, p, input_precision=PRECISION)
                if ROTATION:
                    by = tl.dot(x, q, by, input_precision=PRECISION)
            gy = tl.dot(y, d, input_precision=PRECISION)
            z += gy * by
            gy = gy.to(dtype)
            by = by.to(dtype)
        else:
            gx, gy, bx, by = _products(
                gx_at, gy_at, d_at, p_at, q_at, apart, live, k, c, k_size, c_size,
                ROTATION, SWAPPED, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            z = gx * bx + gy * by
        f = tanh(z, HALF)
        df = tl.load(grad + row64 * grad_stride + (v * grad_stride + c[None, :]), mask=inside, other=0.0)
        ds = df.to(tl.float32) * (1.0 - f * f)
        xt = tl.trans(x)
        yt = tl.trans(y)
        d_sum = tl.dot(xt, (ds * bx).to(dtype), d_sum, input_precision=PRECISION)
        d_sum = tl.dot(yt, (ds * by).to(dtype), d_sum, input_precision=PRECISION)
        px = (ds * gx).to(dtype)
        py = (ds * gy).to(dtype)
        if SWAPPED:
            gx = gx.to(tl.float32)  # so that the sums are rounded once
            p_sum = tl.dot(xt, (ds * (gy + gx)).to(dtype), p_sum, input_precision=PRECISION)
            q_sum = tl.dot(yt, (ds * (gy - gx)).to(dtype), q_sum, input_precision=PRECISION)
        elif PAIRED:
            pq_sum = tl.dot(xt, side_by_side(px, py), pq_sum, input_precision=PRECISION)
            pq_sum = tl.dot(yt, side_by_side(py, -px), pq_sum, input_precision=PRECISION)
        else:
            p_sum = tl.dot(xt, px, p_sum, input_precision=PRECISION)
            p_sum = tl.dot(yt, py, p_sum, input_precision=PRECISION)
            if ROTATION:
                q_sum = tl.dot(xt, py, q_sum, input_precision=PRECISION)
                q_sum = tl.dot(yt, -px, q_sum, input_precision=PRECISION)
    if PAIRED:
        p_sum, q_sum = halves(pq_sum)
    _store_sums(partial, index, spans, own, c, d_sum, p_sum, q_sum, k_size, c_size, ROTATION)


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_backward_derivatives_kernel(
    grad, coefficients, gradient_evecs, ptr, derivatives,
    rows_size, meshes, span, plane_rows,
    k_size: tl.constexpr, c_size: tl.constexpr, grad_stride: tl.constexpr, gradient_stride: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store ds∘b_x, ds∘b_y, ds∘g_x and ds∘g_y with ds = df ∘ (1 − f²) at the rows of one span.

    With SWAPPED, the last two are ds∘(g_x + g_y) and ds∘(g_y − g_x).

    They are stored in parts with bf16x3, and in float32 with bf16x6, where three parts would take more memory.
    """
    stored: tl.constexpr = "ieee" if PRECISION == "bf16x6" else PRECISION
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0) // columns
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    d_at, p_at, q_at, apart = _tables(coefficients, mesh, meshes, k_size, c_size, ROTATION, ONE_MESH)
    plane = tl.cast(rows_size, tl.int64) * c_size
    component = tl.cast(plane_rows, tl.int64) * gradient_stride
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        inside = live & (c < c_size)[None, :]
        row64 = tl.cast(row, tl.int64)
        gx_at = gradient_evecs + row64 * gradient_stride + v * gradient_stride
        gy_at = gradient_evecs + component + row64 * gradient_stride + v * gradient_stride
        gx, gy, bx, by = _products(
            gx_at, gy_at, d_at, p_at, q_at, apart, live, k, c, k_size, c_size,
            ROTATION, SWAPPED, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C,
        )  # fmt: skip
        f = tanh(gx * bx + gy * by, False)
        df = tl.load(grad + row64 * grad_stride + (v * grad_stride + c[None, :]), mask=inside, other=0.0)
        ds = df * (1.0 - f * f)
        at = derivatives + row64 * c_size + (v * c_size + c[None, :])
        store(at, 4 * plane, ds * bx, inside, stored)
        store(at + plane, 4 * plane, ds * by, inside, stored)
        if SWAPPED:
            store(at + 2 * plane, 4 * plane, ds * (gx + gy), inside, stored)
            store(at + 3 * plane, 4 * plane, ds * (gy - gx), inside, stored)
        else:
            store(at + 2 * plane, 4 * plane, ds * gx, inside, stored)
            store(at + 3 * plane, 4 * plane, ds * gy, inside, stored)


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_backward_sums_kernel(
    derivatives, gradient_evecs, ptr, partial,
    rows_size, meshes, spans, span, plane_rows,
    k_size: tl.constexpr, c_size: tl.constexpr, gradient_stride: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dD, dP and dQ over the rows of one span, from the planes of the derivatives kernel, with bf16x3.

    The sums are transposed, so that no operand has to be kept in registers; the three sums fill them.
    """
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0)
    c = (tl.program_id(1) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = (tl.program_id(1) // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    _, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    plane = tl.cast(rows_size, tl.int64) * c_size
    d_sum = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    p_sum = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    q_sum = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    component = tl.cast(plane_rows, tl.int64) * gradient_stride
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        in_k = live & (k < k_size)[None, :]
        in_c = live & (c < c_size)[None, :]
        row64 = tl.cast(row, tl.int64)
        g_at = gradient_evecs + row64 * gradient_stride + (v * gradient_stride + k[None, :])
        x = split(tl.load(g_at, mask=in_k, other=0.0), PRECISION)
        y = split(tl.load(g_at + component, mask=in_k, other=0.0), PRECISION)
        at = derivatives + row64 * c_size + (v * c_size + c[None, :])
        ux = transposed(load(at, 4 * plane, in_c, PRECISION))
        uy = transposed(load(at + plane, 4 * plane, in_c, PRECISION))
        px = transposed(load(at + 2 * plane, 4 * plane, in_c, PRECISION))
        py = transposed(load(at + 3 * plane, 4 * plane, in_c, PRECISION))
        d_sum = product(ux, x, d_sum, PRECISION)
        d_sum = product(uy, y, d_sum, PRECISION)
        p_sum = product(px, x, p_sum, PRECISION)
        if SWAPPED:
            q_sum = product(py, y, q_sum, PRECISION)
        else:
            p_sum = product(py, y, p_sum, PRECISION)
        if ROTATION and not SWAPPED:
            q_sum = product(py, x, q_sum, PRECISION)
            q_sum = product(px, negated(y), q_sum, PRECISION)
    _store_sums(
        partial, index, spans, k, c, tl.trans(d_sum), tl.trans(p_sum), tl.trans(q_sum), k_size, c_size, ROTATION
    )


@launched
@triton.jit(do_not_specialize=SIZES)
def spectral_gradient_features_backward_sum_kernel(
    derivatives, gradient_evecs, ptr, partial,
    rows_size, meshes, spans, span, plane_rows,
    k_size: tl.constexpr, c_size: tl.constexpr, gradient_stride: tl.constexpr,
    SWAPPED: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum a tile of dD, dP or dQ over the rows of one span, from the planes of the derivatives kernel, with bf16x6.

    Registers hold one of the three sums, because operands of three parts need more of them.
    """
    columns = tl.cdiv(c_size, BLOCK_C)
    tiles = tl.cdiv(k_size, BLOCK_K) * columns
    index = tl.program_id(0)
    which = tl.program_id(1) // tiles  # 0 for dD, 1 for dP, 2 for dQ
    tile_index = tl.program_id(1) % tiles
    c = (tile_index % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = (tile_index // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    _, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    plane = tl.cast(rows_size, tl.int64) * c_size
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    v = tl.arange(0, BLOCK_V)[:, None]
    for component in tl.static_range(2):
        # The components of the derivatives: 0 and 1 for dD, 2 and 3 for dP, and for dQ 3 and, negative, 2.
        number = tl.where(which == 2, 3 - component, 2 * which + component)
        sign = tl.where((which == 2) & (component == 1), -1.0, 1.0)
        end = last
        if SWAPPED:  # 0 and 1 for dD; for dP only 2, with x, and for dQ only 3, with y
            number = tl.where(which == 0, component, which + 1)
            sign = 1.0
            end = tl.where((which == 0) | (which == component + 1), last, first)
        u_base = derivatives + number.to(tl.int64) * plane
        g_base = gradient_evecs + component * tl.cast(plane_rows, tl.int64) * gradient_stride
        for row in range(first, end, BLOCK_V):
            live = row + v < last
            row64 = tl.cast(row, tl.int64)
            g_at = g_base + row64 * gradient_stride + (v * gradient_stride + k[None, :])
            g = tl.load(g_at, mask=live & (k < k_size)[None, :], other=0.0)
            u_at = u_base + row64 * c_size + (v * c_size + c[None, :])
            u = tl.load(u_at, mask=live & (c < c_size)[None, :], other=0.0) * sign
            total = product(split_transpose(g, PRECISION), split(u, PRECISION), total, PRECISION)
    place = partial + (index.to(tl.int64) * k_size + k)[:, None] * c_size + c[None, :]
    partial_plane = tl.cast(spans, tl.int64) * k_size * c_size
    tl.store(place + which * partial_plane, total, mask=(k < k_size)[:, None] & (c < c_size)[None, :])


@triton.jit
def _store_sums(
    partial, index, spans, k, c, d_sum, p_sum, q_sum, k_size: tl.constexpr, c_size: tl.constexpr, ROTATION: tl.constexpr
):  # fmt: skip
    place = partial + (index.to(tl.int64) * k_size + k)[:, None] * c_size + c[None, :]
    plane = tl.cast(spans, tl.int64) * k_size * c_size
    inside = (k < k_size)[:, None] & (c < c_size)[None, :]
    tl.store(place, d_sum, mask=inside)
    tl.store(place + plane, p_sum, mask=inside)
    if ROTATION:
        tl.store(place + 2 * plane, q_sum, mask=inside)


@planned
def _plan_forward(
    evecs: Tensor, rows: int, k: int, c: int, meshes: int, precision: str, diffused: bool
) -> tuple[Tiling, int, int]:
    """The tiling, the rows of a span, and the number of programs."""
    t = small_tiling(evecs, k, c) or forward_tiling(evecs, k, c, precision, diffused)
    columns = cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(evecs) * t.programs // columns)
    return t, span, span_count(rows, meshes, span) * columns


@planned
def _plan_backward(
    evecs: Tensor, rows: int, k: int, c: int, meshes: int, planes: int, precision: str
) -> tuple[Tiling, int, int, int]:
    """The tiling, the rows of a span, the number of spans, and the tiles of the result of one span."""
    t = backward_tiling(evecs, k, c, precision)
    tiles = cdiv(k, t.k) * cdiv(c, t.c) * (planes if precision == "bf16x6" else 1)
    span = choose_span(rows, t.v, processors(evecs) * t.programs // max(tiles, 1))
    spans = span_count(rows, meshes, span)
    check_programs("spectral_gradient_features", spans, tiles)
    return t, span, spans, tiles


def forward(
    table: Tensor, evecs: Tensor | None, gradient_evecs: Tensor, ptr: Tensor, *, swapped: bool = False
) -> tuple[Tensor, Tensor]:
    """x = Φ D and f: two (V, C)

    table: D, P and, with rotations, Q, as `coefficient_kernels.table` returns them
    evecs (V, K), or None to leave out x, which is then empty
    gradient_evecs (2, V, K)
    swapped: see `ops.gradient_features.op.gradient_features`
    """
    (_, rows, k), (planes, meshes, _, c) = gradient_evecs.shape, table.shape[-4:]
    check_rows("spectral_gradient_features", rows)
    check_matrix("spectral_gradient_features", k, c)
    gradient_evecs, plane_rows = planes_apart(gradient_evecs)
    evecs = evecs if evecs is None else row_major(evecs)
    features = gradient_evecs.new_empty(rows, c)
    diffused = features.new_empty(0 if evecs is None else rows, c)
    if features.numel():
        precision = dot_precision(gradient_evecs)
        t, span, programs = _plan_forward(gradient_evecs, rows, k, c, meshes, precision, evecs is not None)
        some_evecs = gradient_evecs[0] if evecs is None else evecs
        spectral_gradient_features_forward_kernel[(programs,)](
            table, some_evecs, gradient_evecs, ptr, diffused, features,
            rows, meshes, span, plane_rows,
            k, c, some_evecs.stride(0), gradient_evecs.stride(1),
            DIFFUSED=evecs is not None, ROTATION=planes == 3, SWAPPED=swapped, ONE_MESH=meshes == 1,
            ONE_STEP=k <= t.k and part_count(precision) == 1, HALF=is_half(gradient_evecs), PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return diffused, features


def backward(
    grad: Tensor,
    table: Tensor,
    gradient_evecs: Tensor,
    ptr: Tensor,
    *,
    swapped: bool = False,
    values_grad: Tensor | None = None,
    evecs: Tensor | None = None,
    projected: tuple[Tensor, int] | None = None,
    unsummed: Unsummed | None = None,
) -> Tensor:
    """dD, dP and, with rotations, dQ, (2 or 3, B, K, C) in float32, from the gradient (V, C) of f

    For numbers in parts, one kernel would need too many registers. Two kernels then compute the sums. The first one
    writes 16 bytes for each vertex and channel, which the second one reads.

    values_grad, evecs: the gradient (V, C) of x and the evecs (V, K), if x was computed. Φᵀ dx is then one more plane.
    projected: Φᵀ dx of each span and the rows of a span, if another launch has computed it
    swapped: see `ops.gradient_features.op.gradient_features`
    unsummed: see `sum_spans`
    """
    (_, rows, k), (planes, meshes, _, c) = gradient_evecs.shape, table.shape[-4:]
    (gradient_evecs, plane_rows), grad = planes_apart(gradient_evecs), row_major(grad)
    precision = dot_precision(gradient_evecs)
    t, span, spans, tiles = _plan_backward(gradient_evecs, rows, k, c, meshes, planes, precision)
    # With swapped, P and Q have no product with the same operand.
    paired = planes == 3 and not swapped and k <= t.k and precision == "ieee" and gradient_evecs.dtype != torch.float32
    partial = torch.empty(planes, spans, k, c, dtype=torch.float32, device=table.device)
    if partial.numel() and part_count(precision) > 1:
        products = derivatives(grad, table, gradient_evecs, ptr, swapped=swapped)
        kernel, flags = spectral_gradient_features_backward_sums_kernel, {"ROTATION": planes == 3}
        if precision == "bf16x6":
            kernel, flags = spectral_gradient_features_backward_sum_kernel, {}
        kernel[(spans, tiles)](
            products, gradient_evecs, ptr, partial,
            rows, meshes, spans, span, plane_rows, k, c, gradient_evecs.stride(1),
            **flags, SWAPPED=swapped, ONE_MESH=meshes == 1, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    elif partial.numel():
        spectral_gradient_features_backward_kernel[(spans, tiles)](
            grad, table, gradient_evecs, ptr, partial,
            rows, meshes, spans, span, plane_rows, k, c, grad.stride(0), gradient_evecs.stride(1),
            ROTATION=planes == 3, SWAPPED=swapped, PAIRED=paired, ONE_MESH=meshes == 1, ONE_STEP=k <= t.k,
            HALF=is_half(gradient_evecs), PRECISION=precision, EARLY=starts_early(grad),
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    if projected is None and values_grad is not None and evecs is not None:
        projected = project_spans(values_grad, evecs, None, ptr)[:2]
    return sum_spans(partial, ptr, span, other=projected, unsummed=unsummed)


def derivatives(grad: Tensor, table: Tensor, gradient_evecs: Tensor, ptr: Tensor, *, swapped: bool = False) -> Tensor:
    """ds∘b_x, ds∘b_y, ds∘g_x and ds∘g_y with ds = df ∘ (1 − f²): (2, 4, V, C) bfloat16 or (4, V, C) float32

    With swapped, the last two are ds∘(g_x + g_y) and ds∘(g_y − g_x).
    """
    (_, rows, k), (planes, meshes, _, c) = gradient_evecs.shape, table.shape[-4:]
    (gradient_evecs, plane_rows), grad = planes_apart(gradient_evecs), row_major(grad)
    precision = dot_precision(gradient_evecs)
    out = empty_operand(table, (4, rows, c), torch.float32, "ieee" if precision == "bf16x6" else precision)
    if out.numel():
        t, span, programs = _plan_forward(gradient_evecs, rows, k, c, meshes, precision, False)
        spectral_gradient_features_backward_derivatives_kernel[(programs,)](
            grad, table, gradient_evecs, ptr, out,
            rows, meshes, span, plane_rows,
            k, c, grad.stride(0), gradient_evecs.stride(1),
            ROTATION=planes == 3, SWAPPED=swapped, ONE_MESH=meshes == 1, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out
