"""Softmax over the rows of block-sparse scores, with the biases and masks of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.pattern import BlockPattern
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_operand
from diffnet.ops.common.dispatch import differentiable, empty_like, opaque
from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.sparse.softmax import check_broadcast, checked_number, scaled_and_biased


def block_softmax(
    pattern: BlockPattern,
    scores: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the softmax of scale · scores + bias over the entries of each row that are in a block.

    Low precision is computed in float32. Differentiable in scores, bias, relative_bias, and scale if it is a tensor.

    The kernel multiplies by a number and adds a bias that all sets share. A tensor as scale, or a bias with sets of its
    own, is applied by PyTorch operations before the kernel, which write one or two float32 tensors of the shape of the
    scores.

    A visible score that is NaN or +∞ makes all visible entries of its row NaN, and their gradients.

    Args:
        pattern: H heads of (rows, columns)
        scores: (…, number of blocks, block, block) floating point
        scale: multiplies the scores: a number, or a floating-point tensor, () or (H,)
        bias: floating point, added to the scaled scores. It is dense, (…, H or 1, rows, columns) or (rows, columns), or
            given as values (…, number of blocks, block, block) of the pattern. Its sets broadcast to those of the
            scores. −∞ leaves an entry out.
        relative_bias: (H or 1, rows + columns − 1) floating point, a bias by relative position. Entry (i, j) gets the
            value at j − i + rows − 1.
        key_padding_mask: (…, columns) bool with the batch of the scores, True for keys that exist
        attention_mask: bool, True if row i may attend to column j. It is dense, (rows, columns) or (H or 1, rows,
            columns), or given as values (number of blocks, block, block) of the pattern.
        backend: see `use_kernels`

    Returns:
        The shape and dtype of the scores. It is 0 where a mask is False, beyond the matrix, and in rows without a
        visible entry.

    Raises:
        TypeError: if scores, bias, relative_bias or a tensor as scale are not floating point, or if scale is no number.
        ValueError: if shapes or devices don't match, or if a mask isn't bool.

    >>> import torch
    >>> pattern = BlockPattern.from_mask(torch.tensor([[True, False], [True, True]]), 16)
    >>> block_softmax(pattern, torch.zeros(pattern.values_shape))[:, 0, 0]
    tensor([0.0625, 0.0312, 0.0312])
    """
    pattern.expect_values(scores, "scores", floating=True)
    batch = scores.shape[:-3]
    at_blocks = None if relative_bias is None else _relative_bias_at_blocks(pattern, relative_bias)
    if bias is not None:
        bias = bias_at_blocks(pattern, bias)
        check_broadcast("bias", bias.shape, scores.shape)
        if bias.ndim == 3:
            at_blocks = bias if at_blocks is None else at_blocks + bias
            bias = None
    if isinstance(scale, Tensor):
        check_head_scale(pattern, scale)
        scale = scale if scale.ndim == 0 else scale.expand(pattern.heads)[pattern.head_indices, None, None]
    else:
        scale = checked_number("scale", scale)
    triton = use_kernels(backend, scores)
    dtype, shape = scores.dtype, scores.shape
    if isinstance(scale, Tensor) or bias is not None:
        scores, scale = scaled_and_biased(scores, scale, bias), 1.0
    flat = scores.reshape(math.prod(batch), *pattern.values_shape)
    masks = flat_masks(pattern, key_padding_mask, attention_mask, batch)
    indptr, indices, size = pattern.blocks.indptr, pattern.blocks.indices, (pattern.rows, pattern.columns)
    if triton:
        out: Tensor = _operator(indptr, indices, flat, at_blocks, *masks, scale, *size)
    else:
        inside = reference.mask_inside(indptr, indices, size, pattern.block, *masks)
        out = reference.softmax(indptr, indices, flat, at_blocks, inside, scale)
    return out.to(dtype).reshape(shape)


def check_head_scale(pattern: BlockPattern, scale: Tensor) -> None:
    """Check a scale () or (H,), one value for each head. Raises TypeError or ValueError."""
    check_operand("scale", scale, (), pattern.device, floating=True)
    if scale.shape not in ((), (1,), (pattern.heads,)):
        raise ValueError(f"scale should have shape () or ({pattern.heads},), shape is {tuple(scale.shape)}")


def bias_at_blocks(pattern: BlockPattern, bias: Tensor) -> Tensor:
    """Return a bias, dense or as values, as values (…, number of blocks, block, block) in float32 or wider."""
    check_operand("bias", bias, (), pattern.device, floating=True)
    if bias.shape[-3:] != pattern.values_shape:
        heads, rows, columns = pattern.shape
        if bias.ndim < 2 or bias.shape[-2:] != (rows, columns) or (bias.ndim > 2 and bias.shape[-3] not in (1, heads)):
            raise ValueError(
                f"bias should have shape (…, {heads} or 1, {rows}, {columns}) or (…, "
                f"{', '.join(map(str, pattern.values_shape))}), shape is {tuple(bias.shape)}"
            )
        bias = pattern.sample(bias if bias.ndim > 2 else bias[None])
    return bias.to(sum_dtype(bias))


def _relative_bias_at_blocks(pattern: BlockPattern, table: Tensor) -> Tensor:
    """Look up the bias of each entry, (number of blocks, block, block) in float32 or wider."""
    heads, rows, columns = pattern.shape
    check_operand("relative_bias", table, (), pattern.device, floating=True)
    if table.ndim != 2 or table.shape[0] not in (1, heads) or table.shape[1] != rows + columns - 1:
        raise ValueError(
            f"relative_bias should have shape ({heads} or 1, {rows + columns - 1}), shape is {tuple(table.shape)}"
        )
    place = torch.arange(pattern.block, device=table.device)
    offset = (pattern.column_indices - pattern.row_indices) * pattern.block + rows - 1
    # Places beyond the matrix are masked later. They only have to be valid indices of the table.
    distance = (offset[:, None, None] + place - place[:, None]).clamp(0, rows + columns - 2)
    head = pattern.head_indices[:, None, None] if len(table) > 1 else torch.zeros_like(distance)
    return table.to(sum_dtype(table))[head, distance]


def flat_masks(
    pattern: BlockPattern, key_mask: Tensor | None, mask: Tensor | None, batch: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Return a key padding mask (…, columns) as (Z, columns), and an attention mask as values (number of blocks, B, B).

    Raises ValueError for other dtypes and shapes.
    """
    if key_mask is not None:
        check_operand("key_padding_mask", key_mask, (), pattern.device)
        if key_mask.dtype != torch.bool or key_mask.shape != (*batch, pattern.columns):
            raise ValueError(
                f"key_padding_mask should be bool of shape {(*batch, pattern.columns)}, "
                f"got {key_mask.dtype} of {tuple(key_mask.shape)}"
            )
        key_mask = key_mask.reshape(math.prod(batch), pattern.columns)
    if mask is not None:
        check_operand("attention_mask", mask, (), pattern.device)
        if mask.dtype != torch.bool:
            raise ValueError(f"attention_mask should be bool, got {mask.dtype}")
        if mask.shape != pattern.values_shape:
            mask = pattern.sample(mask if mask.ndim == 3 else mask[None])
    return key_mask, mask


def _forward(
    indptr: Tensor,
    indices: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    rows: int,
    columns: int,
) -> Tensor:
    """Compute the softmax of scores (Z, number of blocks, B, B).

    bias and mask are (number of blocks, B, B), key_mask is (Z, columns).
    """
    from diffnet.ops.block_sparse import kernels

    return kernels.softmax(indptr, indices, scores, bias, key_mask, mask, scale, rows, columns)


def _gradients(indptr: Tensor, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    from diffnet.ops.block_sparse import kernels

    return kernels.softmax_backward(indptr, out, grad, scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, _, _, bias, _, _, ctx.scale, *_ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(indptr, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, out = ctx.saved_tensors
    grad = grad.to(out.dtype)
    need_bias = ctx.needs_input_grad[3]
    # Without the scale, the gradient of the scores is also the gradient of the bias.
    grad_scores = _gradients_operator(indptr, out, grad, 1.0 if need_bias else ctx.scale)
    if not need_bias:
        return None, None, grad_scores, *[None] * 6
    grad_bias = grad_scores.sum(0, dtype=ctx.bias_dtype)
    return None, None, grad_scores * ctx.scale, grad_bias, *[None] * 5


_gradients_operator = opaque("diffnet::block_softmax_backward", _gradients, empty_like(1), reference.softmax_gradients)
_operator = differentiable("diffnet::block_softmax", _forward, empty_like(2), _save, _backward)
