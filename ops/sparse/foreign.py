"""Sparse matrices of PyTorch and SciPy as a pattern and values."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffnet.ops.sparse.pattern import Pattern

# A torch.sparse_csr or torch.sparse_coo tensor, a matrix or array of scipy.sparse, or a `SparseMatrix`.
MatrixLike: TypeAlias = Any


def from_torch(matrix: Any, *, check: bool = True) -> tuple[Pattern, Tensor]:
    """See `SparseMatrix.from_torch`."""
    if not isinstance(matrix, Tensor):
        raise TypeError(f"a torch.sparse_csr or torch.sparse_coo tensor expected, got {type(matrix).__name__}")
    if matrix.layout not in (torch.sparse_csr, torch.sparse_coo) or matrix.ndim != 2:
        raise ValueError(
            f"a 2-D torch.sparse_csr or torch.sparse_coo tensor expected, got {matrix.ndim}-D of {matrix.layout}"
        )
    if matrix.layout == torch.sparse_coo:
        if matrix.dense_dim() != 0:
            raise ValueError(f"a sparse tensor without dense dimensions expected, got {matrix.dense_dim()}")
        entries = matrix.coalesce()  # sorted by rows and columns, each once
        rows, columns = entries.indices()
        lengths = torch.bincount(rows, minlength=matrix.shape[0])
        return Pattern.from_row_lengths(lengths, columns, matrix.shape[1], check=check), entries.values()
    pattern = Pattern(matrix.crow_indices(), matrix.col_indices(), matrix.shape[1], check=check)
    # torch.compile can't take a view of a sparse tensor.
    values = matrix.values()  # type: ignore[no-untyped-call]
    return pattern, values.clone() if values.requires_grad else values.detach()


def from_scipy(matrix: Any, *, check: bool = True) -> tuple[Pattern, Tensor]:
    """See `SparseMatrix.from_scipy`."""
    if not hasattr(matrix, "tocsr"):
        found = type(matrix).__name__
        raise TypeError(f"a SciPy sparse matrix expected, got {found}; write scipy.sparse.csr_array(matrix)")
    csr = matrix.tocsr()
    indptr, indices, values = (torch.from_numpy(a) for a in (csr.indptr, csr.indices, csr.data))
    return Pattern(indptr, indices, csr.shape[1], check=check), values


def pattern_and_values(matrix: MatrixLike) -> tuple[Pattern, Tensor]:
    """The pattern and the values of a matrix. Raises TypeError for other objects, with what is expected."""
    if isinstance(matrix, Tensor):
        return from_torch(matrix)
    if hasattr(matrix, "tocsr"):
        return from_scipy(matrix)
    if hasattr(matrix, "pattern") and hasattr(matrix, "values"):  # a `SparseMatrix`, whose module imports this one
        return matrix.pattern, matrix.values
    raise TypeError(
        "pattern should be a Pattern or a sparse matrix (SparseMatrix, torch.sparse_csr, torch.sparse_coo or SciPy), "
        f"got {type(matrix).__name__}"
    )


def pattern_of(given: Any) -> Pattern:
    """A pattern as it is, or the pattern of a matrix. Raises TypeError for other objects."""
    return given if isinstance(given, Pattern) else pattern_and_values(given)[0]
