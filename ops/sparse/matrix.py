"""`SparseMatrix`: a pattern with one or several sets of values on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.sparse.op import spmm
from diffnet.ops.sparse.pattern import Pattern, block_diagonal_pattern, split_diagonal_pattern


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A pattern with one or several sets of values on it.

    values: (…, nnz), so that several matrices share one structure
    """

    pattern: Pattern
    values: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):  # see `Pattern`
            return
        if self.values.ndim == 0 or self.values.shape[-1] != self.pattern.nnz:
            raise ValueError(f"values should have shape (…, {self.pattern.nnz}), shape is {tuple(self.values.shape)}")

    @property
    def mT(self) -> SparseMatrix:
        """The transposed matrix."""
        pattern, order = self.pattern.transpose
        return SparseMatrix(pattern, self.values[..., order])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseMatrix:
        return SparseMatrix(self.pattern.to(device), self.values.to(device=device, dtype=dtype))

    def with_row_order(self, order: Tensor | None) -> SparseMatrix:
        """The same matrix with its rows stored in another order, or in their own; see `Pattern.with_row_order`."""
        if order is None and self.pattern.row_order is None:
            return self
        pattern, entries = self.pattern.with_row_order(order)
        return SparseMatrix(pattern, self.values[..., entries])

    def __matmul__(self, x: Tensor) -> Tensor:
        return spmm(self.pattern, self.values, x)

    @classmethod
    def from_torch(cls, matrix: Tensor, *, check: bool = True) -> SparseMatrix:
        """Of a torch.sparse_csr tensor (rows, columns), sharing its memory. See `Pattern` for check."""
        if matrix.layout != torch.sparse_csr or matrix.ndim != 2:
            raise ValueError(f"a 2-D torch.sparse_csr tensor expected, got {matrix.ndim}-D of {matrix.layout}")
        pattern = Pattern(matrix.crow_indices(), matrix.col_indices(), matrix.shape[1], check=check)
        return cls(pattern, matrix.values())

    def to_torch(self) -> Tensor:
        """A torch.sparse_csr tensor, sharing this one's memory where rows are stored in their own order; for one set
        of values only."""
        self._expect_one_set()
        matrix = self.with_row_order(None)
        arrays = (matrix.pattern.indptr, matrix.pattern.indices, matrix.values)
        return torch.sparse_csr_tensor(*arrays, matrix.pattern.shape, check_invariants=False)

    @classmethod
    def from_scipy(cls, matrix: Any, *, check: bool = True) -> SparseMatrix:
        """Of a SciPy sparse matrix or array of any format, sharing the memory of a CSR one.

        Raises ValueError, see `Pattern`, where its sort_indices() or sum_duplicates() should be called first.
        """
        csr = matrix.tocsr()
        arrays = (torch.from_numpy(a) for a in (csr.indptr, csr.indices, csr.data))
        indptr, indices, values = arrays
        return cls(Pattern(indptr, indices, csr.shape[1], check=check), values)

    def to_scipy(self) -> Any:
        """A scipy.sparse.csr_array; for one set of values only."""
        from scipy.sparse import csr_array

        self._expect_one_set()
        matrix = self.with_row_order(None)
        arrays = (matrix.values.detach(), matrix.pattern.indices, matrix.pattern.indptr)
        return csr_array(tuple(a.cpu().numpy() for a in arrays), shape=matrix.pattern.shape)

    def _expect_one_set(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"one set of values expected, values have shape {tuple(self.values.shape)}")


def block_diagonal(matrices: Sequence[SparseMatrix]) -> SparseMatrix:
    """One matrix with the given ones along its diagonal; all hold the same number of sets of values."""
    if len(matrices) == 1:
        return matrices[0]
    pattern = block_diagonal_pattern([m.pattern for m in matrices])
    return SparseMatrix(pattern, torch.cat([m.values for m in matrices], dim=-1))


def split_diagonal(matrix: SparseMatrix, lengths: Sequence[int]) -> list[SparseMatrix]:
    """The inverse of `block_diagonal` for square blocks with the given numbers of rows."""
    parts = split_diagonal_pattern(matrix.pattern, lengths)
    return [SparseMatrix(pattern, matrix.values[..., entries]) for pattern, entries in parts]
