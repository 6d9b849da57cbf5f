"""Gradients of the weights and biases of linear layers: sums over all rows, for several layers at once.

A projection onto the eigenbasis is a sum of the same form, Φᵀ x for each mesh. If Φ has the shape of the layers'
gradients, the same launch computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs
from diffnet.ops.common.matmul import chosen, product, split, split_transpose
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import Unsummed, choose_span, span_count, span_rows, sum_spans
from diffnet.ops.common.tiling import SIZES, Tiling, cdiv, planned, processors, small_tiling, tile


def weight_tiling(grad: Tensor, h: int, c: int, precision: str) -> Tiling:
    """Return the tiling of a gradient dyᵀ x (H, C): k of its rows and c of its columns."""
    if grad.dtype != torch.float32:
        # Programs for 256 columns read dy half as often. Layers of 256 channels take 23 % less time, of 512 45 % less.
        return Tiling(64, tile(h, 128), tile(c, 256), 8, 4 if c <= 128 else 3, 1)
    if precision == "bf16x3":
        # One group of 4 warps multiplies up to 64 rows. Two groups would take twice as long for them.
        warps, programs = (4, 2) if h <= 64 else (8, 1)
        return Tiling(32, tile(h, 128), tile(c, 128), warps, 4, programs)
    return Tiling(32, tile(h, 64), tile(c, 128), 4, 3, 2) if h <= 64 else Tiling(64, 128, tile(c, 128), 8, 2, 1)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_backward_weights_kernel(
    grads, inputs, partial, projected, ptr, rows_size, meshes, span,
    h_size: tl.constexpr, c_size: tl.constexpr, size: tl.constexpr,
    PAIRS: tl.constexpr, PARTS: tl.constexpr, PROJECTED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dyᵀ x and dy over one span of rows, for this program's pair (dy, x).

    The first PARTS pairs have the same dy. Their products are columns of one matrix, the gradient of the weights of a
    layer on several inputs. The sums of dy of all layers follow after all matrices.

    PROJECTED: one more pair is (Φ, x). The last programs sum Φᵀ x over the spans of each mesh, into `projected`.
    """
    columns = tl.cdiv(c_size, BLOCK_C)
    tiles = tl.cdiv(h_size, BLOCK_K) * columns
    program = tl.program_id(0)
    spans = tl.cdiv(rows_size, span)
    index = program % spans
    place = program // spans
    first = index * span
    last = tl.minimum(first + span, rows_size)
    if PROJECTED:
        beyond = program - spans * PAIRS * tiles
        if beyond >= 0:
            mesh_spans = rows_size // span + meshes  # as `span_count`
            index = beyond % mesh_spans
            place = PAIRS * tiles + beyond // mesh_spans
            _, first, last = span_rows(index, ptr, rows_size, meshes, span, False)
    pair = place // tiles
    which = place % tiles
    h = (which // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = (which % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    grad = chosen(grads, pair)
    x = chosen(inputs, pair)
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    column_sum = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)  # reduced after the loop: reductions synchronize
    shares = tl.full((BLOCK_V, BLOCK_V), 1.0 / BLOCK_V, grads[0].dtype.element_ty)  # a power of two
    v = tl.arange(0, BLOCK_V)[:, None]
    for row in range(first, last, BLOCK_V):
        live = row + v < last
        row64 = tl.cast(row, tl.int64)
        g_at = grad + row64 * h_size + (v * h_size + h[None, :])
        g = tl.load(g_at, mask=live & (h < h_size)[None, :], other=0.0)
        x_at = x + row64 * c_size + (v * c_size + c[None, :])
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
    # One store for all cases: a branch here would stand between the matrix units and their result.
    row_size = tl.where(pair < PARTS, PARTS, 1) * c_size
    before = tl.where(pair < PARTS, pair, pair * h_size).to(tl.int64) * c_size  # together they may exceed 2³¹
    matrix = base + before
    if PROJECTED:
        matrix = tl.where(pair < PAIRS, matrix, projected + index.to(tl.int64) * (h_size * c_size))
    tl.store(matrix + (h[:, None] * row_size + c[None, :]), total, mask=inside)
    if which % columns == 0 and pair >= PARTS - 1 and pair < PAIRS:
        at = tl.cast(PAIRS, tl.int64) * c_size + (pair - (PARTS - 1))
        tl.store(base + at * h_size + h, tl.sum(column_sum, axis=0), mask=h < h_size)


@planned
def _plan(
    grad: Tensor, rows: int, h: int, c: int, pairs: int, meshes: int, precision: str
) -> tuple[Tiling, int, int, int, int]:
    """The tiling, the rows of a span, the spans of all rows and those of a projection, and the number of programs.

    meshes: of the projection, 0 without one
    """
    t = small_tiling(grad, h, c) or weight_tiling(grad, h, c, precision)
    tiles = cdiv(h, t.k) * cdiv(c, t.c)
    every = tiles * (pairs + (meshes > 0))
    span = choose_span(rows, t.v, processors(grad) * t.programs // max(every, 1))
    spans, mesh_spans = cdiv(rows, span), span_count(rows, meshes, span)  # the kernel computes them, too
    programs = (spans * pairs + mesh_spans) * tiles
    check_programs("mlp", programs)
    return t, span, spans, mesh_spans, programs


class Projection(NamedTuple):
    """A projection Φᵀ x: evecs (V, K), x (V, C) and the extents ptr (B+1,) of the meshes"""

    evecs: Tensor
    x: Tensor
    ptr: Tensor


class Sums(NamedTuple):
    """The results of `weight_gradients`.

    weights, biases: the gradients of each layer
    unsummed: the sum of spans that was left to the caller, or None
    projected: Φᵀ x of each span (1, spans, K, C) in float32 and the rows of a span, or None
    """

    weights: list[Tensor]
    biases: list[Tensor]
    unsummed: Unsummed | None
    projected: tuple[Tensor, int] | None


def weight_gradients(
    inputs: Sequence[Tensor],
    hidden: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    leave_sum: bool = False,
    projection: Projection | None = None,
) -> Sums:
    """Return dyᵀ x (H, C) of each layer's weights and Σ dy (H,) of each layer's bias, in float32.

    Layers of one shape share a kernel and the memory of their results.

    inputs: x₁ … xₘ (V, C₁) of the first layer, whose weights are (H₁, m·C₁)
    hidden, grads: x (V, C) of each other layer, and dy (V, H) of each layer
    leave_sum: leave the sum of one launch's spans to the caller. Its results are empty before.
    projection: computed in the launch of layers that it fits, see `_fits`
    """
    first = grads[0].shape[1], inputs[0].shape[1]
    shapes = [first, *((grad.shape[1], x.shape[1]) for grad, x in zip(grads[1:], hidden, strict=True))]
    layers = [inputs, *([x] for x in hidden)]
    weight_grads: list[Tensor] = [grads[0]] * len(grads)
    bias_grads = list(weight_grads)
    unsummed = projected = None
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        own = projection if projection is not None and projected is None and _fits(projection, *shape) else None
        partial, span, mesh_sums = _of_one_shape([layers[i] for i in places], [grads[i] for i in places], own)
        if mesh_sums is not None:
            projected = mesh_sums, span
        if leave_sum and unsummed is None:
            total = partial.new_empty(partial.shape[2])
            unsummed = Unsummed(partial, total)
        else:
            total = sum_spans(partial, None, span).view(-1)
        (h, c), count = shape, len(places)
        found = total.split_with_sizes([*(h * len(layers[i]) * c for i in places), *[h] * count])
        for n, i in enumerate(places):
            weight_grads[i], bias_grads[i] = found[n].view(h, len(layers[i]) * c), found[count + n]
    return Sums(weight_grads, bias_grads, unsummed, projected)


def _fits(projection: Projection, h: int, c: int) -> bool:
    """Whether the launch of layers (H, C) computes a projection at least as fast as a launch of its own.

    This is so for 16 bits. In float32, `project_tiling` keeps more programs on a multiprocessor. Batches of one
    network get the same answer, so that none of them compiles another kernel.
    """
    evecs, x, _ = projection
    alike = (evecs.shape[1], x.shape[1]) == (h, c) and max(h, c) <= 128
    return alike and len(x) > 0 and evecs.dtype != torch.float32 and evecs.is_contiguous()


def _of_one_shape(
    layers: Sequence[Sequence[Tensor]], grads: Sequence[Tensor], projection: Projection | None
) -> tuple[Tensor, int, Tensor | None]:
    """Sum over spans of rows: the gradients of the weights of all layers, then those of the biases (1, spans, N).

    Only the first layer may have several inputs. The rows of a span and the projection (1, spans, K, C) follow.
    """
    parts = len(layers[0])
    grads = [grad.contiguous() for grad in grads]
    inputs = [x.contiguous() for layer in layers for x in layer]
    (rows, h), c, pairs = grads[0].shape, inputs[0].shape[1], len(inputs)
    precision = dot_precision(grads[0])
    meshes = 0 if projection is None else projection.ptr.shape[0] - 1
    t, span, spans, mesh_spans, programs = _plan(grads[0], rows, h, c, pairs, meshes, precision)
    size = pairs * h * c + len(grads) * h
    partial = torch.empty(1, spans, size, dtype=torch.float32, device=grads[0].device)
    ptr, projected = partial, None
    grads[:1] = grads[:1] * parts
    if projection is not None:
        ptr, projected = projection.ptr, partial.new_empty(1, mesh_spans, h, c)
        grads.append(projection.evecs)
        inputs.append(projection.x.contiguous())
    if spans and size:
        mlp_backward_weights_kernel[(programs,)](
            tuple(grads), tuple(inputs), partial, partial if projected is None else projected, ptr,
            rows, meshes, span, h, c, size,
            PAIRS=pairs, PARTS=parts, PROJECTED=projection is not None, PRECISION=precision,
            BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return partial, span, projected
