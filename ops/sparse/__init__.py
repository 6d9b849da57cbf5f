"""Sparse matrices with separate structure and values: patterns, products and softmax."""

from diffnet.ops.sparse.ell import EllPattern
from diffnet.ops.sparse.hybrid import HybridPattern
from diffnet.ops.sparse.matrix import SparseMatrix, block_diagonal, split_diagonal
from diffnet.ops.sparse.op import diagonal, row_sum, sddmm, spmm
from diffnet.ops.sparse.pattern import Pattern, block_diagonal_pattern, split_diagonal_pattern
from diffnet.ops.sparse.softmax import sparse_softmax

__all__ = [
    "EllPattern",
    "HybridPattern",
    "Pattern",
    "SparseMatrix",
    "block_diagonal",
    "block_diagonal_pattern",
    "diagonal",
    "row_sum",
    "sddmm",
    "sparse_softmax",
    "split_diagonal",
    "split_diagonal_pattern",
    "spmm",
]
