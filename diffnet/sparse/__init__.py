"""Layers on sparse matrices without blocks, for networks of any kind."""

from diffnet.sparse.attention import SparseMultiheadAttention
from diffnet.sparse.linear import SparseLinear

__all__ = ["SparseLinear", "SparseMultiheadAttention"]
