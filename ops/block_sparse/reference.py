"""Block-sparse products, softmax and attention in plain PyTorch: what CPUs compute, and the reference for the kernels.

They gather blocks, multiply them as a batch, and add up each block row. Shapes: Z batches, H heads, B the edge of a
block. Low precision is added up in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
        return (rows.index_select(1, row_of_each(indptr, indices)) @ columns.index_select(1, indices).mT).to(a.dtype)


def dsd(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, rows: int) -> Tensor:
    """Multiply S X: values (Z, number of blocks, B, B), x (Z, H, columns, C) → (Z, H, rows, C)."""
    (batches, _, block, _), heads = values.shape, x.shape[1]
    dense = in_blocks(x, block)
    block_rows = -(-rows // block)
    with without_autocast(x):
        products = values.to(dense.dtype) @ dense.index_select(1, indices)
    out = dense.new_zeros(batches, heads * block_rows, block, x.shape[3])
    out = out.index_add(1, row_of_each(indptr, indices), products)
    out = out.reshape(batches, heads, block_rows * block, x.shape[3])[:, :, :rows]
    return out.to(x.dtype).contiguous()


def softmax(indptr: Tensor, indices: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """Compute the softmax of scale · scores + bias over each row. If its sum is NaN, all entries with True are NaN.

    scores: (Z, number of blocks, B, B)
    bias: (number of blocks, B, B) or None
    mask: (Z or 1, number of blocks, B, B) bool. Entries with False, and rows without a True, get 0.
    """
    brows = row_of_each(indptr, indices).long()
    scaled = scores.to(sum_dtype(scores)) * scale
    if bias is not None:
        scaled = scaled + bias
    scaled = scaled.masked_fill(~mask, -torch.inf)
    by_block = scaled.detach().amax(-1)
    top = scaled.new_full((len(scaled), len(indptr) - 1, scaled.shape[2]), -torch.inf)
    top = top.scatter_reduce(1, brows[:, None].expand_as(by_block), by_block, "amax")
    top = top.masked_fill(top == -torch.inf, 0)  # in rows without a visible entry
    weights = torch.exp(scaled - top.index_select(1, brows)[..., None])
    total = torch.zeros_like(top).index_add(1, brows, weights.sum(-1))
    weights = weights / torch.where(total == 0, 1, total).index_select(1, brows)[..., None]
    return weights.masked_fill(~mask, 0).to(scores.dtype)


def softmax_gradients(indptr: Tensor, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """The gradient of `softmax` in the scores (Z, number of blocks, B, B), for its result and its gradient."""
    dtype, brows = sum_dtype(out), row_of_each(indptr, indptr.new_empty(out.shape[1]))
    products = out.to(dtype) * grad.to(dtype)
    total = products.new_zeros(len(out), len(indptr) - 1, out.shape[2]).index_add(1, brows, products.sum(-1))
    return (scale * (products - out.to(dtype) * total.index_select(1, brows)[..., None])).to(out.dtype)


def attention(indptr: Tensor, indices: Tensor, inputs: AttentionInputs) -> Tensor:
    """Compute attention at the blocks, (Z, H, rows, C)."""
    query, key, value, key_mask, mask, scale, block = inputs
    rows, dtype = query.shape[2], sum_dtype(query)
    scores = sdd(indptr, indices, query.to(dtype), key.to(dtype), block)
    inside = mask_inside(indptr, indices, (rows, key.shape[2]), block, key_mask, mask)
    weights = softmax(indptr, indices, scores, None, inside, scale)
    return dsd(indptr, indices, weights, value.to(dtype), rows).to(query.dtype)


def mask_inside(
    indptr: Tensor, indices: Tensor, size: tuple[int, int], block: int, key_mask: Tensor | None, mask: Tensor | None
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
