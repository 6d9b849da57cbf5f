"""A layer of an MLP on several inputs, without concatenating them: products, bias, ReLU, dropout and residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.matmul import load, product, split, transposed
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.tiling import (
    SIZES,
    Tiling,
    aligned,
    cdiv,
    empty_planes,
    on_hopper,
    processors,
    row_major,
    small_tiling,
    tile,
)
from diffnet.ops.mlp.dropout_kernels import dropped, threshold_and_scale, word_count


def linear_tiling(x: Tensor, k: int, c: int, inputs: int) -> Tiling:
    if x.dtype != torch.float32 and max(k, c) > 128 and len(x) >= 2**16:
        # Half as many programs read the weights. A layer on three inputs takes 7 % less time, their gradients 8 %.
        return Tiling(128, tile(k, 64), tile(c, 128), 8 if inputs > 1 else 4, 3, 1)
    if x.dtype != torch.float32:
        return Tiling(64, tile(k, 64), tile(c, 128), 4, 3, 1)
    if dot_precision(x) == "bf16x6":
        return Tiling(64, tile(k, 64), tile(c, 128), 4, 2, 1)
    return Tiling(64, tile(k, 32), tile(c, 128), 4, 3, 1)


@triton.jit
def activated(
    y, bias, seed, rows, c, threshold, keep_scale, size: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return relu(dropout(y + b)); each of the three is optional. WORDS: see `draw`, 0 for no dropout"""
    if BIAS:
        y += tl.load(bias + c, mask=c < size, other=0.0).to(tl.float32)[None, :]
    if WORDS > 0:  # ahead of ReLU, because the compiler would convert y to 16 bits before it chooses
        y = tl.where(dropped(seed, rows, c, threshold, WORDS), 0.0, y)
    if RELU:
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y * keep_scale if WORDS > 0 else y


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_forward_linear_kernel(
    first, second, third, weight, bias, residual, hidden, seed, out,
    rows_size, plane_rows, threshold, keep_scale,
    in_size: tl.constexpr, out_size: tl.constexpr, part_size: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, residual_stride: tl.constexpr,
    INPUTS: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, WORDS: tl.constexpr,
    MASKED: tl.constexpr, RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = Σᵢ xᵢ Wᵢᵀ + b with W = [W₁ W₂ W₃], or x W (TRANSPOSED, which the backward launches).

    ReLU, dropout, a mask and a residual follow, each optional. MASKED: y is 0 where `hidden` is. W is what `operands`
    returns. Every part_size columns are a separate matrix in `out`, and the first of them gets the residual.
    """
    columns = tl.cdiv(out_size, BLOCK_C)
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = (tl.program_id(0) // columns) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows64 = rows.to(tl.int64)
    live = rows < rows_size
    in_c = c < out_size
    apart: tl.constexpr = INPUTS * in_size * out_size
    y = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for i in tl.static_range(INPUTS):
        if i == 0:
            x_at = first + rows64[:, None] * first_stride
        elif i == 1:
            x_at = second + rows64[:, None] * second_stride
        else:
            x_at = third + rows64[:, None] * third_stride
        for step in range(0, in_size, BLOCK_K):
            k = step + tl.arange(0, BLOCK_K)
            in_k = k < in_size
            x = tl.load(x_at + k[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
            if TRANSPOSED:
                at = weight + k[:, None] * out_size + c[None, :]
                w = load(at, apart, in_k[:, None] & in_c[None, :], PRECISION)
            else:
                at = weight + c[:, None] * (INPUTS * in_size) + (i * in_size + k)[None, :]
                w = transposed(load(at, apart, in_c[:, None] & in_k[None, :], PRECISION))
            y = product(split(x, PRECISION), w, y, PRECISION)
    inside = live[:, None] & in_c[None, :]
    y = activated(y, bias, seed, rows, c, threshold, keep_scale, out_size, BIAS, RELU, WORDS)
    if MASKED:
        h = tl.load(hidden + rows64[:, None] * out_size + c[None, :], mask=inside, other=0.0)
        y = tl.where(h > 0.0, y * keep_scale, 0.0)
    if RESIDUAL:
        at = residual + rows64[:, None] * residual_stride + c[None, :]
        y += tl.load(at, mask=live[:, None] & (c < part_size)[None, :], other=0.0).to(tl.float32)
    place = out + rows64[:, None] * part_size
    if part_size == out_size:
        place += c[None, :]
    else:
        place += (c // part_size).to(tl.int64)[None, :] * plane_rows * part_size + (c % part_size)[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=inside)


def linear(
    inputs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + dropout(relu([x₁ … xₙ] Wᵀ + b)); ReLU and dropout with `activation` only

    inputs: one to three (V, C); weight: (H, inputs·C) as `matmul.operands` returns it; bias (H,); residual (V, H);
    seed (2,) int64 for dropout → (V, H) in the inputs' dtype
    """
    return _launch(inputs, weight, False, 1, bias, residual, None, activation, dropout, seed)[0]


def linear_backward(grad: Tensor, weight: Tensor, *, hidden: Tensor, dropout: float = 0.0) -> Tensor:
    """dx = dy W, back through the ReLU and the dropout that computed x

    dy (V, H), weight (H, C) as `matmul.operands` returns it, hidden (V, C) → (V, C). `hidden` is x: a unit above 0 was
    neither cut off by ReLU nor dropped, so no mask is needed.
    """
    return _launch([grad], weight, True, 1, None, None, hidden, False, dropout, None)[0]


def inputs_backward(grad: Tensor, weight: Tensor, parts: int, residual: Tensor | None) -> Tensor:
    """dx₁ … dxₙ (n, V, C) with [dx₁ … dxₙ] = dy W

    dy (V, H), weight (H, n·C) as `matmul.operands` returns it; residual (V, C) is added to dx₁
    """
    return _launch([grad], weight, True, parts, None, residual, None, False, 0.0, None)


def _launch(
    inputs: Sequence[Tensor],
    weight: Tensor,
    transposed: bool,
    parts: int,
    bias: Tensor | None,
    residual: Tensor | None,
    hidden: Tensor | None,
    activation: bool,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    (rows, c), out_size = inputs[0].shape, weight.shape[-1 if transposed else -2]
    bare = len(inputs) == parts == 1 and residual is None and hidden is None and not activation
    if bare and _cublas_is_faster(inputs[0], out_size):
        # Both parts of the weight add up to more digits than tf32 has.
        matrix = weight.sum(0, dtype=torch.float32)
        matrix = matrix if transposed else matrix.mT
        return (inputs[0] @ matrix if bias is None else torch.addmm(bias.float(), inputs[0], matrix))[None]
    fits_hopper = _fits_hopper(inputs, out_size // parts)
    inputs = [aligned(x) if fits_hopper else row_major(x) for x in inputs]
    first, second, third = (*inputs, *inputs[:1], *inputs[:1])[:3]
    residual = residual if residual is None else row_major(residual)
    out, plane_rows = empty_planes(first, parts, rows, out_size // parts)
    if out.numel():
        precision = dot_precision(first)
        t = small_tiling(first, c, out_size) or linear_tiling(first, c, out_size, len(inputs))
        some_residual = first if residual is None else residual
        kernel, programs = mlp_forward_linear_kernel, cdiv(rows, t.v) * cdiv(out_size, t.c)
        if fits_hopper:
            from diffnet.ops.mlp.hopper_layer_kernels import mlp_forward_linear_hopper_kernel as kernel

            t, programs = Tiling(64, 256, 256, 4, 1, 1), processors(first)
        kernel[(programs,)](
            first, second, third, weight, weight if bias is None else bias.contiguous(), some_residual,
            out if hidden is None else hidden.contiguous(), weight if seed is None else seed, out,
            rows, plane_rows, *threshold_and_scale(dropout), c, out_size, out_size // parts,
            first.stride(0), second.stride(0), third.stride(0), some_residual.stride(0),
            INPUTS=len(inputs), TRANSPOSED=transposed, BIAS=bias is not None,
            RELU=activation, WORDS=word_count(dropout) if activation else 0,
            MASKED=hidden is not None, RESIDUAL=residual is not None, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


def _fits_hopper(inputs: Sequence[Tensor], part_size: int) -> bool:
    """Whether the kernel for Hopper computes this. Each program copies all weights, which takes many rows to pay."""
    x, fits = inputs[0], len(inputs) == 1 and part_size == 256
    return fits and x.shape[1] == 256 and len(x) >= 2**16 and x.dtype.itemsize == 2 and on_hopper(x)


def _cublas_is_faster(x: Tensor, out_size: int) -> bool:
    """Whether a product in tf32 by cuBLAS is faster than the kernel's three products in bfloat16.

    It is on many rows, if one of the widths needs several tiles.
    """
    several_tiles = max(x.shape[1], out_size) > 128 and min(x.shape[1], out_size) >= 64
    return several_tiles and len(x) >= 2**14 and x.is_cuda and dot_precision(x) == "bf16x3"
