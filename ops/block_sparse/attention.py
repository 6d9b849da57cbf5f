"""Attention at the blocks of a pattern in one kernel, which never writes scores down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.op import _structure
from diffnet.ops.block_sparse.pattern import BlockPattern
from diffnet.ops.block_sparse.softmax import flat_key_mask, mask_at_blocks, mask_inside
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.sparse.pattern import row_of_each


def block_attention(
    pattern: BlockPattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scale · Q Kᵀ) V at the blocks of the pattern: "sdd", `block_softmax` and "dsd" in one.

    query (…, H, rows, C), key and value (…, H, columns, C) with one batch → (…, H, rows, C)
    scale: by default 1/√C
    key_padding_mask, attention_mask: see `block_softmax`

    Scores are computed again in the backward (Dao et al. 2022, FlashAttention), so memory grows with the length alone.
    Low precision is added up in float32. Differentiable in query, key and value. Raises ValueError where shapes don't
    fit.
    """
    heads, rows, columns = pattern.shape
    batch = query.shape[:-3]
    channels = query.shape[-1]
    expected = (*batch, heads, rows, channels), (*batch, heads, columns, channels)
    if query.ndim < 3 or query.shape != expected[0] or key.shape != expected[1] or value.shape != expected[1]:
        raise ValueError(
            f"query, key and value should have shapes (…, {heads}, {rows}, C) and twice (…, {heads}, {columns}, C), "
            f"shapes are {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    dtype = compute_dtype(query, key, value)
    flat = [t.to(dtype).reshape(math.prod(batch), *t.shape[-3:]) for t in (query, key, value)]
    if key_padding_mask is not None:
        key_padding_mask = flat_key_mask(pattern, key_padding_mask, batch)
    mask = None if attention_mask is None else mask_at_blocks(pattern, attention_mask)
    scale = channels**-0.5 if scale is None else scale
    triton = use_kernels(backend, *flat)
    out: Tensor = _attention(_structure(pattern), *flat, key_padding_mask, mask, scale, pattern.block, triton)[0]
    return out.reshape(*batch, heads, rows, channels)


def _attention_kernel(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    block: int,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """The result (Z, H, rows, C), and the logarithms to base 2 of the sums of exponentials (Z, H, rows); 0 for none."""
    indptr, indices, *_ = structure
    if triton:
        from diffnet.ops.block_sparse import attention_kernels

        return attention_kernels.attention(indptr, indices, query, key, value, key_mask, mask, scale, block)
    rows = query.shape[2]
    scores = reference.sdd(indptr, indices, query.to(_wide(query)), key.to(_wide(key)), block) * scale
    inside = mask_inside(indptr, indices, rows, key.shape[2], block, key_mask, mask)
    weights = reference.softmax(indptr, indices, scores, None, inside, 1.0)
    out = reference.dsd(indptr, indices, weights, value.to(weights.dtype), rows)
    sums = _row_logarithms(indptr, indices, scores.masked_fill(~inside, -torch.inf))
    sums = sums.reshape(*query.shape[:2], sums.shape[1] // max(query.shape[1], 1) * block)[:, :, :rows]
    return out.to(query.dtype), sums.contiguous()


def _attention_fake(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    block: int,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if triton else torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide)


def _attention_backward_kernel(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
    scale: float,
    block: int,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    indptr, indices, t_indptr, t_indices, order = structure
    if triton:
        from diffnet.ops.block_sparse import attention_kernels

        arrays = indptr, indices, t_indptr, t_indices, order
        given = query, key, value, key_mask, mask
        return attention_kernels.attention_backward(*arrays, *given, out, sums, grad, scale, block)
    rows, columns, wide = query.shape[2], key.shape[2], sums.dtype
    delta = (out.to(wide) * grad).sum(-1)
    q, k, v, g = (t.to(wide) for t in (query, key, value, grad))
    inside = mask_inside(indptr, indices, rows, columns, block, key_mask, mask)
    of_row = row_of_each(indptr, indices)
    at_blocks = [reference._in_blocks(t[..., None], block)[:, of_row] for t in (sums, delta)]
    scores = reference.sdd(indptr, indices, q, k, block) * (scale * math.log2(math.e))
    weights = torch.exp2((scores - at_blocks[0]).masked_fill(~inside, -torch.inf))
    grad_scores = scale * weights * (reference.sdd(indptr, indices, g, v, block) - at_blocks[1])
    grad_q = reference.dsd(indptr, indices, grad_scores, k, rows)
    grad_k = reference.dsd(t_indptr, t_indices, grad_scores[:, order].mT, q, columns)
    grad_v = reference.dsd(t_indptr, t_indices, weights[:, order].mT, g, columns)
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)


def _attention_backward_fake(
    structure: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
    scale: float,
    block: int,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_attention_backward = opaque("diffnet::block_attention_backward", _attention_backward_kernel, _attention_backward_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    structure, *given, ctx.scale, ctx.block, ctx.triton = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*structure, *given, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    *structure, query, key, value, key_mask, mask, out, sums = ctx.saved_tensors
    given = query, key, value, key_mask, mask
    grads = _attention_backward(structure, *given, out, sums, grad.to(out.dtype), ctx.scale, ctx.block, ctx.triton)
    return [None] * len(structure), *grads, *[None] * 5


_attention = differentiable("diffnet::block_attention", _attention_kernel, _attention_fake, _save, _backward)


def _row_logarithms(indptr: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """log₂ Σ exp of each row: scores (Z, number of blocks, B, B) → (Z, all block rows, B), 0 where there is nothing."""
    brows = row_of_each(indptr, indices).long()
    shape = len(scores), len(indptr) - 1, scores.shape[2]
    by_block = scores.amax(-1)
    top = scores.new_full(shape, -torch.inf)
    top = top.scatter_reduce(1, brows[:, None].expand_as(by_block), by_block, "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    total = scores.new_zeros(shape).index_add(1, brows, torch.exp(scores - top[:, brows, :, None]).sum(-1))
    return torch.where(total > 0, (top + torch.log(total)) * math.log2(math.e), 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
