"""`Pattern`: where the entries of a sparse matrix are, without their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from diffnet.ops.ragged import row_offsets

# A row of more entries than this is long: kernels divide it into pieces of this size and add up their sums in order,
# so that one row of 10,000 among rows of 7 doesn't keep a whole GPU waiting.
PIECE = 128


@dataclass(frozen=True, eq=False)
class Pattern:
    """The structure of a sparse matrix in CSR form; it carries no values.

    indptr: (rows+1,) int32 or int64, row r holds the entries indptr[r]:indptr[r+1]
    indices: (nnz,) of the same dtype, the column of each entry, ascending within a row, each at most once
    columns: the number of columns
    check: look whether all that is so, and raise ValueError naming what isn't. It reads the arrays, which waits for a
        GPU; pass False for arrays that are known to be right.
    """

    indptr: Tensor
    indices: Tensor
    columns: int
    # Not cached properties: torch.compile would look past the cache and trace the sorting into every step.
    _transpose: tuple[Pattern, Tensor] | None = field(default=None, repr=False)
    _long_pieces: Tensor | None = field(default=None, repr=False)
    check: InitVar[bool] = field(default=True, kw_only=True)

    def __post_init__(self, check: bool) -> None:
        # torch.compile makes patterns of stand-ins for tensors, which have nothing to check.
        if check and type(self.indptr) is Tensor:
            _check(self.indptr, self.indices, self.columns)

    @classmethod
    def from_row_lengths(cls, lengths: Tensor, indices: Tensor, columns: int, *, check: bool = True) -> Pattern:
        """The same from the number of entries of each row, (rows,) of any integer dtype, in place of indptr."""
        if lengths.ndim != 1 or lengths.is_floating_point():
            raise ValueError(f"row lengths should be 1-D integers, got {lengths.dtype} of {tuple(lengths.shape)}")
        zero = indices.new_zeros(1)
        return cls(torch.cat([zero, lengths.cumsum(0).to(indices.dtype)]), indices, columns, check=check)

    @classmethod
    def vector(cls, indices: Tensor, size: int, *, check: bool = True) -> Pattern:
        """A sparse vector of the given size: a matrix of one row."""
        return cls(indices.new_tensor([0, len(indices)]), indices, size, check=check)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.columns

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return len(self.indices)

    @property
    def row_lengths(self) -> Tensor:
        """(rows,) the number of entries of each row."""
        return torch.diff(self.indptr)

    @property
    def row_indices(self) -> Tensor:
        """(nnz,) the row of each entry."""
        return row_of_each(self.indptr, self.indices)

    @property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and for each of its entries the position of that entry in this one; sorted once."""
        if self._transpose is None:
            object.__setattr__(self, "_transpose", _sort_transpose(self))
        assert self._transpose is not None
        return self._transpose

    @property
    def long_pieces(self) -> Tensor:
        """(P, 3) int64: row, first entry and end of the pieces of rows of more than PIECE entries; found once."""
        if self._long_pieces is None:
            object.__setattr__(self, "_long_pieces", _find_long_pieces(self))
        assert self._long_pieces is not None
        return self._long_pieces

    def prepare(self) -> Pattern:
        """Find here, once, what products and their backward need, rather than in a step that may be compiled."""
        _ = self.long_pieces, self.transpose[0].long_pieces
        return self

    def to(self, device: torch.device | str | None) -> Pattern:
        indices = self.indices.to(device=device)
        if indices is self.indices:
            return self
        moved = None
        if self._transpose is not None:  # sorted once, moved ever after
            pattern, order = self._transpose
            moved = pattern.to(device), order.to(device)
        pieces = None if self._long_pieces is None else self._long_pieces.to(device)
        return Pattern(self.indptr.to(device), indices, self.columns, moved, pieces, check=False)


def row_of_each(indptr: Tensor, indices: Tensor) -> Tensor:
    """(nnz,) the row of each entry."""
    rows = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
    return torch.repeat_interleave(rows, torch.diff(indptr), output_size=len(indices))


def block_diagonal_pattern(patterns: Sequence[Pattern]) -> Pattern:
    """One pattern with the given ones along its diagonal. What all of them have found already is put together."""
    if len(patterns) == 1:
        return patterns[0]
    packed = _pack(patterns)
    transposes = [p._transpose for p in patterns if p._transpose is not None]
    if len(transposes) < len(patterns):
        return packed
    offsets = row_offsets([p.nnz for p in patterns])
    order = torch.cat([order + offset for (_, order), offset in zip(transposes, offsets, strict=True)])
    transposed = _pack([pattern for pattern, _ in transposes])
    return Pattern(packed.indptr, packed.indices, packed.columns, (transposed, order), packed._long_pieces, check=False)


def split_diagonal_pattern(pattern: Pattern, lengths: Sequence[int]) -> list[tuple[Pattern, slice]]:
    """The inverse for square blocks with the given numbers of rows: each block's pattern and where its entries are."""
    bounds = list(accumulate(lengths, initial=0))
    entries = pattern.indptr[bounds].tolist()
    return [
        (
            Pattern(
                pattern.indptr[lo : hi + 1] - first, pattern.indices[first:last] - lo, columns=hi - lo, check=False
            ),
            slice(first, last),
        )
        for lo, hi, first, last in zip(bounds, bounds[1:], entries, entries[1:], strict=False)
    ]


def _pack(patterns: Sequence[Pattern]) -> Pattern:
    rows = row_offsets([p.shape[0] for p in patterns])
    columns = [p.columns for p in patterns]
    entries = [p.nnz for p in patterns]
    starts = [p.indptr[:-1] + offset for p, offset in zip(patterns, row_offsets(entries), strict=True)]
    end = patterns[0].indptr.new_tensor([sum(entries)])
    indices = [p.indices + offset for p, offset in zip(patterns, row_offsets(columns), strict=True)]
    known = [p._long_pieces for p in patterns if p._long_pieces is not None]
    pieces = None
    if len(known) == len(patterns):
        shifts = zip(rows, row_offsets(entries), strict=True)
        pieces = torch.cat([p + p.new_tensor([r, e, e]) for p, (r, e) in zip(known, shifts, strict=True)])
    return Pattern(torch.cat([*starts, end]), torch.cat(indices), sum(columns), _long_pieces=pieces, check=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sort_transpose(pattern: Pattern) -> tuple[Pattern, Tensor]:
    order = torch.sort(pattern.indices, stable=True).indices
    counts = torch.bincount(pattern.indices, minlength=pattern.columns)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(pattern.indptr.dtype)
    return Pattern(indptr, pattern.row_indices[order], pattern.shape[0], check=False), order


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _find_long_pieces(pattern: Pattern) -> Tensor:
    lengths = pattern.row_lengths.long()
    long_rows = torch.nonzero(lengths > PIECE)[:, 0]
    counts = (lengths[long_rows] + PIECE - 1) // PIECE
    rows = torch.repeat_interleave(long_rows, counts)
    number = torch.arange(len(rows), device=rows.device) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = pattern.indptr.long()[rows] + number * PIECE
    return torch.stack([rows, first, torch.minimum(first + PIECE, pattern.indptr.long()[rows + 1])], dim=1)


def _check(indptr: Tensor, indices: Tensor, columns: int) -> None:
    for name, array in (("indptr", indptr), ("indices", indices)):
        if array.ndim != 1 or array.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} should be 1-D int32 or int64, got {array.dtype} of shape {tuple(array.shape)}")
    if indptr.dtype != indices.dtype or indptr.device != indices.device:
        raise ValueError(
            f"indptr and indices should have one dtype and device, got {indptr.dtype} on {indptr.device} "
            f"and {indices.dtype} on {indices.device}"
        )
    if columns < 0:
        raise ValueError(f"columns should be at least 0, got {columns}")
    if len(indptr) == 0:
        raise ValueError("indptr should have one value more than there are rows, got none")
    first, last = indptr[[0, -1]].tolist()
    if first != 0:
        raise ValueError(f"indptr should start at 0, got {first}")
    if last != len(indices):
        raise ValueError(f"indptr should end at the number of indices, {len(indices)}, got {last}")
    descents = torch.diff(indptr) < 0
    if descents.any():
        row = int(descents.nonzero()[0])
        raise ValueError(f"indptr should not descend, got {indptr[row]} then {indptr[row + 1]} at row {row}")
    outside = (indices < 0) | (indices >= columns)
    if outside.any():
        entry = int(outside.nonzero()[0])
        raise ValueError(f"indices should be from 0 to {columns - 1}, got {indices[entry]} at entry {entry}")
    rows = row_of_each(indptr, indices)
    wrong = (rows[1:] == rows[:-1]) & (indices[1:] <= indices[:-1])
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        before, after = indices[entry : entry + 2].tolist()
        what = f"column {after} twice" if before == after else f"{before} before {after}"
        raise ValueError(f"indices should ascend within a row, got {what} in row {rows[entry]}")
