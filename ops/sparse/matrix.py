"""`SparseMatrix`: a pattern with one or several sets of values on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.checks import device_and_dtype, not_a_tensor
from diffnet.ops.common.compiler import is_stand_in
from diffnet.ops.sparse.op import from_scipy, from_torch, spmm
from diffnet.ops.sparse.pattern import Pattern, block_diagonal_pattern, check_blocks, split_diagonal_pattern
from diffnet.ops.sparse.reference import csr_tensor


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A pattern with values (…, nnz). Several sets of values are several matrices of one structure.

    >>> import torch
    >>> matrix = SparseMatrix.from_torch(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr())
    >>> matrix @ torch.ones(3, 1)
    tensor([[3.],
            [3.]])
    >>> matrix.mT.values
    tensor([1., 3., 2.])
    """

    pattern: Pattern
    values: Tensor

    def __post_init__(self) -> None:
        if is_stand_in(self.values):
            return
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern should be a Pattern, got {type(self.pattern).__name__}")
        if not isinstance(self.values, Tensor):
            raise not_a_tensor("values", self.values)
        if self.values.ndim == 0 or self.values.shape[-1] != self.pattern.nnz:
            raise ValueError(f"values should have shape (…, {self.pattern.nnz}), shape is {tuple(self.values.shape)}")

    def __repr__(self) -> str:
        values = self.values
        return f"SparseMatrix(shape={self.shape}, nnz={self.pattern.nnz}, dtype={values.dtype}, device={values.device})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, rows, columns)"""
        return *self.values.shape[:-1], *self.pattern.shape

    @property
    def mT(self) -> SparseMatrix:
        """The transposed matrix, so that `matrix.mT @ x` is the transposed product."""
        pattern, order = self.pattern.transpose
        return SparseMatrix(pattern, self.values[..., order])

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> SparseMatrix:
        """Move the pattern and the values to a device, and convert the values to a dtype, as `torch.Tensor.to` does.

        `.to(dtype)` is allowed. Index arrays keep their dtype.
        """
        device, dtype = device_and_dtype(device, dtype)
        values = self.values.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return SparseMatrix(self.pattern.to(device, non_blocking=non_blocking), values)

    def pin_memory(self) -> SparseMatrix:
        """Copy the pattern and the values to pinned memory."""
        return SparseMatrix(self.pattern.pin_memory(), self.values.pin_memory())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> SparseMatrix:
        """Apply a function to the values and to all index arrays, see `Pattern.map_tensors`."""
        return SparseMatrix(self.pattern.map_tensors(function), function(self.values))

    def with_row_order(self, order: Tensor | None) -> SparseMatrix:
        """Return the same matrix with its rows stored in another order; None for their own. See `Pattern`."""
        if order is None and self.pattern.row_order is None:
            return self
        pattern, entries = self.pattern.with_row_order(order)
        return SparseMatrix(pattern, self.values[..., entries])

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply by x (columns, C) or (columns,), see `spmm`. Returns (…, rows, C) or (…, rows). Differentiable."""
        if isinstance(x, Tensor) and x.ndim == 1:
            return spmm(self.pattern, self.values, x[:, None])[..., 0]
        return spmm(self.pattern, self.values, x)

    @classmethod
    def from_torch(cls, matrix: Tensor, *, check: bool = True) -> SparseMatrix:
        """Convert a torch.sparse_csr or torch.sparse_coo tensor (rows, columns). See `Pattern` for `check`.

        A CSR result shares its memory, but copies values that require a gradient. The entries of COO are sorted, and
        those at one place added up. Gradients reach the tensor.

        Raises TypeError for other objects, ValueError for tensors of other layouts.
        """
        return cls(*from_torch(matrix, check=check))

    def to_torch(self) -> Tensor:
        """Convert one set of values to a torch.sparse_csr tensor. It shares memory if rows have their own order."""
        self._expect_one_set()
        matrix = self.with_row_order(None)
        return csr_tensor(matrix.pattern.indptr, matrix.pattern.indices, matrix.values, matrix.pattern.shape)

    def to_edges(self) -> tuple[Tensor, Tensor]:
        """The entries as weighted edges of a graph, as layers of PyTorch Geometric take them.

        Returns edge_index (2, nnz) int64, from the columns in [0] to the rows in [1], and edge_weight (nnz, …). The sum
        of edge_weight ∘ x[edge_index[0]] over the edges to each row is the product with x. Several sets of values
        (S, nnz), such as those of `operators.gradient`, give edge_weight (nnz, S).

        >>> import torch
        >>> matrix = SparseMatrix.from_torch(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr())
        >>> matrix.to_edges()
        (tensor([[0, 2, 1],
                [0, 0, 1]]), tensor([1., 2., 3.]))
        """
        ends = torch.stack([self.pattern.column_indices, self.pattern.row_indices])
        return ends.long(), self.values.movedim(-1, 0)

    @classmethod
    def from_scipy(cls, matrix: Any, *, check: bool = True) -> SparseMatrix:
        """Convert a SciPy sparse matrix or array of any format. The memory of a CSR one is shared.

        Raises ValueError, see `Pattern`, if its sort_indices() or sum_duplicates() has to be called first. Raises
        TypeError for other objects.
        """
        return cls(*from_scipy(matrix, check=check))

    def to_scipy(self) -> Any:
        """Convert one set of values to a scipy.sparse.csr_array."""
        from scipy.sparse import csr_array

        self._expect_one_set()
        matrix = self.with_row_order(None)
        arrays = (matrix.values.detach(), matrix.pattern.indices, matrix.pattern.indptr)
        return csr_array(tuple(a.cpu().numpy() for a in arrays), shape=matrix.pattern.shape)

    def _expect_one_set(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"one set of values expected, values have shape {tuple(self.values.shape)}")


def block_diagonal(matrices: Sequence[SparseMatrix]) -> SparseMatrix:
    """Put matrices along the diagonal of one matrix.

    Raises ValueError for no matrices, and for matrices that differ in the number of sets of values, dtype or device.
    """
    check_matrix_blocks(matrices)
    if len(matrices) == 1:
        return matrices[0]
    pattern = block_diagonal_pattern([m.pattern for m in matrices])
    return SparseMatrix(pattern, torch.cat([m.values for m in matrices], dim=-1))


def check_matrix_blocks(matrices: Sequence[SparseMatrix]) -> None:
    """Check that matrices can be the blocks of one matrix. Raises ValueError, see `block_diagonal`."""
    check_blocks([m.pattern for m in matrices])
    if len({(m.values.shape[:-1], m.values.dtype) for m in matrices}) > 1:
        kinds = sorted({f"{tuple(m.values.shape[:-1])} of {m.values.dtype}" for m in matrices})
        raise ValueError(f"matrices should have the same sets of values and dtype, got {', '.join(kinds)}")


def split_diagonal(matrix: SparseMatrix, lengths: Sequence[int]) -> list[SparseMatrix]:
    """Split a matrix into square diagonal blocks with these numbers of rows, the inverse of `block_diagonal`.

    Raises ValueError if an entry lies outside of the blocks, or if the lengths don't add up to the rows.
    """
    parts = split_diagonal_pattern(matrix.pattern, lengths)
    return [SparseMatrix(pattern, matrix.values[..., entries]) for pattern, entries in parts]
