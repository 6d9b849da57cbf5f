"""Gradients of the weights and biases of linear layers: sums over all rows, for several layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import SIZES, Tiling, cdiv, device_of, interpreted, processors, roomy, tile
from diffnet.ops.common.matmul import chosen, product, split, split_transpose
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import choose_span, sum_spans


def weight_tiling(grad: Tensor, h: int, c: int, precision: str) -> Tiling:
    """Return the tiling. Its k is a tile of the layers' outputs."""
    if interpreted(grad):
        return Tiling(16, 16, 16, 4, 1, 1)
    if not roomy(grad):
        return Tiling(32, tile(h, 32), tile(c, 32), 4, 2, 4)
    if grad.dtype != torch.float32:
        return Tiling(64, tile(h, 128), tile(c, 128), 8, 4, 1)
    if precision == "bf16x3":
        # One group of 4 warps multiplies up to 64 rows. Two groups would take twice as long for them.
        warps, programs = (4, 2) if h <= 64 else (8, 1)
        return Tiling(32, tile(h, 128), tile(c, 128), warps, 4, programs)
    return Tiling(16, tile(h, 64), tile(c, 64), 8, 2, 4)


@triton.jit(do_not_specialize=SIZES)
def mlp_backward_weights_kernel(
    grads, inputs, partial, rows_size, span, spans, h_size: tl.constexpr, c_size: tl.constexpr, size: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dyᵀ x and dy over one span of rows, for this program's pair (dy, x)."""
    columns = tl.cdiv(c_size, BLOCK_C)
    tiles = tl.cdiv(h_size, BLOCK_K) * columns
    index = tl.program_id(0)
    pair = tl.program_id(1) // tiles
    which = tl.program_id(1) % tiles
    h = (which // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = (which % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    grad = chosen(grads, pair)
    x = chosen(inputs, pair)
    first = index * span
    last = tl.minimum(first + span, rows_size)
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    column_sum = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)  # reduced after the loop: reductions synchronize
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        wide = tl.cast(row, tl.int64)
        g_at = grad + wide * h_size + (v * h_size + h[None, :])
        g = tl.load(g_at, mask=live & (h < h_size)[None, :], other=0.0)
        x_at = x + wide * c_size + (v * c_size + c[None, :])
        value = tl.load(x_at, mask=live & (c < c_size)[None, :], other=0.0)
        total = product(split_transpose(g, PRECISION), split(value, PRECISION), total, PRECISION)
        column_sum += g.to(tl.float32)
    base = partial + (pair * spans + index).to(tl.int64) * size
    inside = (h < h_size)[:, None] & (c < c_size)[None, :]
    tl.store(base + h[:, None] * c_size + c[None, :], total, mask=inside)
    if which % columns == 0:
        tl.store(base + h_size * c_size + h, tl.sum(column_sum, axis=0), mask=h < h_size)


def weight_gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], tiling: Tiling | None = None
) -> list[tuple[Tensor, Tensor]]:
    """dyᵀ x (H, C) and Σ dy (H,) in float32 for each pair dy (V, H), x (V, C); pairs of one shape share a kernel"""
    found: list[tuple[Tensor, Tensor]] = [pairs[0]] * len(pairs)
    shapes = [(grad.shape[1], x.shape[1]) for grad, x in pairs]
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        sums = _of_one_shape([pairs[i] for i in places], *shape, tiling)
        h, c = shape
        for i, both in zip(places, sums, strict=True):
            found[i] = both[: h * c].view(h, c), both[h * c :]
    return found


def _of_one_shape(pairs: Sequence[tuple[Tensor, Tensor]], h: int, c: int, tiling: Tiling | None) -> Tensor:
    grads = tuple(grad.contiguous() for grad, _ in pairs)
    inputs = tuple(x.contiguous() for _, x in pairs)
    rows = len(grads[0])
    precision = dot_precision(grads[0])
    t = tiling or weight_tiling(grads[0], h, c, precision)
    tiles = cdiv(h, t.k) * cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(grads[0]) * t.programs // max(len(pairs) * tiles, 1))
    spans = cdiv(rows, span)
    size = h * c + h
    partial = torch.empty(len(pairs), spans, size, dtype=torch.float32, device=grads[0].device)
    if partial.numel():
        with device_of(partial):
            mlp_backward_weights_kernel[(spans, len(pairs) * tiles)](
                grads, inputs, partial, rows, span, spans, h, c, size,
                PRECISION=precision, BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip
    return sum_spans(partial, None, span)[:, 0]
