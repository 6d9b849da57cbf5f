"""A multilayer perceptron: one kernel for each layer, or one kernel for all three layers of a block's MLP.

One kernel for all layers needs three layers that are as wide as each input. A tile of rows stays in registers between
the layers, and hidden layers are written for the backward only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_rows
from diffnet.ops.common.matmul import load, product, split, transposed
from diffnet.ops.common.precision import dot_precision, part_count
from diffnet.ops.common.tiling import (
    SIZES,
    Tiling,
    cdiv,
    empty_planes,
    has_large_shared_memory,
    interpreted,
    on_hopper,
    processors,
    row_major,
    tile,
)
from diffnet.ops.mlp.dropout_kernels import threshold_and_scale, word_count
from diffnet.ops.mlp.linear_kernels import activated, inputs_backward, linear, linear_backward


def forward_tiling(inputs: Sequence[Tensor], weights: Sequence[Tensor], dropout: bool) -> Tiling | None:
    """Return the tiling of one kernel for all layers, or None if the layers differ or one kernel each is faster.

    A tile has all channels of the hidden layers, and k channels of the inputs. With numbers of three parts, more than
    64 channels would not fit into registers.
    """
    x, c = inputs[0], inputs[0].shape[1]
    if not _fits(inputs, weights, (128, 128, 64)):
        return None
    if interpreted(x):
        return Tiling(16, 16, tile(c, 128), 4, 1, 1)
    if c > 64 and dropout and x.dtype == torch.float32:  # too few programs fit to hide the random numbers
        return None
    return Tiling(64, tile(c, 64), tile(c, 128), 4, 2, 1)


def backward_tiling(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tiling | None:
    """Return the tiling of the backward in one kernel, or None. A program keeps all weights in shared memory."""
    x, c = inputs[0], inputs[0].shape[1]
    block = tile(c, 128)
    if not _fits(inputs, weights, (128, 64, 32)):
        return None
    if interpreted(x):
        return Tiling(16, block, block, 4, 1, 1)
    if x.dtype == torch.float32:
        return Tiling(64, block, block, 4, 3, 1)
    return Tiling(32, block, block, 8, 3, 1) if c > 64 else Tiling(64, block, block, 4, 2, 3)


def _fits(inputs: Sequence[Tensor], weights: Sequence[Tensor], widest: tuple[int, int, int]) -> bool:
    """Whether one kernel can compute all layers. `widest` are the most channels for numbers of 1, 2 and 3 parts."""
    if len(weights) != 3:
        return False
    x, c, parts = inputs[0], inputs[0].shape[1], part_count(dot_precision(inputs[0]))
    first, second, third = weights
    if c > widest[parts - 1] or first.shape[-2:] != (c, len(inputs) * c):
        return False
    if not second.shape[-2:] == third.shape[-2:] == (c, c):
        return False
    return interpreted(x) or (has_large_shared_memory(x) and (x.dtype != torch.float32 or parts > 1))


def fits_hopper(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether the kernels for Hopper compute this. They are faster from some thousand rows on, else 2 µs slower."""
    x = inputs[0]
    return on_hopper(x) and x.dtype.itemsize == 2 and x.shape[1] == 128 and _fits(inputs, weights, (128, 0, 0))


@triton.jit
def _load_weight(weight, part, parts: tl.constexpr, c_size: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """Load the weights (C, C) of one of several inputs as an operand."""
    c = tl.arange(0, BLOCK)
    inside = (c < c_size)[:, None] & (c < c_size)[None, :]
    at = weight + c[:, None] * (parts * c_size) + (part * c_size + c)[None, :]
    return load(at, parts * c_size * c_size, inside, PRECISION)


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_forward_kernel(
    first, second, third, weight1, weight2, weight3, bias1, bias2, bias3, residual, seeds, hidden1, hidden2, out,
    rows_size, threshold, keep_scale, c_size: tl.constexpr,
    first_stride: tl.constexpr, second_stride: tl.constexpr, third_stride: tl.constexpr, residual_stride: tl.constexpr,
    INPUTS: tl.constexpr, BIAS: tl.constexpr, WORDS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute all three layers of a tile of rows. KEEP: write the hidden layers.

    Each weight is read when it is needed, so that several programs fit into the memory of a multiprocessor.
    """
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows64 = rows.to(tl.int64)[:, None]
    live = (rows < rows_size)[:, None]
    c = tl.arange(0, BLOCK_C)
    in_c = c < c_size
    y = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for i in tl.static_range(INPUTS):
        if i == 0:
            x_at = first + rows64 * first_stride
        elif i == 1:
            x_at = second + rows64 * second_stride
        else:
            x_at = third + rows64 * third_stride
        for step in range(0, c_size, BLOCK_K):
            k = step + tl.arange(0, BLOCK_K)
            in_k = k < c_size
            x = tl.load(x_at + k[None, :], mask=live & in_k[None, :], other=0.0)
            at = weight1 + c[:, None] * (INPUTS * c_size) + (i * c_size + k)[None, :]
            w = load(at, INPUTS * c_size * c_size, in_c[:, None] & in_k[None, :], PRECISION)
            y = product(split(x, PRECISION), transposed(w), y, PRECISION)
    inside = live & in_c[None, :]
    at = rows64 * c_size + c[None, :]
    dtype = out.dtype.element_ty
    h = activated(y, bias1, seeds, rows, c, threshold, keep_scale, c_size, BIAS, True, WORDS).to(dtype)
    if c_size != BLOCK_C:  # an infinite x times the zeros beyond the last channel is NaN
        h = tl.where(in_c[None, :], h, 0.0)
    if KEEP:
        tl.store(hidden1 + at, h, mask=inside)
    w = transposed(_load_weight(weight2, 0, 1, c_size, PRECISION, BLOCK_C))
    y = product(split(h, PRECISION), w, None, PRECISION)
    h = activated(y, bias2, seeds + 2, rows, c, threshold, keep_scale, c_size, BIAS, True, WORDS).to(dtype)
    if c_size != BLOCK_C:
        h = tl.where(in_c[None, :], h, 0.0)
    if KEEP:
        tl.store(hidden2 + at, h, mask=inside)
    w = transposed(_load_weight(weight3, 0, 1, c_size, PRECISION, BLOCK_C))
    y = product(split(h, PRECISION), w, None, PRECISION)
    y = activated(y, bias3, seeds, rows, c, threshold, keep_scale, c_size, BIAS, False, 0)
    if RESIDUAL:
        y += tl.load(residual + rows64 * residual_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(dtype), mask=inside)


def forward(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    dropout: float,
    seeds: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """residual + Wₙ a(… a(W₁ [x₁ … xₘ] + b₁) …) + bₙ with a = dropout ∘ ReLU, and the hidden layers if `keep`

    inputs: one to three (V, C); weights: (H₁, m·C), (H₂, H₁), …, as `matmul.operands` returns them; biases: (H₁,), … or
    none; residual (V, Hₙ); seeds (n − 1, 2) int64 with dropout → (V, Hₙ), then (V, H₁), … and on Hopper the signs
    """
    check_rows("mlp", inputs[0].shape[0])
    if fits_hopper(inputs, weights):
        from diffnet.ops.mlp import hopper_kernels

        return hopper_kernels.forward(inputs, weights, biases, residual, dropout, seeds, keep)
    t = forward_tiling(inputs, weights, dropout > 0)
    precision = dot_precision(inputs[0])
    if t is None:
        outs: list[Tensor] = []
        for i, weight in enumerate(weights):
            bias, last = biases[i] if biases else None, i == len(weights) - 1
            if last:
                out = linear(outs[-1:] or inputs, weight, bias, residual=residual)
            else:
                seed = None if seeds is None else seeds[i]
                out = linear(outs[-1:] or inputs, weight, bias, activation=True, dropout=dropout, seed=seed)
            outs = [*outs, out] if keep else [out]
        return [outs[-1], *outs[:-1]]
    rows, c = inputs[0].shape
    inputs = [row_major(x) for x in inputs]
    first, second, third = (*inputs, *inputs[:1], *inputs[:1])[:3]
    added = first if residual is None else row_major(residual)
    outs = [first.new_empty(rows, c) for _ in range(len(weights) if keep else 1)]
    if outs[0].numel():
        w1, w2, w3 = weights
        b1, b2, b3 = (bias.contiguous() for bias in biases) if biases else (w1, w2, w3)
        mlp_forward_kernel[(cdiv(rows, t.v),)](
            first, second, third, w1, w2, w3, b1, b2, b3, added, w1 if seeds is None else seeds.contiguous(),
            outs[1 % len(outs)], outs[2 % len(outs)], outs[0],
            rows, *threshold_and_scale(dropout), c,
            first.stride(0), second.stride(0), third.stride(0), added.stride(0),
            INPUTS=len(inputs), BIAS=bool(biases), WORDS=word_count(dropout), RESIDUAL=residual is not None,
            KEEP=keep, PRECISION=precision, BLOCK_V=t.v, BLOCK_K=t.k, BLOCK_C=t.c,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return outs


@launched
@triton.jit(do_not_specialize=SIZES)
def mlp_backward_kernel(
    grad, weight1, weight2, weight3, hidden1, hidden2, grad1, grad2, out,
    rows_size, plane_rows, keep_scale, c_size: tl.constexpr, grad_stride: tl.constexpr,
    PARTS: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first two layers' outputs before their activations, and of the PARTS inputs."""
    c = tl.arange(0, BLOCK_C)
    w1 = _load_weight(weight1, 0, PARTS, c_size, PRECISION, BLOCK_C)
    if PARTS > 1:
        w1_second = _load_weight(weight1, 1, PARTS, c_size, PRECISION, BLOCK_C)
    if PARTS > 2:
        w1_third = _load_weight(weight1, 2, PARTS, c_size, PRECISION, BLOCK_C)
    w2 = _load_weight(weight2, 0, 1, c_size, PRECISION, BLOCK_C)
    w3 = _load_weight(weight3, 0, 1, c_size, PRECISION, BLOCK_C)
    dtype = out.dtype.element_ty
    plane = tl.cast(plane_rows, tl.int64) * c_size
    for tile_index in range(tl.program_id(0), tl.cdiv(rows_size, BLOCK_V), tl.num_programs(0)):
        rows = tile_index * BLOCK_V + tl.arange(0, BLOCK_V)
        rows64 = rows.to(tl.int64)[:, None]
        inside = (rows < rows_size)[:, None] & (c < c_size)[None, :]
        at = rows64 * c_size + c[None, :]
        g = tl.load(grad + rows64 * grad_stride + c[None, :], mask=inside, other=0.0)
        h2 = tl.load(hidden2 + at, mask=inside, other=0.0)
        h1 = tl.load(hidden1 + at, mask=inside, other=0.0)
        y = product(split(g, PRECISION), w3, None, PRECISION)
        y = tl.where(h2 > 0.0, y * keep_scale, 0.0).to(dtype)
        tl.store(grad2 + at, y, mask=inside)
        y = product(split(y, PRECISION), w2, None, PRECISION)
        y = tl.where(h1 > 0.0, y * keep_scale, 0.0).to(dtype)
        tl.store(grad1 + at, y, mask=inside)
        z = product(split(y, PRECISION), w1, None, PRECISION)
        if SKIP:
            z += g.to(tl.float32)
        tl.store(out + at, z.to(dtype), mask=inside)
        if PARTS > 1:
            z = product(split(y, PRECISION), w1_second, None, PRECISION)
            tl.store(out + plane + at, z.to(dtype), mask=inside)
        if PARTS > 2:
            z = product(split(y, PRECISION), w1_third, None, PRECISION)
            tl.store(out + plane + plane + at, z.to(dtype), mask=inside)


def backward(
    grad: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    skip: bool,
    dropout: float,
    need_inputs: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the inputs (m, V, C), empty if not needed, and of each layer's output before activation.

    grad (V, Hₙ), the others as in `forward`; skip: the first input is the residual
    """
    if need_inputs and fits_hopper(inputs, weights):
        from diffnet.ops.mlp import hopper_kernels

        return hopper_kernels.backward(grad, len(inputs), weights, hidden, skip, dropout)
    (rows, c), parts, precision = inputs[0].shape, len(inputs), dot_precision(grad)
    t = backward_tiling(inputs, weights) if need_inputs else None
    if t is None:
        grads = [grad]
        for weight, layer in zip(weights[:0:-1], hidden[len(weights) - 2 :: -1], strict=True):
            grads.insert(0, linear_backward(grads[0], weight, hidden=layer, dropout=dropout))
        if not need_inputs:
            return grad.new_empty(parts, 0, c), grads
        return inputs_backward(grads[0], weights[0], parts, grad if skip else None), grads
    grad = row_major(grad)
    input_grads, plane_rows = empty_planes(grad, parts, rows, c)
    first, second = grad.new_empty(rows, c), grad.new_empty(rows, c)
    if first.numel():
        w1, w2, w3 = weights
        programs = min(processors(grad) * t.programs, cdiv(rows, t.v))
        mlp_backward_kernel[(programs,)](
            grad, w1, w2, w3, *(h.contiguous() for h in hidden[:2]), first, second, input_grads,
            rows, plane_rows, threshold_and_scale(dropout)[1], c, grad.stride(0),
            PARTS=parts, SKIP=skip, PRECISION=precision, BLOCK_V=t.v, BLOCK_C=t.c,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return input_grads, [first, second, grad]
