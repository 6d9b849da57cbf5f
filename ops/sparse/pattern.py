"""`Pattern`: where the entries of a sparse matrix are, without their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.compiler import not_compiled
from diffnet.ops.common.ragged import row_offsets

# A row of more entries than this is long: kernels divide it into pieces of this size and add up their sums in order,
# so that one row of 10,000 among rows of 7 doesn't keep a whole GPU waiting.
PIECE = 128

# Programs take some rows at the same time, and wait for the longest. Where that would double their work, they take rows
# of about one length together.
ROWS_TOGETHER = 8
TOO_UNEVEN = 2.0


@dataclass(frozen=True, eq=False)
class Pattern:
    """The structure of a sparse matrix in CSR form; it carries no values.

    indptr: (rows+1,) int32 or int64, the entries indptr[i]:indptr[i+1] are those of row i, or of row row_order[i]
    indices: (nnz,) of the same dtype, the column of each entry, ascending within a row, each at most once
    columns: the number of columns
    row_order: (rows,) of the same dtype, each row once: the order in which rows are stored, see `with_row_order`; None
        for that of the matrix
    check: look whether all that is so, and raise ValueError naming what isn't. It reads the arrays, which waits for a
        GPU; pass False for arrays that are known to be right.
    """

    indptr: Tensor
    indices: Tensor
    columns: int
    row_order: Tensor | None = None
    # Not cached properties: torch.compile would look past the cache and trace the sorting into every step.
    _transpose: tuple[Pattern, Tensor] | None = field(default=None, repr=False)
    _long_pieces: Tensor | None = field(default=None, repr=False)
    _by_length: Tensor | None = field(default=None, repr=False)
    check: InitVar[bool] = field(default=True, kw_only=True)

    def __post_init__(self, check: bool) -> None:
        # torch.compile makes patterns of stand-ins for tensors, which have nothing to check.
        if check and type(self.indptr) is Tensor:
            _check(self.indptr, self.indices, self.columns, self.row_order)

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
        return self._of_each_row(torch.diff(self.indptr))

    @property
    def row_starts(self) -> Tensor:
        """(rows,) the first entry of each row."""
        return self._of_each_row(self.indptr[:-1])

    def _of_each_row(self, stored: Tensor) -> Tensor:
        return stored if self.row_order is None else stored[inverse_order(self.row_order)]

    @property
    def row_indices(self) -> Tensor:
        """(nnz,) the row of each entry."""
        rows = row_of_each(self.indptr, self.indices)
        return rows if self.row_order is None else self.row_order[rows]

    @property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and for each of its entries the position of that entry in this one; sorted once."""
        if self._transpose is None:
            object.__setattr__(self, "_transpose", _sort_transpose(self))
        assert self._transpose is not None
        return self._transpose

    @property
    def long_pieces(self) -> Tensor:
        """(P, 4) int64: row, where that is stored, first entry and end of each of the pieces of rows of more than PIECE
        entries; found once."""
        if self._long_pieces is None:
            object.__setattr__(self, "_long_pieces", _find_long_pieces(self))
        assert self._long_pieces is not None
        return self._long_pieces

    @property
    def rows_by_length(self) -> Tensor:
        """(rows,) the rows from the shortest to the longest where neighbours are of very uneven length, as they never
        are on a mesh; otherwise (0,). Found once."""
        if self._by_length is None:
            object.__setattr__(self, "_by_length", _find_rows_by_length(self))
        assert self._by_length is not None
        return self._by_length

    def prepare(self) -> Pattern:
        """Find here, once, what products and their backward need, rather than in a step that may be compiled."""
        for pattern in (self, self.transpose[0]):
            balanced_arrays(pattern, triton=True)
        return self

    def with_row_order(self, order: Tensor | None, *, check: bool = True) -> tuple[Pattern, Tensor]:
        """This pattern with its rows stored in another order, and for each entry where it stood before, (nnz,): values
        go there as values[…, that]. What products give stays the same, since rows keep their numbers.

        order: (rows,) integers, see `row_order`

        Kernels take rows as they are stored. Those taken at about the same time should read the same rows of the dense
        factor, which are then in the cache; an order along the surface does that where the vertices of a mesh are
        numbered at random. The transpose of a square pattern is stored in that order too. See `Pattern` for check.
        """
        if order is not None:
            order = order.to(self.indptr)
            if check:
                _check_order(order, self.indptr)
        rows = torch.arange(self.shape[0], device=self.indptr.device) if order is None else order
        stored, entries = rows_of(self, rows)
        return replace(stored, row_order=order, check=False), entries

    def to(self, device: torch.device | str | None) -> Pattern:
        indices = self.indices.to(device=device)
        if indices is self.indices:
            return self
        moved = None
        if self._transpose is not None:  # sorted once, moved ever after
            pattern, order = self._transpose
            moved = pattern.to(device), order.to(device)
        found = (self.row_order, self._long_pieces, self._by_length)
        row_order, pieces, by_length = (None if x is None else x.to(device) for x in found)
        return Pattern(self.indptr.to(device), indices, self.columns, row_order, moved, pieces, by_length, check=False)


class CsrArrays(NamedTuple):
    """What operators take of a pattern; an empty row_order or by_length stands for none."""

    indptr: Tensor
    indices: Tensor
    long_pieces: Tensor
    row_order: Tensor
    by_length: Tensor


def csr_arrays(pattern: Pattern, triton: bool) -> CsrArrays:
    """Pieces of long rows are looked for if Triton's kernels are to be used only."""
    none = pattern.indices.new_empty(0)
    order = none if pattern.row_order is None else pattern.row_order
    return CsrArrays(pattern.indptr, pattern.indices, pattern.long_pieces if triton else none, order, none)


def balanced_arrays(pattern: Pattern, triton: bool) -> CsrArrays:
    """The same for products, whose rows may be taken by length."""
    arrays = csr_arrays(pattern, triton)
    return arrays._replace(by_length=pattern.rows_by_length) if triton and pattern.row_order is None else arrays


def row_of_each(indptr: Tensor, indices: Tensor) -> Tensor:
    """(nnz,) the row of each entry, in the order in which rows are stored."""
    rows = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
    return torch.repeat_interleave(rows, torch.diff(indptr), output_size=len(indices))


def rows_of(pattern: Pattern, rows: Tensor) -> tuple[Pattern, Tensor]:
    """The pattern of some rows, one below the other, and where their entries stand in the whole."""
    lengths = pattern.row_lengths[rows]
    starts = torch.repeat_interleave(pattern.row_starts[rows] - (lengths.cumsum(0) - lengths), lengths)
    entries = starts + torch.arange(len(starts), device=starts.device)
    return Pattern.from_row_lengths(lengths, pattern.indices[entries], pattern.columns, check=False), entries


def inverse_order(order: Tensor) -> Tensor:
    """(n,) the place of each number in an order of 0 to n − 1, int64."""
    places = torch.empty_like(order, dtype=torch.int64)
    places[order.long()] = torch.arange(len(order), device=order.device)
    return places


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
    return replace(packed, _transpose=(transposed, order), check=False)


def split_diagonal_pattern(pattern: Pattern, lengths: Sequence[int]) -> list[tuple[Pattern, slice]]:
    """The inverse for square blocks with the given numbers of rows: each block's pattern and where its entries are.

    Raises ValueError where rows aren't stored block by block.
    """
    bounds = list(accumulate(lengths, initial=0))
    entries = pattern.indptr[bounds].tolist()
    order = pattern.row_order
    parts = []
    for lo, hi, first, last in zip(bounds, bounds[1:], entries, entries[1:], strict=False):
        own = None if order is None else order[lo:hi] - lo
        if own is not None and bool(((own < 0) | (own >= hi - lo)).any()):
            raise ValueError(f"among rows {lo} to {hi - 1}, a block of its own, others are stored")
        indptr, indices = pattern.indptr[lo : hi + 1] - first, pattern.indices[first:last] - lo
        parts.append((Pattern(indptr, indices, hi - lo, own, check=False), slice(first, last)))
    return parts


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
        pieces = torch.cat([p + p.new_tensor([r, r, e, e]) for p, (r, e) in zip(known, shifts, strict=True)])
    order = _pack_orders([p.row_order for p in patterns], starts, rows)
    by_length = [p._by_length for p in patterns if p._by_length is not None]
    uneven = None
    if len(by_length) == len(patterns):
        uneven = _pack_orders([o if len(o) > 0 else None for o in by_length], starts, rows)
        uneven = end[:0] if uneven is None else uneven
    return Pattern(
        torch.cat([*starts, end]), torch.cat(indices), sum(columns), order,
        _long_pieces=pieces, _by_length=uneven, check=False,
    )  # fmt: skip


def _pack_orders(orders: Sequence[Tensor | None], starts: Sequence[Tensor], offsets: Sequence[int]) -> Tensor | None:
    """One order of the rows of several patterns, of which those without keep theirs; starts: a value for each row."""
    if all(order is None for order in orders):
        return None
    own = [
        torch.arange(len(start), dtype=start.dtype, device=start.device) if order is None else order
        for order, start in zip(orders, starts, strict=True)
    ]
    return torch.cat([order + offset for order, offset in zip(own, offsets, strict=True)])


@not_compiled
def _sort_transpose(pattern: Pattern) -> tuple[Pattern, Tensor]:
    (rows, columns), row_order = pattern.shape, pattern.row_order
    counts = torch.bincount(pattern.indices, minlength=columns)
    if row_order is None:
        order = torch.sort(pattern.indices, stable=True).indices
    else:
        column = pattern.indices.long()
        if rows == columns:
            column, counts = inverse_order(row_order)[column], counts[row_order]
        else:
            row_order = None
        order = torch.sort(column * rows + pattern.row_indices).indices
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(pattern.indptr.dtype)
    return Pattern(indptr, pattern.row_indices[order], rows, row_order, check=False), order


@not_compiled
def _find_long_pieces(pattern: Pattern) -> Tensor:
    indptr = pattern.indptr.long()
    lengths = torch.diff(indptr)
    if lengths.numel() == 0 or lengths.max() <= PIECE:
        return lengths.new_empty(0, 4)
    long = torch.nonzero(lengths > PIECE)[:, 0]
    counts = (lengths[long] + PIECE - 1) // PIECE
    at = torch.repeat_interleave(long, counts)
    number = torch.arange(len(at), device=at.device) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = indptr[at] + number * PIECE
    rows = at if pattern.row_order is None else pattern.row_order.long()[at]
    return torch.stack([rows, at, first, torch.minimum(first + PIECE, indptr[at + 1])], dim=1)


@not_compiled
def _find_rows_by_length(pattern: Pattern) -> Tensor:
    lengths = torch.diff(pattern.indptr)
    short = torch.where(lengths > PIECE, 0, lengths)  # long ones are computed piece by piece
    groups = torch.nn.functional.pad(short, (0, -len(short) % ROWS_TOGETHER)).reshape(-1, ROWS_TOGETHER)
    if groups.numel() == 0 or ROWS_TOGETHER * groups.amax(1).sum() <= TOO_UNEVEN * short.sum():
        return pattern.indices.new_empty(0)
    return torch.sort(lengths, stable=True).indices.to(pattern.indptr)


def _check(indptr: Tensor, indices: Tensor, columns: int, row_order: Tensor | None) -> None:
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
    if row_order is not None:
        _check_order(row_order, indptr)
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
        row = int(rows[entry] if row_order is None else row_order[rows[entry]])
        raise ValueError(f"indices should ascend within a row, got {what} in row {row}")


def _check_order(order: Tensor, indptr: Tensor) -> None:
    rows = len(indptr) - 1
    if order.shape != (rows,) or order.dtype != indptr.dtype or order.device != indptr.device:
        raise ValueError(
            f"row_order should have shape ({rows},), dtype {indptr.dtype} and be on {indptr.device}, "
            f"got {order.dtype} of shape {tuple(order.shape)} on {order.device}"
        )
    missing = (order.sort().values != torch.arange(rows, device=order.device)).nonzero()
    if len(missing) > 0:
        raise ValueError(f"row_order should have each row once, row {int(missing[0])} is missing or twice")
