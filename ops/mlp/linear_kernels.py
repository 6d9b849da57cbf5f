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
from diffnet.ops.common.tiling import SIZES, Tiling, cdiv, empty_planes, row_major, small_tiling, tile


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
def mix(h):
    """Map 32 bits to 32 bits, one to one. Each input bit flips each upper bit of the result half the time."""
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h


@triton.jit
def _mix_all(h):
    """Map 32 bits to 32 bits, one to one. Each input bit flips each bit of the result half the time."""
    h = mix(h)
    return h ^ (h >> 16)


@triton.jit
def random_bits(seed, rows, c):
    """Return 32 bits for each place (rows, c) from a seed of two words. The upper half is random.

    Rows and columns are hashed apart and then together. Philox would take longer than the rest of the layer. Two
    columns share a word and take one half each. One thread has both, and the compiler computes their word once.
    """
    low = tl.load(seed).to(tl.uint32)
    high = tl.load(seed + 1).to(tl.uint32)
    by_row = _mix_all(_mix_all(rows.to(tl.uint32) ^ low) ^ high)
    by_column = _mix_all(_mix_all((c // 2).to(tl.uint32) ^ high) ^ low)
    word = mix(by_row[:, None] + by_column[None, :])
    return tl.where((c % 2 == 0)[None, :], word, (word ^ (word >> 16)) << 16)


@triton.jit
def activated(
    y, bias, seed, rows, c, threshold, keep_scale, size: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return dropout(relu(y + b)); each of the three is optional."""
    if BIAS:
        y += tl.load(bias + c, mask=c < size, other=0.0).to(tl.float32)[None, :]
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # lets NaN through
    if DROPOUT:
        y = tl.where(random_bits(seed, rows, c) < (threshold.to(tl.uint32) << 16), 0.0, y * keep_scale)
    return y


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_forward_linear_kernel(
    first, second, third, weight, bias, residual, hidden, seed, out,
    rows_size, plane_rows, threshold, keep_scale,
    in_size: tl.constexpr, out_size: tl.constexpr, part_size: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, residual_stride: tl.constexpr,
    INPUTS: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr,
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
    y = activated(y, bias, seed, rows, c, threshold, keep_scale, out_size, BIAS, RELU, DROPOUT)
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
    inputs = [row_major(x) for x in inputs]
    first, second, third = (*inputs, *inputs[:1], *inputs[:1])[:3]
    residual = residual if residual is None else row_major(residual)
    out, plane_rows = empty_planes(first, parts, rows, out_size // parts)
    if out.numel():
        precision = dot_precision(first)
        t = small_tiling(first, c, out_size) or linear_tiling(first, c, out_size, len(inputs))
        some_residual = first if residual is None else residual
        mlp_forward_linear_kernel[(cdiv(rows, t.v) * cdiv(out_size, t.c),)](
            first, second, third, weight, weight if bias is None else bias.contiguous(), some_residual,
            out if hidden is None else hidden.contiguous(), weight if seed is None else seed, out,
            rows, plane_rows, *threshold_and_scale(dropout), c, out_size, out_size // parts,
            first.stride(0), second.stride(0), third.stride(0), some_residual.stride(0),
            INPUTS=len(inputs), TRANSPOSED=transposed, BIAS=bias is not None,
            RELU=activation, DROPOUT=activation and seed is not None,
            MASKED=hidden is not None, RESIDUAL=residual is not None, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


def _cublas_is_faster(x: Tensor, out_size: int) -> bool:
    """Whether a product in tf32 by cuBLAS is faster than the kernel's three products in bfloat16.

    It is on many rows, if one of the widths needs several tiles.
    """
    several_tiles = max(x.shape[1], out_size) > 128 and min(x.shape[1], out_size) >= 64
    return several_tiles and len(x) >= 2**14 and x.is_cuda and dot_precision(x) == "bf16x3"


def threshold_and_scale(dropout: float) -> tuple[int, float]:
    """Return how many of 2¹⁶ equally likely draws are dropped, and the factor for the other units."""
    threshold = min(round(dropout * 2**16), 2**16 - 1)
    return threshold, 2**16 / (2**16 - threshold)
