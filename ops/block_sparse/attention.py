"""Attention at the blocks of a pattern in one kernel, which never writes scores to memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.op import block_matmul
from diffnet.ops.block_sparse.pattern import BlockArrays, BlockPattern, block_arrays
from diffnet.ops.block_sparse.reference import AttentionInputs
from diffnet.ops.block_sparse.softmax import block_softmax, check_head_scale, flat_masks
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_operand
from diffnet.ops.common.dispatch import derivatives, differentiable, empty_like, opaque
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.sparse.softmax import checked_number


def block_attention(
    pattern: BlockPattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute softmax(scale · Q Kᵀ + bias) V at the blocks of the pattern.

    One kernel replaces "sdd" of `block_matmul`, `block_softmax` and "dsd" of `block_matmul`. Its backward pass computes
    scores again (Dao et al. 2022, FlashAttention), so memory grows only with rows and columns; plain PyTorch keeps
    them. Low precision is added up in float32. Differentiable in query, key, value, bias, and scale if it is a tensor.

    A tensor as scale multiplies the query before the kernel, rounded to the dtype of the result. With a bias, the three
    operations above are used instead of the one kernel, so scores are stored.

    A visible score that is NaN or +∞ makes its row of the result NaN, and gradients of all that this row reads.

    Args:
        pattern: H heads of (rows, columns)
        query: (…, H, rows, C) floating point
        key, value: (…, H, columns, C) floating point, with the same batch
        scale: by default 1/√C; a number, or a floating-point tensor, () or (H,)
        bias: see `block_softmax`
        key_padding_mask, attention_mask: see `block_softmax`
        backend: see `use_kernels`

    Returns:
        (…, H, rows, C) in the promoted dtype, or in autocast's

    Raises:
        TypeError: if query, key, value, bias or a tensor as scale is not floating point, or if scale is no number.
        ValueError: if shapes or devices don't match, or if a mask isn't bool.

    >>> import torch
    >>> pattern = BlockPattern.from_mask(torch.tensor([[True, False], [True, True]]), 16)
    >>> x = torch.arange(32.0).reshape(1, 32, 1)
    >>> block_attention(pattern, torch.zeros(1, 32, 1), x, x)[0, [0, 31], 0]
    tensor([ 7.5000, 15.5000])
    """
    heads, rows, columns = pattern.shape
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand(name, tensor, (), pattern.device, floating=True)
    batch = query.shape[:-3]
    channels = query.shape[-1] if query.ndim else 0
    expected = (*batch, heads, rows, channels), (*batch, heads, columns, channels)
    if query.ndim < 3 or query.shape != expected[0] or key.shape != expected[1] or value.shape != expected[1]:
        raise ValueError(
            f"query should have shape (…, {heads}, {rows}, C), key and value (…, {heads}, {columns}, C), "
            f"shapes are {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if channels == 0:
        raise ValueError(f"query should have at least one channel, shape is {tuple(query.shape)}")
    dtype = compute_dtype(query, key, value)
    scale = channels**-0.5 if scale is None else scale
    if bias is not None:
        query, key, value = (t.to(dtype) for t in (query, key, value))
        scores = block_matmul(pattern, query, key, "sdd", transpose_b=True, backend=backend)
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        weights = block_softmax(pattern, scores, scale=scale, bias=bias, backend=backend, **masks)
        return block_matmul(pattern, weights, value, "dsd", backend=backend)
    if isinstance(scale, Tensor):
        check_head_scale(pattern, scale)
        wide = torch.promote_types(dtype, torch.float32)
        query, scale = query.to(wide) * scale.to(wide).reshape(-1, 1, 1), 1.0
    else:
        scale = checked_number("scale", scale)
    q, k, v = (t.to(dtype).reshape(math.prod(batch), *t.shape[-3:]) for t in (query, key, value))
    key_mask, mask = flat_masks(pattern, key_padding_mask, attention_mask, batch)
    inputs = AttentionInputs(q, k, v, key_mask, mask, scale, pattern.block)
    if use_kernels(backend, q, k, v):
        out: Tensor = _operator(block_arrays(pattern), *inputs)[0]
    else:
        out = reference.attention(pattern.blocks.indptr, pattern.blocks.indices, inputs)
    return out.reshape(*batch, heads, rows, channels)


def _forward(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm to base 2 of each row's sum of exponentials, (Z, H, rows) float32."""
    from diffnet.ops.block_sparse.attention_kernels import attention

    # Operators of torch.library take no NamedTuple.
    return attention(BlockArrays(*structure), AttentionInputs(query, key, value, key_mask, mask, scale, block))


def _fake(structure: Sequence[Tensor], query: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


def _gradients(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    block: int,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from diffnet.ops.block_sparse.attention_kernels import attention_backward

    inputs = AttentionInputs(query, key, value, key_mask, mask, scale, block)
    return attention_backward(BlockArrays(*structure), inputs, out, sums, grad)


def _plain_gradients(
    structure: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor, *more: Any
) -> list[Tensor | None]:
    """more: the rest of `AttentionInputs`, the results, and the gradient of the first one"""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.attention(structure[0], structure[1], AttentionInputs(query, key, value, *more[:4]))

    return derivatives(attention, [query, key, value], more[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    structure, *tensors, ctx.scale, ctx.block = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*structure, *tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    *structure, query, key, value, key_mask, mask, out, sums = ctx.saved_tensors
    inputs = AttentionInputs(query, key, value, key_mask, mask, ctx.scale, ctx.block)
    grads = _gradients_operator(structure, *inputs, out, sums, grad.to(out.dtype))
    return [None] * len(structure), *grads, *[None] * 4


_gradients_operator = opaque("diffnet::block_attention_backward", _gradients, empty_like(1, 2, 3), _plain_gradients)
_operator = differentiable("diffnet::block_attention", _forward, _fake, _save, _backward)
