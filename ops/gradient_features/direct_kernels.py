"""Gradient features of given gradients: the complex product and tanh in one kernel, without intermediates in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_matrix, check_rows
from diffnet.ops.common.matmul import less_product, product, split, transposed
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.tiling import SIZES, Tiling, cdiv, on_blackwell, planes_apart, row_major, small_tiling, tile
from diffnet.ops.gradient_features.kernels import is_half, tanh


def direct_tiling(a: Tensor, c: int, precision: str, rotates: bool) -> Tiling:
    if a.dtype != torch.float32:
        return Tiling(64, tile(c, 64), tile(c, 64), 4, 3, 1)
    if precision == "bf16x3":
        # Triton 3.6 fails to pipeline the loop for Blackwell without a rotation.
        return Tiling(64, tile(c, 32), tile(c, 64), 4, 3 if rotates or not on_blackwell(a) else 1, 1)
    return Tiling(64, tile(c, 32), tile(c, 32), 4, 3, 1)


@triton.jit
def _products(
    x_at, y_at, a_re, a_im, c, live, c_size: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return g_x, g_y, b_x and b_y of a tile, with b = A g. With SWAPPED, b_y = A_re g_x + A_im g_y."""
    dtype = a_re.dtype.element_ty
    bx = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    by = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, c_size, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        inside = live[:, None] & (k < c_size)[None, :]
        at = c[:, None] * c_size + k[None, :]
        stored = (c < c_size)[:, None] & (k < c_size)[None, :]
        re = transposed(split(tl.load(a_re + at, mask=stored, other=0.0), PRECISION))
        if ROTATION:
            im = transposed(split(tl.load(a_im + at, mask=stored, other=0.0), PRECISION))
        x = split(tl.load(x_at + k[None, :], mask=inside, other=0.0).to(dtype), PRECISION)
        bx = product(x, re, bx, PRECISION)
        if ROTATION and not SWAPPED:
            by = product(x, im, by, PRECISION)
        y = split(tl.load(y_at + k[None, :], mask=inside, other=0.0).to(dtype), PRECISION)
        if SWAPPED:
            by = product(y, im, by, PRECISION)
        else:
            by = product(y, re, by, PRECISION)
            if ROTATION:
                bx = less_product(y, im, bx, PRECISION)
    inside = live[:, None] & (c < c_size)[None, :]
    gx = tl.load(x_at + c[None, :], mask=inside, other=0.0).to(tl.float32)
    gy = tl.load(y_at + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if SWAPPED:
        return gx, gy, bx - by, bx + by
    return gx, gy, bx, by


@triton.jit
def _tile_place(rows_size, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the rows and columns of this program's tile, and which rows exist."""
    columns = tl.cdiv(c_size, BLOCK_C)
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = (tl.program_id(0) // columns) * BLOCK_V + tl.arange(0, BLOCK_V)
    return rows.to(tl.int64), c, rows < rows_size


@launched
@triton.jit(do_not_specialize=SIZES)
def gradient_features_forward_kernel(
    gradients, a_re, a_im, out, rows_size, plane_rows, c_size: tl.constexpr, gradients_stride: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, c, live = _tile_place(rows_size, c_size, BLOCK_V, BLOCK_C)
    x_at = gradients + rows[:, None] * gradients_stride
    y_at = x_at + tl.cast(plane_rows, tl.int64) * gradients_stride
    gx, gy, bx, by = _products(
        x_at, y_at, a_re, a_im, c, live, c_size, ROTATION, SWAPPED, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C
    )  # fmt: skip
    f = tanh(gx * bx + gy * by, HALF)
    inside = live[:, None] & (c < c_size)[None, :]
    tl.store(out + rows[:, None] * c_size + c[None, :], f.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=SIZES)
def gradient_features_backward_kernel(
    grad, gradients, a_re, a_im, out, rows_size, plane_rows,
    c_size: tl.constexpr, gradients_stride: tl.constexpr, grad_stride: tl.constexpr,
    ROTATION: tl.constexpr, SWAPPED: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = ds∘b_x, ds∘b_y, ds∘g_x, ds∘g_y (4, V, C) with ds = df ∘ (1 − f²)."""
    rows, c, live = _tile_place(rows_size, c_size, BLOCK_V, BLOCK_C)
    x_at = gradients + rows[:, None] * gradients_stride
    y_at = x_at + tl.cast(plane_rows, tl.int64) * gradients_stride
    gx, gy, bx, by = _products(
        x_at, y_at, a_re, a_im, c, live, c_size, ROTATION, SWAPPED, PRECISION, BLOCK_V, BLOCK_K, BLOCK_C
    )  # fmt: skip
    f = tanh(gx * bx + gy * by, HALF)
    inside = live[:, None] & (c < c_size)[None, :]
    df = tl.load(grad + rows[:, None] * grad_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    ds = df * (1.0 - f * f)
    dtype = out.dtype.element_ty
    at = out + rows[:, None] * c_size + c[None, :]
    plane = tl.cast(rows_size, tl.int64) * c_size
    tl.store(at, (ds * bx).to(dtype), mask=inside)
    tl.store(at + plane, (ds * by).to(dtype), mask=inside)
    at += 2 * plane
    tl.store(at, (ds * gx).to(dtype), mask=inside)
    tl.store(at + plane, (ds * gy).to(dtype), mask=inside)


def forward(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool) -> Tensor:
    """f (V, C) in A's dtype. The gradients (2, V, C) may have another dtype; only the products round them to A's."""
    _, rows, c = gradients.shape
    check_rows("gradient_features", rows)
    check_matrix("gradient_features", c, c)
    (gradients, plane_rows), a_re = planes_apart(gradients), a_re.contiguous()
    out = a_re.new_empty(rows, c)
    if out.numel():
        precision = dot_precision(a_re)
        t = small_tiling(a_re, c, c) or direct_tiling(a_re, c, precision, a_im is not None)
        gradient_features_forward_kernel[(cdiv(rows, t.v) * cdiv(c, t.c),)](
            gradients, a_re, a_re if a_im is None else a_im.contiguous(), out,
            rows, plane_rows, c, gradients.stride(1),
            ROTATION=a_im is not None, SWAPPED=swapped, HALF=is_half(a_re), PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


def pointwise_backward(grad: Tensor, gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool) -> Tensor:
    """ds∘b_x, ds∘b_y, ds∘g_x and ds∘g_y (4, V, C). Products of these with A and with the gradients give the rest."""
    _, rows, c = gradients.shape
    (gradients, plane_rows), a_re, grad = planes_apart(gradients), a_re.contiguous(), row_major(grad)
    out = a_re.new_empty(4, rows, c)
    if out.numel():
        precision = dot_precision(a_re)
        t = small_tiling(a_re, c, c) or direct_tiling(a_re, c, precision, a_im is not None)
        gradient_features_backward_kernel[(cdiv(rows, t.v) * cdiv(c, t.c),)](
            grad, gradients, a_re, a_re if a_im is None else a_im.contiguous(), out,
            rows, plane_rows, c, gradients.stride(1), grad.stride(0),
            ROTATION=a_im is not None, SWAPPED=swapped, HALF=is_half(a_re), PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out
