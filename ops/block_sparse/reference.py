"""Block-sparse products and softmax in plain PyTorch: gathered blocks, a batched product, and a sum by block row.

Shapes: Z batches, H heads, B the block's edge. Low precision is added up in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.sparse.pattern import row_of_each


def sdd(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor, block: int) -> Tensor:
    """A Bᵀ at the blocks: a (Z, H, rows, K) and b (Z, H, columns, K) → (Z, number of blocks, B, B)."""
    rows, columns = (_in_blocks(x, block) for x in (a, b))
    with torch.autocast(a.device.type, enabled=False):
        return (rows[:, row_of_each(indptr, indices)] @ columns[:, indices].mT).to(a.dtype)


def dsd(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, rows: int) -> Tensor:
    """S X: values (Z, number of blocks, B, B) and x (Z, H, columns, C) → (Z, H, rows, C)."""
    (batches, _, block, _), heads = values.shape, x.shape[1]
    dense = _in_blocks(x, block)
    block_rows = -(-rows // block)
    with torch.autocast(x.device.type, enabled=False):
        products = values.to(dense.dtype) @ dense[:, indices]
    out = dense.new_zeros(batches, heads * block_rows, block, x.shape[3])
    out = out.index_add(1, row_of_each(indptr, indices), products)
    out = out.reshape(batches, heads, block_rows * block, x.shape[3])[:, :, :rows]
    return out.to(x.dtype).contiguous()


def softmax(indptr: Tensor, indices: Tensor, scores: Tensor, bias: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """Softmax of scale · scores + bias over each row; scores (Z, number of blocks, B, B), bias (number of blocks, B, B)
    or None, mask (Z or 1, number of blocks, B, B) bool. Where the mask is False, and in rows without a True, 0."""
    brows = row_of_each(indptr, indices).long()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if bias is not None:
        wide = wide + bias
    wide = wide.masked_fill(~mask, -torch.inf)
    top = wide.new_full((len(wide), len(indptr) - 1, wide.shape[2]), -torch.inf)
    top = top.scatter_reduce(1, brows[:, None].expand_as(wide[..., 0]), wide.amax(-1), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(wide - top[:, brows, :, None])
    total = torch.zeros_like(top).index_add(1, brows, weights.sum(-1))
    return (weights / torch.where(total > 0, total, 1)[:, brows, :, None]).to(scores.dtype)


def softmax_backward(indptr: Tensor, indices: Tensor, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """scale · p ∘ (g − Σ p ∘ g), sums over each row."""
    brows = row_of_each(indptr, indices).long()
    wide = torch.promote_types(out.dtype, torch.float32)
    p, g = out.to(wide), grad.to(wide)
    total = p.new_zeros(len(p), len(indptr) - 1, p.shape[2]).index_add(1, brows, (p * g).sum(-1))
    return (scale * p * (g - total[:, brows, :, None])).to(out.dtype)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """(Z, H, N, C) → (Z, H · block rows, B, C) in float32 or wider, padded with 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, 0, 0, -x.shape[2] % block))
    return padded.reshape(len(x), x.shape[1] * -(-x.shape[2] // block), block, x.shape[3])
