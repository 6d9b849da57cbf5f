"""Layers on block-sparse matrices."""

from diffnet.block_sparse.attention import BlockSparseAttention
from diffnet.block_sparse.conv2d import BlockSparseConv2d
from diffnet.block_sparse.linear import BlockSparseLinear

__all__ = ["BlockSparseAttention", "BlockSparseConv2d", "BlockSparseLinear"]
