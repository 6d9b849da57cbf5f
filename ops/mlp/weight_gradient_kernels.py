"""Gradients of the weights and biases of linear layers: sums over all rows, for several layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import SIZES, Tiling, cdiv, interpreted, planned, processors, roomy, tile
from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs
from diffnet.ops.common.matmul import chosen, product, split, split_transpose
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import Unsummed, choose_span, sum_spans


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
    return Tiling(32, tile(h, 64), tile(c, 128), 4, 3, 2) if h <= 64 else Tiling(64, 128, tile(c, 128), 8, 2, 1)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_backward_weights_kernel(
    grads, inputs, partial, rows_size, span, h_size: tl.constexpr, c_size: tl.constexpr, size: tl.constexpr,
    PAIRS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dyᵀ x and dy over one span of rows, for this program's pair (dy, x).

    The first PARTS pairs have the same dy. Their products are columns of one matrix, the gradient of the weights of a
    layer on several inputs. The sums of dy of all layers follow after all matrices.
    """
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
    shares = tl.full((BLOCK_V, BLOCK_V), 1.0 / BLOCK_V, grads[0].dtype.element_ty)  # a power of two
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        wide = tl.cast(row, tl.int64)
        g_at = grad + wide * h_size + (v * h_size + h[None, :])
        g = tl.load(g_at, mask=live & (h < h_size)[None, :], other=0.0)
        x_at = x + wide * c_size + (v * c_size + c[None, :])
        value = tl.load(x_at, mask=live & (c < c_size)[None, :], other=0.0)
        total = product(split_transpose(g, PRECISION), split(value, PRECISION), total, PRECISION)
        if PRECISION == "ieee" and BLOCK_K >= 64:  # Hopper's matrix units read no smaller tiles from shared memory
            # Matrix units add up the rows of g. Reading g into registers as well would be a race: Triton then gives it
            # one buffer too few, and the copy of a later tile overwrites g while matrix units read it.
            column_sum = product(split(shares, PRECISION), split(g, PRECISION), column_sum, PRECISION)
        else:
            column_sum += g.to(tl.float32)
    base = partial + index.to(tl.int64) * size
    inside = (h < h_size)[:, None] & (c < c_size)[None, :]
    # One store for both cases: a branch here would stand between the matrix units and their result.
    row_size = tl.where(pair < PARTS, PARTS, 1) * c_size
    before = tl.where(pair < PARTS, pair, pair * h_size).to(tl.int64) * c_size  # together they may exceed 2³¹
    tl.store(base + before + (h[:, None] * row_size + c[None, :]), total, mask=inside)
    if which % columns == 0 and pair >= PARTS - 1:
        at = (pair * 0 + PAIRS).to(tl.int64) * c_size + (pair - (PARTS - 1))
        tl.store(base + at * h_size + h, tl.sum(column_sum, axis=0), mask=h < h_size)


@planned
def _plan(
    grad: Tensor, rows: int, h: int, c: int, pairs: int, precision: str, tiling: Tiling | None
) -> tuple[Tiling, int, int, int]:
    """The tiling, the rows of a span, the number of spans, and the tiles of the results of one span."""
    t = tiling or weight_tiling(grad, h, c, precision)
    tiles = pairs * cdiv(h, t.k) * cdiv(c, t.c)
    span = choose_span(rows, t.v, processors(grad) * t.programs // max(tiles, 1))
    spans = cdiv(rows, span)
    check_programs("mlp", spans, tiles)
    return t, span, spans, tiles


def weight_gradients(
    inputs: Sequence[Tensor],
    hidden: Sequence[Tensor],
    grads: Sequence[Tensor],
    tiling: Tiling | None = None,
    unsummed: list[Unsummed] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return dyᵀ x (H, C) of each layer's weights and Σ dy (H,) of each layer's bias, in float32.

    inputs: x₁ … xₘ (V, C₁) of the first layer, whose weights are (H₁, m·C₁); hidden: x (V, C) of each other layer;
    grads: dy (V, H) of each layer; unsummed: if this empty list is given, one sum of spans is added to it and left to
    the caller, before which these results are empty

    Layers of one shape share a kernel and the memory of their results.
    """
    first = grads[0].shape[1], inputs[0].shape[1]
    shapes = [first, *((grad.shape[1], x.shape[1]) for grad, x in zip(grads[1:], hidden, strict=True))]
    layers = [inputs, *([x] for x in hidden)]
    weight_grads: list[Tensor] = [grads[0]] * len(grads)
    bias_grads = list(weight_grads)
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        found = _of_one_shape([layers[i] for i in places], [grads[i] for i in places], tiling, unsummed)
        for n, i in enumerate(places):
            weight_grads[i], bias_grads[i] = found[n], found[len(places) + n]
    return weight_grads, bias_grads


def _of_one_shape(
    layers: Sequence[Sequence[Tensor]],
    grads: Sequence[Tensor],
    tiling: Tiling | None,
    unsummed: list[Unsummed] | None,
) -> list[Tensor]:
    """The gradients of the weights of all layers, then those of the biases. Only the first may have several inputs."""
    parts = len(layers[0])
    grads = [grad.contiguous() for grad in grads]
    inputs = tuple([x.contiguous() for layer in layers for x in layer])
    (rows, h), c, pairs = grads[0].shape, inputs[0].shape[1], len(inputs)
    precision = dot_precision(grads[0])
    t, span, spans, tiles = _plan(grads[0], rows, h, c, pairs, precision, tiling)
    size = pairs * h * c + len(grads) * h
    partial = torch.empty(1, spans, size, dtype=torch.float32, device=grads[0].device)
    if spans and size:
        mlp_backward_weights_kernel[(spans, tiles)](
            (*grads[:1] * (parts - 1), *grads), inputs, partial, rows, span, h, c, size,
            PAIRS=pairs, PARTS=parts, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    if unsummed is None or unsummed:
        total = sum_spans(partial, None, span).view(size)
    else:
        total = partial.new_empty(size)
        unsummed.append(Unsummed(partial, total))
    sizes = [parts * h * c, *[h * c] * (len(grads) - 1), *[h] * len(grads)]
    first, *others = total.split_with_sizes(sizes)
    found = [first.view(h, parts * c)]
    return found + [other.view(h, c) if n < len(grads) - 1 else other for n, other in enumerate(others)]
