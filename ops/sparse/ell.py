"""ELL, a fixed number of places in every row, and a hybrid of it with CSR for rows of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend
from diffnet.ops.sparse.op import spmm
from diffnet.ops.sparse.pattern import PIECE, Pattern, rows_of

# What a further bucket costs, and an entry of the CSR rest, in places of an ELL bucket.
BUCKET_COST = 16_384
REST_COST = 1.5


@dataclass(frozen=True, eq=False)
class EllPattern:
    """The structure of a sparse matrix with the same number of places in every row.

    indices: (rows, width) int32 or int64, the column of each entry, ascending, and −1 at places left over at the end
    columns: the number of columns

    Values are (…, rows, width); what they hold at places left over counts for nothing.
    """

    indices: Tensor
    columns: int
    _filled: Pattern | None = field(default=None, repr=False)  # see `Pattern`

    @classmethod
    def from_pattern(cls, pattern: Pattern, width: int | None = None) -> tuple[EllPattern, Tensor]:
        """A CSR pattern in this form, of the width of its longest row unless given, and `entries` (rows, width): where
        each entry stands in the values of the CSR pattern, −1 at places left over.

        Reads the longest row's length, which waits for a GPU. Raises ValueError for a width that doesn't suffice.
        """
        lengths = pattern.row_lengths
        longest = int(lengths.max()) if len(lengths) else 0
        if width is None:
            width = longest
        if width < longest:
            raise ValueError(f"width should be at least the longest row's length, {longest}, got {width}")
        place = torch.arange(width, device=pattern.indices.device)
        there = place < lengths[:, None]
        entries = torch.where(there, pattern.row_starts[:, None] + place, -1)
        if pattern.nnz == 0:
            return cls(entries.to(pattern.indices.dtype), pattern.columns), entries
        return cls(torch.where(there, pattern.indices[entries.clamp(min=0)], -1), pattern.columns), entries

    def to_pattern(self) -> tuple[Pattern, Tensor]:
        """The CSR pattern, and `there` (rows, width) bool: values[…, there] are its values. Waits for a GPU."""
        there = self.there
        return Pattern.from_row_lengths(there.sum(1), self.indices[there], self.columns), there

    @property
    def there(self) -> Tensor:
        """(rows, width) bool, False at places left over."""
        return self.indices >= 0

    @property
    def filled(self) -> Pattern:
        """A CSR pattern of rows · width entries, in which places left over are entries of column 0; made once."""
        if self._filled is None:
            rows, width = self.indices.shape
            indices = self.indices.clamp(min=0).reshape(-1)
            indptr = torch.arange(rows + 1, device=indices.device, dtype=indices.dtype) * width
            object.__setattr__(self, "_filled", Pattern(indptr, indices, self.columns, check=False))
        assert self._filled is not None
        return self._filled

    def matmul(self, values: Tensor, x: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Sparse times dense: values (…, rows, width), x (…, columns, C) → (…, rows, C); see `spmm`."""
        if values.shape[-2:] != self.indices.shape:
            raise ValueError(f"values should be (…, {', '.join(map(str, self.indices.shape))}), are {values.shape}")
        if self.columns == 0:
            return values.sum(-1, keepdim=True) * x.new_zeros(x.shape[-1]).to(values.dtype)
        return spmm(self.filled, torch.where(self.there, values, 0).flatten(-2), x, backend=backend)


@dataclass(frozen=True, eq=False)
class HybridPattern:
    """A CSR pattern divided by the lengths of its rows: buckets of rows of about one length, and a rest.

    pattern: the whole, in the order of whose entries values are given
    buckets: for each its rows (n,), an ELL pattern of those, and where their entries stand (n, width), as in
        `EllPattern.from_pattern`
    rest: the rows (n,) left over, their CSR pattern, and where their entries stand (nnz,)
    """

    pattern: Pattern
    buckets: tuple[tuple[Tensor, EllPattern, Tensor], ...]
    rest: tuple[Tensor, Pattern, Tensor]

    @classmethod
    def from_pattern(cls, pattern: Pattern) -> HybridPattern:
        """Divided such that places left over, buckets and the rest cost least, see `bucket_widths`."""
        lengths = pattern.row_lengths
        histogram = torch.bincount(lengths.long()).tolist()
        widths = bucket_widths(histogram)
        buckets = []
        for below, width in pairwise([-1, *widths]):
            rows = torch.nonzero((lengths > below) & (lengths <= width))[:, 0]
            part, entries = rows_of(pattern, rows)
            ell, places = EllPattern.from_pattern(part, width)
            at = torch.where(places >= 0, entries[places.clamp(min=0)], -1) if len(entries) else places
            buckets.append((rows, ell, at))
        rows = torch.nonzero(lengths > (widths[-1] if widths else -1))[:, 0]
        return cls(pattern, tuple(buckets), (rows, *rows_of(pattern, rows)))

    def matmul(self, values: Tensor, x: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Sparse times dense: values (…, nnz) in the order of `pattern`, x (…, columns, C) → (…, rows, C)."""
        if values.ndim == 0 or values.shape[-1] != self.pattern.nnz:
            raise ValueError(f"values should have shape (…, {self.pattern.nnz}), shape is {tuple(values.shape)}")
        parts, rows = [], []
        for at, ell, entries in self.buckets:
            if values.shape[-1] == 0:
                given = values.new_zeros(*values.shape[:-1], *entries.shape)
            else:
                given = values[..., entries.clamp(min=0)]  # what stands at places left over counts for nothing
            parts.append(ell.matmul(given, x, backend=backend))
            rows.append(at)
        at, rest, entries = self.rest
        parts.append(spmm(rest, values[..., entries], x, backend=backend))
        rows.append(at)
        # Each row is in one part; its place among all of them is known once they stand one after the other.
        return torch.cat(parts, dim=-2)[..., torch.argsort(torch.cat(rows)), :]


def bucket_widths(histogram: list[int]) -> list[int]:
    """The widths of the ELL buckets that cost least for so many rows of each length; longer rows are the rest.

    A bucket costs its places, of which each row has as many as the longest in it, and BUCKET_COST; the rest costs its
    entries times REST_COST, and as much as a bucket. Found by dynamic programming over the lengths up to PIECE.
    """
    lengths = [n for n in range(min(len(histogram), PIECE + 1)) if histogram[n] > 0]
    best = [0.0]  # cost of the rows of the first i lengths, all in buckets
    cut = [0]
    for i, width in enumerate(lengths, start=1):
        rows = 0
        costs = []
        for j in range(i, 0, -1):
            rows += histogram[lengths[j - 1]]
            costs.append((best[j - 1] + rows * width + BUCKET_COST, j - 1))
        cost, start = min(costs)
        best.append(cost)
        cut.append(start)
    rest = [REST_COST * sum(n * histogram[n] for n in range(first, len(histogram))) for first in (*lengths, PIECE + 1)]
    totals = [b + r + (BUCKET_COST if r > 0 else 0) for b, r in zip(best, rest, strict=True)]
    end = min(range(len(totals)), key=lambda i: (totals[i], -i)) if totals else 0
    widths: list[int] = []
    while end > 0:
        widths.append(lengths[end - 1])
        end = cut[end]
    return widths[::-1]
