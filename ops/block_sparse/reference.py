"""Block-sparse products, softmax and attention in plain PyTorch: the CPU path, and the reference for the kernels.

They gather blocks, multiply them as a batch, and add up each block row. Shapes: Z batches, H heads, B the edge of a
block. Low precision is added up in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.block_sparse.pattern import BlockArrays
from diffnet.ops.common.precision import sum_dtype, without_autocast
from diffnet.ops.sparse.csr import row_of_each


class AttentionInputs(NamedTuple):
    """The inputs of attention at the blocks of a pattern.

    query: (Z, H, rows, C)
    key, value: (Z, H, columns, C)
    key_mask: (Z, columns) bool, True for keys that are visible; or None
    mask: (number of blocks, B, B) bool, True for visible pairs; or None
    scale: multiplies the scores
    block: B
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    mask: Tensor | None
    scale: float
    block: int


def sdd(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor, block: int) -> Tensor:
    """Multiply A Bᵀ at the blocks: a (Z, H, rows, K), b (Z, H, columns, K) → (Z, number of blocks, B, B)."""
    rows, columns = (in_blocks(x, block) for x in (a, b))
    with without_autocast(a):
        return (rows[:, row_of_each(indptr, indices)] @ columns[:, indices].mT).to(a.dtype)


def dsd(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, rows: int) -> Tensor:
    """Multiply S X: values (Z, number of blocks, B, B), x (Z, H, columns, C) → (Z, H, rows, C)."""
    (batches, _, block, _), heads = values.shape, x.shape[1]
    dense = in_blocks(x, block)
    block_rows = -(-rows // block)
    with without_autocast(x):
        products = values.to(dense.dtype) @ dense[:, indices]
    out = dense.new_zeros(batches, heads * block_rows, block, x.shape[3])
    out = out.index_add(1, row_of_each(indptr, indices), products)
    out = out.reshape(batches, heads, block_rows * block, x.shape[3])[:, :, :rows]
    return out.to(x.dtype).contiguous()


def softmax(indptr: Tensor, indices: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """Compute the softmax of scale · scores + bias over each row.

    Args:
        indptr, indices: of the pattern
        scores: (Z, number of blocks, B, B)
        bias: (number of blocks, B, B) or None
        mask: (Z or 1, number of blocks, B, B) bool. Entries with False, and rows without a True, get 0.
        scale: multiplies the scores

    If the sum of a row is NaN, all of its entries with True are NaN.
    """
    brows = row_of_each(indptr, indices).long()
    scaled = scores.to(sum_dtype(scores)) * scale
    if bias is not None:
        scaled = scaled + bias
    scaled = scaled.masked_fill(~mask, -torch.inf)
    _, weights, total = _exponentials(indptr, brows, scaled)
    weights = weights / torch.where(total == 0, 1, total)[:, brows, :, None]
    return weights.masked_fill(~mask, 0).to(scores.dtype)


def softmax_backward(indptr: Tensor, indices: Tensor, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Return scale · p ∘ (g − Σ p ∘ g) with sums over each row."""
    brows = row_of_each(indptr, indices).long()
    p, g = out.to(sum_dtype(out)), grad.to(sum_dtype(out))
    total = p.new_zeros(len(p), len(indptr) - 1, p.shape[2]).index_add(1, brows, (p * g).sum(-1))
    return (scale * p * (g - total[:, brows, :, None])).to(out.dtype)


def attention(arrays: BlockArrays, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute attention at the blocks.

    Returns the result (Z, H, rows, C), and the logarithm to base 2 of each row's sum of exponentials, (Z, H, rows). The
    logarithm of an empty row is 0, that of a row with NaN is NaN.
    """
    query, key, value, key_mask, mask, scale, block = inputs
    indptr, indices, *_ = arrays
    batches, heads, rows, _ = query.shape
    dtype = sum_dtype(query)
    scores = sdd(indptr, indices, query.to(dtype), key.to(dtype), block) * scale
    inside = mask_inside(indptr, indices, (rows, key.shape[2]), block, key_mask, mask)
    weights = softmax(indptr, indices, scores, None, inside, 1.0)
    out = dsd(indptr, indices, weights, value.to(dtype), rows)
    top, _, total = _exponentials(indptr, row_of_each(indptr, indices).long(), scores.masked_fill(~inside, -torch.inf))
    sums = torch.where(total == 0, 0, (top + torch.log(total)) * math.log2(math.e))
    sums = sums.reshape(batches, heads, sums.shape[1] // max(heads, 1) * block)[:, :, :rows]
    return out.to(query.dtype), sums.contiguous()


def attention_backward(
    arrays: BlockArrays, inputs: AttentionInputs, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `out` and `sums` are the results of `attention`."""
    query, key, value, key_mask, mask, scale, block = inputs
    indptr, indices, t_indptr, t_indices, order = arrays
    rows, columns, dtype = query.shape[2], key.shape[2], sums.dtype
    delta = (out.to(dtype) * grad).sum(-1)
    q, k, v, g = (t.to(dtype) for t in (query, key, value, grad))
    inside = mask_inside(indptr, indices, (rows, columns), block, key_mask, mask)
    of_row = row_of_each(indptr, indices)
    sums, delta = (in_blocks(t[..., None], block)[:, of_row] for t in (sums, delta))
    scores = sdd(indptr, indices, q, k, block) * (scale * math.log2(math.e))
    weights = torch.exp2(scores.masked_fill(~inside, -torch.inf) - sums)  # all NaN in a row whose sum is NaN
    grad_scores = scale * weights * (sdd(indptr, indices, g, v, block) - delta)
    grad_q = dsd(indptr, indices, grad_scores, k, rows)
    grad_k = dsd(t_indptr, t_indices, grad_scores[:, order].mT, q, columns)
    grad_v = dsd(t_indptr, t_indices, weights[:, order].mT, g, columns)
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)


def mask_inside(
    indptr: Tensor,
    indices: Tensor,
    size: tuple[int, int],
    block: int,
    key_mask: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Return where values count, (Z or 1, number of blocks, B, B) bool: within the matrix, and where both masks allow.

    size: the rows and columns of each head's matrix
    key_mask, mask: see `AttentionInputs`
    """
    rows, columns = size
    place = torch.arange(block, device=indices.device)
    brows = row_of_each(indptr, indices) % max(-(-rows // block), 1)
    column = (indices % max(-(-columns // block), 1))[:, None] * block + place
    inside = (brows[:, None] * block + place < rows)[:, :, None] & (column < columns)[:, None, :]
    if mask is not None:
        inside = inside & mask
    if key_mask is None:
        return inside[None]
    return inside & key_mask[:, column.clamp(max=columns - 1)][:, :, None, :]


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Divide rows into blocks: (Z, H, N, C) → (Z, H · block rows, B, C) in float32 or wider, padded with 0."""
    padded = torch.nn.functional.pad(x.to(sum_dtype(x)), (0, 0, 0, -x.shape[2] % block))
    return padded.reshape(len(x), x.shape[1] * -(-x.shape[2] // block), block, x.shape[3])


def _exponentials(indptr: Tensor, brows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest score of each row, exp(score − largest), and the sum of these over each row.

    scores (Z, number of blocks, B, B) → (Z, all block rows, B), the shape of the scores, (Z, all block rows, B). The
    largest score is 0 in rows where all scores are −∞.
    """
    by_block = scores.amax(-1)
    top = scores.new_full((len(scores), len(indptr) - 1, scores.shape[2]), -torch.inf)
    top = top.scatter_reduce(1, brows[:, None].expand_as(by_block), by_block, "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    exponentials = torch.exp(scores - top[:, brows, :, None])
    return top, exponentials, torch.zeros_like(top).index_add(1, brows, exponentials.sum(-1))
