"""Sparse matrices whose structure and values live apart, and their products with dense ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.ragged import row_offsets

# Said once a process at the first sparse tensor: nothing here depends on the parts that may change, and patterns are
# checked where they are made.
for _message in ("Sparse CSR tensor support is in beta state", "Sparse invariant checks are implicitly disabled"):
    warnings.filterwarnings("ignore", message=_message)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The structure of a sparse matrix in CSR form; it carries no values.

    indptr: (rows+1,) int32 or int64, row r holds the entries indptr[r]:indptr[r+1]
    indices: (nnz,) of the same dtype, the column of each entry
    columns: the number of columns
    """

    indptr: Tensor
    indices: Tensor
    columns: int
    # Not a cached_property: torch.compile would look past the cache and trace the sorting into every step.
    _transpose: tuple[Pattern, Tensor] | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.columns

    @property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and for each of its entries the position of that entry in this one; sorted once."""
        if self._transpose is None:
            object.__setattr__(self, "_transpose", _sort_transpose(self))
        assert self._transpose is not None
        return self._transpose

    def to(self, device: torch.device | str | None) -> Pattern:
        indices = self.indices.to(device=device)
        if indices is self.indices:
            return self
        moved = None
        if self._transpose is not None:  # sorted once, moved ever after
            pattern, order = self._transpose
            moved = pattern.to(device), order.to(device)
        return Pattern(self.indptr.to(device), indices, self.columns, moved)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sort_transpose(pattern: Pattern) -> tuple[Pattern, Tensor]:
    order = torch.sort(pattern.indices, stable=True).indices
    counts = torch.bincount(pattern.indices, minlength=pattern.columns)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(pattern.indptr.dtype)
    rows = _row_of_each(pattern.indptr, pattern.indices)
    return Pattern(indptr, rows[order], pattern.shape[0]), order


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A pattern with one or several sets of values on it.

    values: (…, nnz), so that several matrices share one structure
    """

    pattern: Pattern
    values: Tensor

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseMatrix:
        return SparseMatrix(self.pattern.to(device), self.values.to(device=device, dtype=dtype))

    def to_torch(self) -> Tensor:
        """A torch.sparse_csr tensor; for one set of values only."""
        if self.values.ndim != 1:
            raise ValueError(f"one set of values expected, values have shape {tuple(self.values.shape)}")
        return _csr(self.pattern.indptr, self.pattern.indices, self.values, self.pattern.columns)

    def __matmul__(self, x: Tensor) -> Tensor:
        return spmm(self.pattern, self.values, x)


def block_diagonal(matrices: Sequence[SparseMatrix]) -> SparseMatrix:
    """One matrix with the given ones along its diagonal; all hold the same number of sets of values."""
    if len(matrices) == 1:
        return matrices[0]
    patterns = [m.pattern for m in matrices]
    packed = _block_diagonal_pattern(patterns)
    transposes = [p._transpose for p in patterns if p._transpose is not None]
    if len(transposes) == len(patterns):  # sorted already: put together rather than sorted again
        offsets = row_offsets([len(p.indices) for p in patterns])
        order = torch.cat([order + offset for (_, order), offset in zip(transposes, offsets, strict=True)])
        packed = replace(packed, _transpose=(_block_diagonal_pattern([p for p, _ in transposes]), order))
    return SparseMatrix(packed, torch.cat([m.values for m in matrices], dim=-1))


def split_diagonal(matrix: SparseMatrix, lengths: Sequence[int]) -> list[SparseMatrix]:
    """The inverse of `block_diagonal` for square blocks with the given numbers of rows."""
    pattern = matrix.pattern
    bounds = list(accumulate(lengths, initial=0))
    entries = pattern.indptr[bounds].tolist()
    return [
        SparseMatrix(
            Pattern(pattern.indptr[lo : hi + 1] - first, pattern.indices[first:last] - lo, hi - lo),
            matrix.values[..., first:last],
        )
        for lo, hi, first, last in zip(bounds, bounds[1:], entries, entries[1:], strict=False)
    ]


def spmm(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """Sparse times dense, for every set of values on the pattern.

    values (…, nnz), x (columns, C) → (…, rows, C), in the dtype of the values (as sparse products are under autocast).
    Differentiable in values and x.
    """
    transposed, order = pattern.transpose
    out: Tensor = _spmm(
        pattern.indptr,
        pattern.indices,
        values.reshape(-1, values.shape[-1]),
        x.to(values.dtype),
        transposed.indptr,
        transposed.indices,
        order,
    )
    return out.reshape(*values.shape[:-1], *out.shape[-2:])


def sddmm(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Dense times dense, (A Bᵀ), sampled on a CSR pattern: a (S, rows, C), b (columns, C) → (S, nnz)."""
    return (a[:, _row_of_each(indptr, indices)] * b[indices]).sum(-1)


# Custom operators keep torch.compile from tracing into sparse tensors, and are where kernels will take their place.
@torch.library.custom_op("diffnet::spmm", mutates_args=())
def _spmm(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, t_indptr: Tensor, t_indices: Tensor, order: Tensor
) -> Tensor:
    """Aₛ x for every set s of values (S, nnz); the last three arguments are for the backward only."""
    return torch.stack([_matmul(indptr, indices, v, x) for v in values])


@_spmm.register_fake
def _(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, t_indptr: Tensor, t_indices: Tensor, order: Tensor
) -> Tensor:
    return x.new_empty(len(values), len(indptr) - 1, x.shape[1])


@torch.library.custom_op("diffnet::spmm_sum", mutates_args=())
def _spmm_sum(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """Σₛ Aₛ xₛ for values (S, nnz) and x (S, columns, C)."""
    return torch.stack([_matmul(indptr, indices, v, y) for v, y in zip(values, x, strict=True)]).sum(0)


@_spmm_sum.register_fake
def _(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(len(indptr) - 1, x.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, values, x, t_indptr, t_indices, order = ctx.saved_tensors
    need_values, need_x = ctx.needs_input_grad[2:4]
    grad = grad.to(values.dtype)  # autocast may hand back a narrower one
    grad_values = sddmm(indptr, indices, grad, x) if need_values else None
    grad_x = _spmm_sum(t_indptr, t_indices, values[:, order], grad.contiguous()) if need_x else None
    return None, None, grad_values, grad_x, None, None, None


_spmm.register_autograd(_spmm_backward, setup_context=_save)


def _matmul(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    if x.is_cuda:
        return _csr(indptr, indices, values, len(x)) @ x
    # On the CPU the COO product adds up each row in order, as the original implementation does, so networks can be
    # compared with it to the last bit: float32 gradients of a deep ReLU network move by 1e-3 with the order of sums.
    entries = torch.stack([_row_of_each(indptr, indices), indices]).long()
    shape = (len(indptr) - 1, len(x))
    return torch.sparse_coo_tensor(entries, values, shape, check_invariants=False, is_coalesced=True) @ x


def _row_of_each(indptr: Tensor, indices: Tensor) -> Tensor:
    rows = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
    return torch.repeat_interleave(rows, torch.diff(indptr), output_size=len(indices))


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    return torch.sparse_csr_tensor(indptr, indices, values, (len(indptr) - 1, columns), check_invariants=False)


def _block_diagonal_pattern(patterns: Sequence[Pattern]) -> Pattern:
    columns = [p.columns for p in patterns]
    entries = [len(p.indices) for p in patterns]
    starts = [p.indptr[:-1] + offset for p, offset in zip(patterns, row_offsets(entries), strict=True)]
    end = patterns[0].indptr.new_tensor([sum(entries)])
    indices = [p.indices + offset for p, offset in zip(patterns, row_offsets(columns), strict=True)]
    return Pattern(torch.cat([*starts, end]), torch.cat(indices), sum(columns))
