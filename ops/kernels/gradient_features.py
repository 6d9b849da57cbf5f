"""Gradient features on a basis, and the diffused function with them, from one pass over the rows.

With D the coefficients of the diffused function, P = D A_reᵀ and Q = D A_imᵀ, all (K, C), and G̃ = GΦ (V, K):

    g_x = G̃_X D,  g_y = G̃_Y D,  b_x = G̃_X P − G̃_Y Q,  b_y = G̃_Y P + G̃_X Q,  f = tanh(g_x ∘ b_x + g_y ∘ b_y)

Every column is independent of the others, so a program needs no more than its own columns of D, P and Q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.kernels.ragged import choose_span, span_count, span_rows, sum_spans
from diffnet.ops.kernels.spectral import load_coefficients
from diffnet.ops.kernels.tiling import Tiling, cdiv, interpreted, processors, roomy, rounded, row_major, tile
from diffnet.ops.precision import dot_precision


def forward_tiling(basis: Tensor, k: int, c: int, precision: str) -> Tiling:
    if interpreted(basis):
        return Tiling(16, 16, 16, 4, 1, 1)
    if not roomy(basis):
        return Tiling(32, tile(k, 32), tile(c, 32), 4, 2, 4)
    if basis.dtype != torch.float32:
        return Tiling(64, tile(k, 128), tile(c, 64), 4, 1, 4)
    if precision == "tf32":
        return Tiling(64, tile(k, 128), tile(c, 32), 4, 1, 4)
    return Tiling(32, 16, tile(c, 64), 8, 1, 4)


def backward_tiling(basis: Tensor, k: int, c: int, precision: str) -> Tiling:
    # Three K×C sums and four V×C products live in registers at once: more columns than these spill, and then the
    # compiler runs matrix instructions one by one.
    if interpreted(basis):
        return Tiling(16, 16, 16, 4, 1, 1)
    if not roomy(basis):
        return Tiling(32, tile(k, 32 if basis.dtype == torch.float32 else 128), tile(c, 32), 4, 1, 2)
    if basis.dtype != torch.float32:
        return Tiling(64, tile(k, 128), tile(c, 32), 4, 2, 2)
    if precision == "tf32":
        return Tiling(64, tile(k, 64), tile(c, 32), 8, 1, 2)
    return Tiling(16, tile(k, 32), tile(c, 32), 4, 1, 4)


def fast(x: Tensor) -> bool:
    """See `tanh`."""
    return x.dtype != torch.float32 and not interpreted(x)


@triton.jit
def tanh(z, FAST: tl.constexpr):
    """Finite for every finite z. Near 0, where 1 − e⁻²ᶻ cancels, by its series.

    FAST: the instruction of the GPU, accurate to 11 bits, for results that are rounded to 11 or fewer. The other takes
    some forty, which is a quarter of the time of all.
    """
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    s = z * z
    near = z * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0.0, -far, far))


@triton.jit
def _products(
    gx_at, gy_at, d_at, p_at, q_at, live, k, c, k_size: tl.constexpr, c_size: tl.constexpr,
    ROTATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """g_x, g_y, b_x, b_y (V, C) of a block of rows, in several steps over K."""
    gx = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    gy = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    bx = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    by = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, k_size, BLOCK_K):
        ks = step + k
        inside = live & (ks < k_size)[None, :]
        x = rounded(tl.load(gx_at + ks[None, :], mask=inside, other=0.0), PRECISION)
        y = rounded(tl.load(gy_at + ks[None, :], mask=inside, other=0.0), PRECISION)
        d = load_coefficients(d_at, ks, c, k_size, c_size)
        p = load_coefficients(p_at, ks, c, k_size, c_size)
        gx = tl.dot(x, d, gx, input_precision=PRECISION)
        gy = tl.dot(y, d, gy, input_precision=PRECISION)
        bx = tl.dot(x, p, bx, input_precision=PRECISION)
        by = tl.dot(y, p, by, input_precision=PRECISION)
        if ROTATION:
            q = load_coefficients(q_at, ks, c, k_size, c_size)
            by = tl.dot(x, q, by, input_precision=PRECISION)
            bx -= tl.dot(y, q, input_precision=PRECISION)
    return gx, gy, bx, by


@triton.jit
def _forward_kernel(
    coefficients, basis, gradient, ptr, diffused, features,
    meshes, span, gradient_plane,
    k_size: tl.constexpr, c_size: tl.constexpr, basis_stride: tl.constexpr, gradient_stride: tl.constexpr,
    DIFFUSED: tl.constexpr, ROTATION: tl.constexpr, ONE_MESH: tl.constexpr, ONE_STEP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x = Φ D (if DIFFUSED) and f at the rows of one span. ONE_STEP: D, P, Q fit one tile each and are read once."""
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0) // columns
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, meshes, span, ONE_MESH)
    d_at = coefficients + mesh.to(tl.int64) * k_size * c_size
    p_at = d_at + (mesh * 0 + meshes).to(tl.int64) * k_size * c_size
    q_at = p_at + (mesh * 0 + meshes).to(tl.int64) * k_size * c_size
    in_c = (c < c_size)[None, :]
    if ONE_STEP:
        d = load_coefficients(d_at, k, c, k_size, c_size)
        p = load_coefficients(p_at, k, c, k_size, c_size)
        if ROTATION:
            q = load_coefficients(q_at, k, c, k_size, c_size)
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        wide = tl.cast(row, tl.int64)
        gx_at = gradient + wide * gradient_stride + v * gradient_stride
        gy_at = gradient + gradient_plane + wide * gradient_stride + v * gradient_stride
        out = v * c_size + c[None, :]
        if ONE_STEP:
            inside = live & (k < k_size)[None, :]
            x = rounded(tl.load(gx_at + k[None, :], mask=inside, other=0.0), PRECISION)
            y = rounded(tl.load(gy_at + k[None, :], mask=inside, other=0.0), PRECISION)
            # One component after the other, so that few accumulators live at a time.
            bx = tl.dot(x, p, input_precision=PRECISION)
            if ROTATION:
                bx -= tl.dot(y, q, input_precision=PRECISION)
            z = tl.dot(x, d, input_precision=PRECISION) * bx
            by = tl.dot(y, p, input_precision=PRECISION)
            if ROTATION:
                by = tl.dot(x, q, by, input_precision=PRECISION)
            z += tl.dot(y, d, input_precision=PRECISION) * by
        else:
            gx, gy, bx, by = _products(
                gx_at, gy_at, d_at, p_at, q_at, live, k, c, k_size, c_size,
                ROTATION, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            z = gx * bx + gy * by
        tl.store(features + wide * c_size + out, tanh(z, FAST).to(features.dtype.element_ty), mask=live & in_c)
        if DIFFUSED:
            phi_at = basis + wide * basis_stride + v * basis_stride
            if ONE_STEP:
                phi = rounded(tl.load(phi_at + k[None, :], mask=live & (k < k_size)[None, :], other=0.0), PRECISION)
                value = tl.dot(phi, d, input_precision=PRECISION)
            else:
                value = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
                for step in range(0, k_size, BLOCK_K):
                    ks = step + k
                    phi = rounded(
                        tl.load(phi_at + ks[None, :], mask=live & (ks < k_size)[None, :], other=0.0), PRECISION
                    )
                    d = load_coefficients(d_at, ks, c, k_size, c_size)
                    value = tl.dot(phi, d, value, input_precision=PRECISION)
            tl.store(diffused + wide * c_size + out, value.to(diffused.dtype.element_ty), mask=live & in_c)


@triton.jit
def _backward_kernel(
    grad, coefficients, gradient, ptr, partial,
    meshes, spans, span, gradient_plane,
    k_size: tl.constexpr, c_size: tl.constexpr, grad_stride: tl.constexpr, gradient_stride: tl.constexpr,
    ROTATION: tl.constexpr, ONE_MESH: tl.constexpr, ONE_STEP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dD, dP, dQ (K, C) summed over the rows of one span, into the planes of `partial`.

    With ds = df ∘ (1 − f²): dD = G̃_Xᵀ(ds∘b_x) + G̃_Yᵀ(ds∘b_y), dP = G̃_Xᵀ(ds∘g_x) + G̃_Yᵀ(ds∘g_y),
    dQ = G̃_Xᵀ(ds∘g_y) − G̃_Yᵀ(ds∘g_x). Only inputs are read; what the forward computed is computed again.
    """
    columns = tl.cdiv(c_size, BLOCK_C)
    index = tl.program_id(0)
    which = tl.program_id(1)
    c = (which % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = (which // columns) * BLOCK_K + tl.arange(0, BLOCK_K)  # the rows of dD, dP, dQ that this program adds up
    k = tl.arange(0, BLOCK_K)
    mesh, first, last = span_rows(index, ptr, meshes, span, ONE_MESH)
    d_at = coefficients + mesh.to(tl.int64) * k_size * c_size
    p_at = d_at + (mesh * 0 + meshes).to(tl.int64) * k_size * c_size
    q_at = p_at + (mesh * 0 + meshes).to(tl.int64) * k_size * c_size
    dtype = gradient.dtype.element_ty
    if ONE_STEP:
        d = load_coefficients(d_at, k, c, k_size, c_size)
        p = load_coefficients(p_at, k, c, k_size, c_size)
        if ROTATION:
            q = load_coefficients(q_at, k, c, k_size, c_size)
            n = -q
    d_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    p_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    q_sum = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        wide = tl.cast(row, tl.int64)
        gx_at = gradient + wide * gradient_stride + v * gradient_stride
        gy_at = gradient + gradient_plane + wide * gradient_stride + v * gradient_stride
        own_inside = live & (own < k_size)[None, :]
        inside = live & (c < c_size)[None, :]
        x = rounded(tl.load(gx_at + own[None, :], mask=own_inside, other=0.0), PRECISION)
        y = rounded(tl.load(gy_at + own[None, :], mask=own_inside, other=0.0), PRECISION)
        if ONE_STEP:
            # One component after the other; each product is rounded, as the sums below take it, once z has it. That
            # halves the registers that it waits in.
            bx = tl.dot(x, p, input_precision=PRECISION)
            if ROTATION:
                bx = tl.dot(y, n, bx, input_precision=PRECISION)
            gx = tl.dot(x, d, input_precision=PRECISION)
            z = gx * bx
            gx = gx.to(dtype)
            bx = bx.to(dtype)
            by = tl.dot(y, p, input_precision=PRECISION)
            if ROTATION:
                by = tl.dot(x, q, by, input_precision=PRECISION)
            gy = tl.dot(y, d, input_precision=PRECISION)
            z += gy * by
            gy = gy.to(dtype)
            by = by.to(dtype)
        else:
            gx, gy, bx, by = _products(
                gx_at, gy_at, d_at, p_at, q_at, live, k, c, k_size, c_size,
                ROTATION, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            z = gx * bx + gy * by
        f = tanh(z, FAST)
        df = tl.load(grad + wide * grad_stride + (v * grad_stride + c[None, :]), mask=inside, other=0.0)
        ds = df.to(tl.float32) * (1.0 - f * f)
        xt = tl.trans(x)
        yt = tl.trans(y)
        d_sum = tl.dot(xt, rounded((ds * bx).to(dtype), PRECISION), d_sum, input_precision=PRECISION)
        d_sum = tl.dot(yt, rounded((ds * by).to(dtype), PRECISION), d_sum, input_precision=PRECISION)
        px = rounded((ds * gx).to(dtype), PRECISION)
        py = rounded((ds * gy).to(dtype), PRECISION)
        p_sum = tl.dot(xt, px, p_sum, input_precision=PRECISION)
        p_sum = tl.dot(yt, py, p_sum, input_precision=PRECISION)
        if ROTATION:
            q_sum = tl.dot(xt, py, q_sum, input_precision=PRECISION)
            q_sum = tl.dot(yt, -px, q_sum, input_precision=PRECISION)
    place = partial + (index.to(tl.int64) * k_size + own)[:, None] * c_size + c[None, :]
    plane = (index * 0 + spans).to(tl.int64) * k_size * c_size
    stored = (own < k_size)[:, None] & (c < c_size)[None, :]
    tl.store(place, d_sum, mask=stored)
    tl.store(place + plane, p_sum, mask=stored)
    if ROTATION:
        tl.store(place + 2 * plane, q_sum, mask=stored)


def forward(
    table: Tensor, basis: Tensor | None, gradient_basis: Tensor, ptr: Tensor, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """x = Φ D and f: basis (V, K), gradient_basis (2, V, K) → two (V, C).

    table: D, P and, with rotations, Q, (2 or 3, B, K, C) in the basis' dtype. basis = None leaves x out: it is empty
    then.
    """
    (_, rows, k), (planes, meshes, _, c) = gradient_basis.shape, table.shape
    gradient_basis = row_major(gradient_basis)
    basis = basis if basis is None else row_major(basis)
    features = gradient_basis.new_empty(rows, c)
    diffused = features.new_empty(0 if basis is None else rows, c)
    if features.numel():
        precision = dot_precision(gradient_basis)
        t = tiling or forward_tiling(gradient_basis, k, c, precision)
        columns = cdiv(c, t.c)
        span = choose_span(rows, t.v, processors(table) * t.programs // columns)
        some_basis = gradient_basis[0] if basis is None else basis
        with torch.cuda.device_of(gradient_basis):
            _forward_kernel[(span_count(rows, meshes, span) * columns,)](
                table, some_basis, gradient_basis, ptr, diffused, features,
                meshes, span, gradient_basis.stride(0), k, c, some_basis.stride(0), gradient_basis.stride(1),
                DIFFUSED=basis is not None, ROTATION=planes == 3, ONE_MESH=meshes == 1, ONE_STEP=k <= t.k,
                FAST=fast(gradient_basis), PRECISION=precision, BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c,
                num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip
    return diffused, features


def backward(grad: Tensor, table: Tensor, gradient_basis: Tensor, ptr: Tensor, tiling: Tiling | None = None) -> Tensor:
    """dD, dP and, with rotations, dQ: as the table, but float32, from the gradient (V, C) of the features."""
    (_, rows, k), (planes, meshes, _, c) = gradient_basis.shape, table.shape
    gradient_basis, grad = row_major(gradient_basis), row_major(grad)
    precision = dot_precision(gradient_basis)
    t = tiling or backward_tiling(gradient_basis, k, c, precision)
    tiles = cdiv(k, t.k) * cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(table) * t.programs // max(tiles, 1))
    spans = span_count(rows, meshes, span)
    partial = torch.empty(planes, spans, k, c, dtype=torch.float32, device=table.device)
    if partial.numel():
        with torch.cuda.device_of(gradient_basis):
            _backward_kernel[(spans, tiles)](
                grad, table, gradient_basis, ptr, partial,
                meshes, spans, span, gradient_basis.stride(0), k, c, grad.stride(0), gradient_basis.stride(1),
                ROTATION=planes == 3, ONE_MESH=meshes == 1, ONE_STEP=k <= t.k,
                FAST=fast(gradient_basis), PRECISION=precision, BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c,
                num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip
    return sum_spans(partial, ptr, span)
