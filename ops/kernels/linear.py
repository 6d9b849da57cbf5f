"""A layer of an MLP on several inputs that are nowhere put side by side: products, bias, ReLU, dropout and residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.kernels.products import product, split, transposed
from diffnet.ops.kernels.ragged import choose_span, processors
from diffnet.ops.kernels.tiling import Tiling, interpreted, roomy, row_major, tile
from diffnet.ops.precision import dot_precision


def linear_tiling(x: Tensor, k: int, c: int, precision: str) -> Tiling:
    if interpreted(x):
        return Tiling(16, 16, 16, 4, 1, 1)
    if not roomy(x):
        return Tiling(32, tile(k, 32), tile(c, 32), 4, 2, 4)
    if x.dtype != torch.float32:
        return Tiling(64, tile(k, 64), tile(c, 128), 4, 3, 1)
    if precision == "bf16x3":
        return Tiling(128, tile(k, 32), tile(c, 128), 8, 3, 1)
    return Tiling(64, 16, tile(c, 64), 8, 2, 1)


@triton.jit
def _mix(h):
    """A bijection of 32 bits in which every bit of the input flips every bit of the output half of the time."""
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h


@triton.jit
def random_bits(seed, rows, c):
    """32 random bits for each place (rows, c), from a seed of two words. A counter that is hashed twice: Philox would
    take more time in integer arithmetic than the layer takes for the rest."""
    low = tl.load(seed).to(tl.uint32)
    high = tl.load(seed + 1).to(tl.uint32)
    by_row = _mix(rows.to(tl.uint32) ^ low)
    return _mix(_mix(by_row[:, None] + c.to(tl.uint32)[None, :] * 0x9E3779B9) ^ high)


@triton.jit
def _linear_kernel(
    first, second, third, weight, bias, residual, seed, out,
    rows_size, threshold, keep_scale, in_size: tl.constexpr, out_size: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, residual_stride: tl.constexpr,
    INPUTS: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = residual + dropout(relu(Σᵢ xᵢ Wᵢᵀ + b)), W = [W₁ W₂ W₃] row by row."""
    columns = tl.cdiv(out_size, BLOCK_C)
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = (tl.program_id(0) // columns) * BLOCK_V + tl.arange(0, BLOCK_V)
    wide = rows.to(tl.int64)
    live = rows < rows_size
    in_c = c < out_size
    y = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for i in tl.static_range(INPUTS):
        if i == 0:
            x_at = first + wide[:, None] * first_stride
        elif i == 1:
            x_at = second + wide[:, None] * second_stride
        else:
            x_at = third + wide[:, None] * third_stride
        for step in range(0, in_size, BLOCK_K):
            k = step + tl.arange(0, BLOCK_K)
            in_k = k < in_size
            x = tl.load(x_at + k[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
            at = weight + c[:, None] * (INPUTS * in_size) + (i * in_size + k)[None, :]
            w = tl.load(at, mask=in_c[:, None] & in_k[None, :], other=0.0)
            y = product(split(x, PRECISION), transposed(split(w, PRECISION)), y, PRECISION)
    if BIAS:
        y += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # lets NaN through
    if DROPOUT:
        y = tl.where(random_bits(seed, rows, c) < threshold.to(tl.uint32), 0.0, y * keep_scale)
    inside = live[:, None] & in_c[None, :]
    if RESIDUAL:
        y += tl.load(residual + wide[:, None] * residual_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + wide[:, None] * out_size + c[None, :], y.to(out.dtype.element_ty), mask=inside)


def linear(
    inputs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    dropout: float,
    seed: Tensor | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """inputs: one to three (V, C), weight (H, inputs·C) in their dtype, bias (H,), residual (V, H), seed (2,) int64

    → (V, H) in the inputs' dtype
    """
    rows, c = inputs[0].shape
    h = len(weight)
    inputs = [row_major(x) for x in inputs]
    first, second, third = (*inputs, *inputs[:1], *inputs[:1])[:3]
    weight = weight.contiguous()
    residual = residual if residual is None else row_major(residual)
    out = first.new_empty(rows, h)
    if out.numel():
        precision = dot_precision(first)
        t = tiling or linear_tiling(first, c, h, precision)
        some_residual = out if residual is None else residual
        with torch.cuda.device_of(out):
            _linear_kernel[(triton.cdiv(rows, t.v) * triton.cdiv(h, t.c),)](
                first, second, third, weight, weight if bias is None else bias.contiguous(), some_residual,
                weight if seed is None else seed, out,
                rows, drop_threshold(dropout), 1 / (1 - dropout), c, h,
                first.stride(0), second.stride(0), third.stride(0), some_residual.stride(0),
                INPUTS=len(inputs), BIAS=bias is not None, RELU=relu, DROPOUT=seed is not None,
                RESIDUAL=residual is not None, PRECISION=precision,
                BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip
    return out


def drop_threshold(dropout: float) -> int:
    """Of 2³² equally likely words, so many are to be dropped."""
    return min(round(dropout * 2**32), 2**32 - 1)


@triton.jit
def _activation_backward_kernel(
    grad, out, y_grad, partial, rows_size, span, keep_scale, c_size: tl.constexpr, grad_stride: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dy = keep_scale dout where out > 0, else 0; and its column sums over one span of rows."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < c_size
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, rows_size)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(first, last, BLOCK_V):
        rows = row + tl.arange(0, BLOCK_V)
        wide = rows.to(tl.int64)
        inside = (rows < last)[:, None] & in_c[None, :]
        at = wide[:, None] * c_size + c[None, :]
        value = tl.load(out + at, mask=inside, other=0.0)
        g = tl.load(grad + wide[:, None] * grad_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.where(value > 0.0, g * keep_scale, 0.0)
        tl.store(y_grad + at, g.to(y_grad.dtype.element_ty), mask=inside)
        total += tl.sum(g, axis=0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * c_size + c, total, mask=in_c)


def activation_backward(grad: Tensor, out: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """The gradient (V, H) before ReLU and dropout, and its sum over the rows (H,) float32.

    An output above 0 is one that ReLU let through and dropout kept, so neither left a mask behind.
    """
    rows, h = out.shape
    grad, out = row_major(grad), out.contiguous()
    y_grad = torch.empty_like(out)
    block_v, block_c = (16, 16) if interpreted(out) else (32, tile(h, 128))
    span = choose_span(rows, block_v, processors(out) * 4)
    spans = triton.cdiv(rows, span)
    partial = torch.empty(spans, h, dtype=torch.float32, device=out.device)
    if out.numel():
        with torch.cuda.device_of(out):
            _activation_backward_kernel[(spans, triton.cdiv(h, block_c))](
                grad, out, y_grad, partial, rows, span, 1 / (1 - dropout), h, grad.stride(0),
                BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4,
            )  # fmt: skip
    return y_grad, partial.sum(0)
