"""Softmax over the rows of block-sparse scores, with what attention adds to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.pattern import BlockPattern
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.sparse.pattern import row_of_each


def block_softmax(
    pattern: BlockPattern,
    scores: Tensor,
    *,
    scale: float = 1.0,
    relative_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax of scale · scores + bias over the entries of each row that are in a block.

    scores: (…, number of blocks, block, block)
    relative_bias: (H or 1, rows + columns − 1), what is added by relative position: entry (i, j) gets the value at
        j − i + rows − 1
    key_padding_mask: (…, columns) bool, True where a key is there, one for each of the scores' batches
    attention_mask: bool, True where row i may look at column j: dense (rows, columns) or (H or 1, rows, columns), or
        values (number of blocks, block, block) of the pattern
    → the shape of scores; 0 where a mask is False, beyond the matrix's edge, and in rows with nothing left.

    Low precision is computed in float32. Differentiable in scores and relative_bias. Raises ValueError where shapes
    don't fit.
    """
    pattern.expect_values(scores)
    batch = scores.shape[:-3]
    flat = scores.reshape(math.prod(batch), *pattern.values_shape)
    bias = None if relative_bias is None else _bias_at_blocks(pattern, relative_bias)
    if key_padding_mask is not None:
        key_padding_mask = flat_key_mask(pattern, key_padding_mask, batch)
    if attention_mask is not None:
        attention_mask = mask_at_blocks(pattern, attention_mask)
    triton = use_kernels(backend, flat)
    out: Tensor = _softmax(
        pattern.blocks.indptr,
        pattern.blocks.indices,
        flat,
        bias,
        key_padding_mask,
        attention_mask,
        scale,
        pattern.heads,
        pattern.rows,
        pattern.columns,
        triton,
    )
    return out.reshape(scores.shape)


def _bias_at_blocks(pattern: BlockPattern, table: Tensor) -> Tensor:
    """(number of blocks, block, block), float32 or wider."""
    heads, rows, columns = pattern.shape
    if table.ndim != 2 or table.shape[0] not in (1, heads) or table.shape[1] != rows + columns - 1:
        raise ValueError(
            f"relative_bias should have shape ({heads} or 1, {rows + columns - 1}), shape is {tuple(table.shape)}"
        )
    place = torch.arange(pattern.block, device=table.device)
    offset = (pattern.column_indices - pattern.row_indices) * pattern.block + rows - 1
    # Places beyond the edge are masked, and only have to be in the table.
    distance = (offset[:, None, None] + place - place[:, None]).clamp(0, rows + columns - 2)
    head = pattern.head_indices[:, None, None] if len(table) > 1 else torch.zeros_like(distance)
    return table.to(torch.promote_types(table.dtype, torch.float32))[head, distance]


def flat_key_mask(pattern: BlockPattern, mask: Tensor, batch: torch.Size) -> Tensor:
    """A key padding mask (…, columns) as (Z, columns). Raises ValueError where it doesn't fit the batch."""
    if mask.dtype != torch.bool or mask.shape != (*batch, pattern.columns):
        raise ValueError(
            f"key_padding_mask should be bool of shape {(*batch, pattern.columns)}, "
            f"got {mask.dtype} of {tuple(mask.shape)}"
        )
    return mask.reshape(math.prod(batch), pattern.columns)


def mask_at_blocks(pattern: BlockPattern, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise ValueError(f"attention_mask should be bool, got {mask.dtype}")
    if mask.shape == pattern.values_shape:
        return mask
    return pattern.sample(mask if mask.ndim == 3 else mask[None])


def mask_inside(
    indptr: Tensor,
    indices: Tensor,
    rows: int,
    columns: int,
    block: int,
    key_mask: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """(Z or 1, number of blocks, B, B) bool: within the matrix's edge, and by both masks."""
    place = torch.arange(block, device=indices.device)
    brows = row_of_each(indptr, indices) % max(-(-rows // block), 1)
    column = (indices % max(-(-columns // block), 1))[:, None] * block + place
    inside = (brows[:, None] * block + place < rows)[:, :, None] & (column < columns)[:, None, :]
    if mask is not None:
        inside = inside & mask
    if key_mask is None:
        return inside[None]
    return inside & key_mask[:, column.clamp(max=columns - 1)][:, :, None, :]


def _softmax_kernel(
    indptr: Tensor,
    indices: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
    rows: int,
    columns: int,
    triton: bool,
) -> Tensor:
    """scores (Z, number of blocks, B, B), bias and mask (number of blocks, B, B), key_mask (Z, columns)."""
    block = scores.shape[3]
    if triton:
        from diffnet.ops.block_sparse import kernels

        return kernels.softmax(indptr, indices, scores, bias, key_mask, mask, scale, heads, rows, columns)
    inside = mask_inside(indptr, indices, rows, columns, block, key_mask, mask)
    return reference.softmax(indptr, indices, scores, bias, inside, scale)


def _softmax_fake(
    indptr: Tensor,
    indices: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
    rows: int,
    columns: int,
    triton: bool,
) -> Tensor:
    return scores.new_empty(scores.shape)


def _softmax_backward_kernel(
    indptr: Tensor, indices: Tensor, out: Tensor, grad: Tensor, scale: float, triton: bool
) -> Tensor:
    if triton:
        from diffnet.ops.block_sparse import kernels

        return kernels.softmax_backward(indptr, out, grad, scale)
    return reference.softmax_backward(indptr, indices, out, grad, scale)


def _softmax_backward_fake(
    indptr: Tensor, indices: Tensor, out: Tensor, grad: Tensor, scale: float, triton: bool
) -> Tensor:
    return out.new_empty(out.shape)


_softmax_backward = opaque("diffnet::block_softmax_backward", _softmax_backward_kernel, _softmax_backward_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, indices, _, bias, _, _, ctx.scale, _, _, _, ctx.triton = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(indptr, indices, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, out = ctx.saved_tensors
    grad = grad.to(out.dtype)
    need_bias = ctx.needs_input_grad[3]
    # Without the scale it is the bias's gradient too.
    grad_scores = _softmax_backward(indptr, indices, out, grad, 1.0 if need_bias else ctx.scale, ctx.triton)
    if not need_bias:
        return None, None, grad_scores, *[None] * 8
    grad_bias = grad_scores.sum(0, dtype=ctx.bias_dtype)
    return None, None, grad_scores * ctx.scale, grad_bias, *[None] * 7


_softmax = differentiable("diffnet::block_softmax", _softmax_kernel, _softmax_fake, _save, _backward)
