"""ELL patterns, with a fixed number of places in every row, and hybrids of ELL and CSR for rows of uneven length."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.memo import memoized
from diffnet.ops.sparse.checks import check_operand
from diffnet.ops.sparse.op import spmm
from diffnet.ops.sparse.pattern import PIECE, Pattern, rows_of

# The costs of one more bucket and of one entry of the CSR rest, in places of an ELL bucket.
BUCKET_COST = 16_384
REST_COST = 1.5


@dataclass(frozen=True, eq=False)
class EllPattern:
    """The structure of a sparse matrix with the same number of places in every row.

    Values have shape (…, rows, width). Values at unused places are ignored.

    Args:
        indices: (rows, width) int32 or int64, the column of each entry in ascending order. Unused places come last and
            hold −1.
        columns: the number of columns

    >>> import torch
    >>> pattern = EllPattern(torch.tensor([[0, 2], [1, -1]]), 3)
    >>> pattern.matmul(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.eye(3))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])
    """

    indices: Tensor
    columns: int
    _filled: Pattern | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.indices, Tensor) and not self.indices.is_contiguous():
            # The only way to set a field of a frozen dataclass.
            object.__setattr__(self, "indices", self.indices.contiguous())

    @classmethod
    def from_pattern(cls, pattern: Pattern, width: int | None = None) -> tuple[EllPattern, Tensor]:
        """Convert a CSR pattern.

        This reads the length of the longest row, so it waits for a GPU.

        Args:
            pattern: the CSR pattern
            width: by default the length of the longest row

        Returns:
            The ELL pattern, and `entries` (rows, width) int64: the position of each entry in the values of the CSR
            pattern, −1 at unused places.

        Raises:
            ValueError: if a row is longer than the width.
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
        """Convert to a CSR pattern. Waits for a GPU.

        Returns the CSR pattern and `there` (rows, width) bool; values[…, there] are the values on the CSR pattern.
        """
        there = self.there
        return Pattern.from_row_lengths(there.sum(1), self.indices[there], self.columns), there

    @property
    def there(self) -> Tensor:
        """Whether each place is used, (rows, width) bool."""
        return self.indices >= 0

    @property
    def filled(self) -> Pattern:
        """A CSR pattern of rows · width entries, in which unused places are entries of column 0. Made once."""
        return memoized(self, "_filled", _fill)

    def matmul(self, values: Tensor, x: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Multiply sparse by dense: values (…, rows, width), x (…, columns, C) → (…, rows, C); see `spmm`."""
        device = self.indices.device
        check_operand("values", values, tuple(self.indices.shape), device)
        check_operand("the dense factor", x, (self.columns, "C"), device)
        used = values.masked_fill(~self.there, 0)
        if self.columns == 0:
            empty = Pattern(self.indices.new_zeros(len(self.indices) + 1), self.indices.new_empty(0), 0, check=False)
            return spmm(empty, used.flatten(-2)[..., :0], x, backend=backend)
        return spmm(self.filled, used.flatten(-2), x, backend=backend)


def _fill(ell: EllPattern) -> Pattern:
    rows, width = ell.indices.shape
    indices = ell.indices.clamp(min=0).reshape(-1)
    indptr = torch.arange(rows + 1, device=indices.device, dtype=indices.dtype) * width
    return Pattern(indptr, indices, ell.columns, check=False)


@dataclass(frozen=True, eq=False)
class HybridPattern:
    """A CSR pattern whose rows are divided by length into ELL buckets and a CSR rest.

    Args:
        pattern: the whole pattern. Values are given in its order.
        buckets: for each bucket its rows (n,), their ELL pattern, and the positions (n, width) of their entries in
            `pattern`, as from `EllPattern.from_pattern`
        rest: the other rows (n,), their CSR pattern, and the positions (nnz,) of their entries in `pattern`

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> HybridPattern.from_pattern(pattern).matmul(torch.tensor([1.0, 2.0, 3.0]), torch.eye(3))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])
    """

    pattern: Pattern
    buckets: tuple[tuple[Tensor, EllPattern, Tensor], ...]
    rest: tuple[Tensor, Pattern, Tensor]

    @classmethod
    def from_pattern(cls, pattern: Pattern) -> HybridPattern:
        """Divide a pattern so that unused places, buckets and the rest cost least, see `bucket_widths`."""
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
        """Multiply sparse by dense: values (…, nnz) in the order of `pattern`, x (…, columns, C) → (…, rows, C)."""
        device = self.pattern.indices.device
        check_operand("values", values, (self.pattern.nnz,), device)
        check_operand("the dense factor", x, (self.pattern.columns, "C"), device)
        parts, rows = [], []
        for at, ell, entries in self.buckets:
            if values.shape[-1] == 0:
                given = values.new_zeros(*values.shape[:-1], *entries.shape)
            else:
                given = values[..., entries.clamp(min=0)]  # values at unused places are ignored
            parts.append(ell.matmul(given, x, backend=backend))
            rows.append(at)
        at, rest, entries = self.rest
        parts.append(spmm(rest, values[..., entries], x, backend=backend))
        rows.append(at)
        # Each row is in one part. Sorting the concatenated row numbers brings the rows back in order.
        return torch.cat(parts, dim=-2)[..., torch.argsort(torch.cat(rows)), :]


def bucket_widths(histogram: list[int]) -> list[int]:
    """Choose the widths of the ELL buckets with the least cost. Rows longer than the last width are the rest.

    A bucket costs BUCKET_COST and its places: every row has as many as the longest row in the bucket. The rest costs
    BUCKET_COST and REST_COST for each entry. The widths are found by dynamic programming over the lengths up to PIECE.

    Args:
        histogram: the number of rows of each length, from 0 on

    >>> bucket_widths([0, 0, 0, 0, 0, 20_000, 60_000, 18_000, 2_000])
    [5, 6, 7, 8]
    """
    lengths = [n for n in range(min(len(histogram), PIECE + 1)) if histogram[n] > 0]
    best = [0.0]  # the cost of the rows of the first i lengths, if all are in buckets
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
