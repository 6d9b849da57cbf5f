"""Kernels of a block's MLP that keep weights in shared memory and sums in registers while they walk along the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from diffnet.ops.common.launch import SIZES
from diffnet.ops.common.launcher import launched
from diffnet.ops.common.matmul import load, product, split, split_transpose, transposed
from diffnet.ops.mlp.linear_kernels import activated


@triton.jit
def weight_of(weight, part, parts: tl.constexpr, c_size: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """Load the weights (C, C) of one of several inputs as an operand."""
    c = tl.arange(0, BLOCK)
    inside = (c < c_size)[:, None] & (c < c_size)[None, :]
    at = weight + c[:, None] * (parts * c_size) + (part * c_size + c)[None, :]
    return load(at, parts * c_size * c_size, inside, PRECISION)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_forward_resident_kernel(
    first, second, third, weight1, weight2, weight3, bias1, bias2, bias3, residual, seeds, hidden1, hidden2, out,
    rows_size, threshold, keep_scale, c_size: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, residual_stride: tl.constexpr,
    INPUTS: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute all three layers. A program keeps all weights, and loads the next tile while it computes one."""
    c = tl.arange(0, BLOCK_C)
    in_c = (c < c_size)[None, :]
    v = tl.arange(0, BLOCK_V)[:, None]
    dtype = out.dtype.element_ty
    w1 = transposed(weight_of(weight1, 0, INPUTS, c_size, PRECISION, BLOCK_C))
    if INPUTS > 1:
        w1_second = transposed(weight_of(weight1, 1, INPUTS, c_size, PRECISION, BLOCK_C))
    if INPUTS > 2:
        w1_third = transposed(weight_of(weight1, 2, INPUTS, c_size, PRECISION, BLOCK_C))
    w2 = transposed(weight_of(weight2, 0, 1, c_size, PRECISION, BLOCK_C))
    w3 = transposed(weight_of(weight3, 0, 1, c_size, PRECISION, BLOCK_C))
    for index in range(tl.program_id(0), tl.cdiv(rows_size, BLOCK_V), tl.num_programs(0)):
        start = tl.cast(index, tl.int64) * BLOCK_V
        rows = index * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (rows < rows_size)[:, None] & in_c
        x = tl.load(first + start * first_stride + (v * first_stride + c[None, :]), mask=inside, other=0.0)
        y = product(split(x, PRECISION), w1, None, PRECISION)
        if INPUTS > 1:
            x2 = tl.load(second + start * second_stride + (v * second_stride + c[None, :]), mask=inside, other=0.0)
            y = product(split(x2, PRECISION), w1_second, y, PRECISION)
        if INPUTS > 2:
            x3 = tl.load(third + start * third_stride + (v * third_stride + c[None, :]), mask=inside, other=0.0)
            y = product(split(x3, PRECISION), w1_third, y, PRECISION)
        at = start * c_size + (v * c_size + c[None, :])
        h = activated(y, bias1, seeds, rows, c, threshold, keep_scale, c_size, BIAS, True, DROPOUT).to(dtype)
        if c_size != BLOCK_C:  # an infinite x times the zeros beyond the last channel is NaN
            h = tl.where(in_c, h, 0.0)
        if KEEP:
            tl.store(hidden1 + at, h, mask=inside)
        y = product(split(h, PRECISION), w2, None, PRECISION)
        h = activated(y, bias2, seeds + 2, rows, c, threshold, keep_scale, c_size, BIAS, True, DROPOUT).to(dtype)
        if c_size != BLOCK_C:
            h = tl.where(in_c, h, 0.0)
        if KEEP:
            tl.store(hidden2 + at, h, mask=inside)
        y = product(split(h, PRECISION), w3, None, PRECISION)
        y = activated(y, bias3, seeds, rows, c, threshold, keep_scale, c_size, BIAS, False, False)
        if RESIDUAL:
            added = residual + start * residual_stride + (v * residual_stride + c[None, :])
            y += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(dtype), mask=inside)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_backward_hidden_kernel(
    grad, weight2, weight3, hidden1, hidden2, grad1, partial,
    rows_size, keep_scale, c_size: tl.constexpr, grad_stride: tl.constexpr, size: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Go back to the first layer's output before its activation.

    Each program writes its sums over rows: the gradients of both layers' weights, second layer first, then of both
    layers' biases.
    """
    c = tl.arange(0, BLOCK_C)
    in_c = (c < c_size)[None, :]
    v = tl.arange(0, BLOCK_V)[:, None]
    w2 = weight_of(weight2, 0, 1, c_size, PRECISION, BLOCK_C)
    w3 = weight_of(weight3, 0, 1, c_size, PRECISION, BLOCK_C)
    dtype = grad1.dtype.element_ty
    ones = split(tl.full((BLOCK_V, 16), 1.0, dtype), PRECISION)  # sums of columns as products
    total2 = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    total3 = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    bias2 = tl.zeros((BLOCK_C, 16), tl.float32)
    bias3 = tl.zeros((BLOCK_C, 16), tl.float32)
    for index in range(tl.program_id(0), tl.cdiv(rows_size, BLOCK_V), tl.num_programs(0)):
        start = tl.cast(index, tl.int64) * BLOCK_V
        inside = (index * BLOCK_V + v < rows_size) & in_c
        at = start * c_size + (v * c_size + c[None, :])
        g = tl.load(grad + start * grad_stride + (v * grad_stride + c[None, :]), mask=inside, other=0.0)
        h2 = tl.load(hidden2 + at, mask=inside, other=0.0)
        h1 = tl.load(hidden1 + at, mask=inside, other=0.0)
        y = product(split(g, PRECISION), w3, None, PRECISION)
        g_transposed = split_transpose(g, PRECISION)
        total3 = product(g_transposed, split(h2, PRECISION), total3, PRECISION)
        bias3 = product(g_transposed, ones, bias3, PRECISION)
        y = tl.where(h2 > 0.0, y * keep_scale, 0.0).to(dtype)
        y_transposed = transposed(split(y, PRECISION))
        total2 = product(y_transposed, split(h1, PRECISION), total2, PRECISION)
        bias2 = product(y_transposed, ones, bias2, PRECISION)
        y = product(split(y, PRECISION), w2, None, PRECISION)
        y = tl.where(h1 > 0.0, y * keep_scale, 0.0).to(dtype)
        tl.store(grad1 + at, y, mask=inside)
    base = partial + tl.program_id(0).to(tl.int64) * size
    at = c[:, None] * c_size + c[None, :]
    live = (c < c_size)[:, None] & in_c
    tl.store(base + at, total2, mask=live)
    tl.store(base + c_size * c_size + at, total3, mask=live)
    one = (tl.arange(0, 16) == 0)[None, :]
    tl.store(base + 2 * c_size * c_size + c, tl.sum(tl.where(one, bias2, 0.0), axis=1), mask=c < c_size)
    tl.store(base + 2 * c_size * c_size + c_size + c, tl.sum(tl.where(one, bias3, 0.0), axis=1), mask=c < c_size)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_backward_inputs_kernel(
    grad1, grad, first, second, third, weight1, out, partial,
    rows_size, plane_rows, c_size: tl.constexpr, grad_stride: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, size: tl.constexpr,
    PARTS: tl.constexpr, SKIP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one of the first layer's inputs, and sum the gradient of its weights over the rows.

    The programs for one span of rows lie side by side, so that they read the gradient of the layer's output together.
    """
    part = tl.program_id(0) % PARTS
    c = tl.arange(0, BLOCK_C)
    in_c = (c < c_size)[None, :]
    v = tl.arange(0, BLOCK_V)[:, None]
    w = weight_of(weight1, part, PARTS, c_size, PRECISION, BLOCK_C)
    dtype = out.dtype.element_ty
    x_at = first
    stride = first_stride
    if PARTS > 1:
        x_at = tl.where(part == 1, second, x_at)
        stride = tl.where(part == 1, second_stride, stride)
    if PARTS > 2:
        x_at = tl.where(part == 2, third, x_at)
        stride = tl.where(part == 2, third_stride, stride)
    if first_stride == second_stride and second_stride == third_stride:
        stride = first_stride
    plane = out + part.to(tl.int64) * plane_rows * c_size
    ones = split(tl.full((BLOCK_V, 16), 1.0, dtype), PRECISION)
    total = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    bias = tl.zeros((BLOCK_C, 16), tl.float32)
    for index in range(tl.program_id(0) // PARTS, tl.cdiv(rows_size, BLOCK_V), tl.num_programs(0) // PARTS):
        start = tl.cast(index, tl.int64) * BLOCK_V
        inside = (index * BLOCK_V + v < rows_size) & in_c
        at = start * c_size + (v * c_size + c[None, :])
        g1 = tl.load(grad1 + at, mask=inside, other=0.0)
        x = tl.load(x_at + start * stride + (v * stride + c[None, :]), mask=inside, other=0.0)
        z = product(split(g1, PRECISION), w, None, PRECISION)
        transpose = split_transpose(g1, PRECISION)
        total = product(transpose, split(x, PRECISION), total, PRECISION)
        bias = product(transpose, ones, bias, PRECISION)
        if SKIP:
            g_at = grad + start * grad_stride + (v * grad_stride + c[None, :])
            z += tl.load(g_at, mask=inside & (part == 0), other=0.0).to(tl.float32)
        tl.store(plane + at, z.to(dtype), mask=inside)
    base = partial + (tl.program_id(0) // PARTS).to(tl.int64) * size
    live = (c < c_size)[:, None] & in_c
    tl.store(base + c[:, None] * (PARTS * c_size) + (part * c_size + c[None, :]), total, mask=live)
    if part == 0:
        one = (tl.arange(0, 16) == 0)[None, :]
        at = base + PARTS * c_size * c_size + c
        tl.store(at, tl.sum(tl.where(one, bias, 0.0), axis=1), mask=c < c_size)
