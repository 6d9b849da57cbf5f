"""`HybridPattern`: a CSR pattern whose rows are grouped by length into ELL buckets and a CSR rest.

A product is one launch on the CSR pattern. Programs take rows bucket by bucket, so the rows of one program are about
equally long. Only rows of more than PIECE entries take two further launches, as in every CSR product.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.checks import check_integer
from diffnet.ops.common.memo import memoized, remember
from diffnet.ops.sparse.op import sddmm, spmm
from diffnet.ops.sparse.pattern import PIECE, Pattern, at_first_use, check_is_pattern
from diffnet.ops.sparse.softmax import sparse_softmax

# The costs of one more bucket and of one entry of the CSR rest, in places of an ELL bucket.
BUCKET_COST = 16_384
REST_COST = 1.5


@dataclass(frozen=True, eq=False)
class HybridPattern:
    """A CSR pattern whose rows are divided by length into ELL buckets and a CSR rest.

    Values have shape (…, nnz) and the order of `pattern`. If `pattern` stores its rows in an order of their own, see
    `Pattern.with_row_order`, products take them in this order.

    Args:
        pattern: the whole pattern
        widths: the widths of the buckets, ascending. A bucket has the rows that are longer than the previous width
            and at most as long as its own. Rows longer than the last width are the rest.

    Raises:
        TypeError: if `pattern` is no `Pattern` or a width is no integer.
        ValueError: if the widths don't ascend from 0 on.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> HybridPattern.from_pattern(pattern).matmul(torch.tensor([1.0, 2.0, 3.0]), torch.eye(3))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])
    """

    pattern: Pattern
    widths: tuple[int, ...]
    # Found at first use, see `memoized`.
    _grouped: ClassVar[Pattern | None] = None
    _transpose: ClassVar[tuple[HybridPattern, Tensor] | None] = None

    def __post_init__(self) -> None:
        remember(self, _grouped=None, _transpose=None)
        check_is_pattern(self.pattern)
        for width in self.widths:
            check_integer("each width", width)
        if any(a >= b for a, b in pairwise((-1, *self.widths))):
            raise ValueError(f"widths should ascend and be at least 0, got {self.widths}")

    @classmethod
    def from_pattern(cls, pattern: Pattern) -> HybridPattern:
        """Divide a pattern so that unused places, buckets and the rest cost least, see `bucket_widths`.

        This reads the lengths of the rows, so it waits for a GPU.
        """
        check_is_pattern(pattern)
        histogram = torch.bincount(pattern.row_lengths.long()).tolist()
        return cls(pattern, tuple(bucket_widths(histogram)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.pattern.nnz

    def _bucket_numbers(self) -> Tensor:
        """Return the bucket of each row, (rows,). The rest has the number of buckets."""
        lengths = self.pattern.row_lengths
        return torch.bucketize(lengths, lengths.new_tensor(self.widths))

    @property
    def grouped(self) -> Pattern:
        """The pattern, whose products take rows bucket by bucket, and then the rest by length. Made once.

        Within a bucket, rows keep their order: neighboring rows often read the same rows of the dense factor.
        """
        return memoized(self, "_grouped", _group)

    @property
    def transpose(self) -> tuple[HybridPattern, Tensor]:
        """The transposed pattern, and the position in this pattern of each of its entries, (nnz,). Made once."""
        return memoized(self, "_transpose", _transpose)

    def prepare(self, *, backward: bool = True) -> HybridPattern:
        """Find everything that operations need now, see `Pattern.prepare`."""
        self.grouped.prepare(backward=backward)
        return self

    def matmul(self, values: Tensor, x: Tensor, *, transpose: bool = False, backend: Backend = "auto") -> Tensor:
        """Multiply sparse by dense: values (…, nnz), x (…, columns, C) → (…, rows, C); see `spmm`.

        With `transpose`, multiply by the transposed matrix: x (…, rows, C) → (…, columns, C).
        """
        return spmm(self.grouped, values, x, transpose=transpose, backend=backend)

    def sddmm(self, a: Tensor, b: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Multiply A Bᵀ at the entries: a (…, rows, C), b (…, columns, C) → (…, nnz); see `sddmm`."""
        return sddmm(self.grouped, a, b, backend=backend)

    def softmax(
        self,
        scores: Tensor,
        *,
        scale: float | Tensor = 1.0,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Compute the softmax of scale · scores + bias over the entries of each row, (…, nnz); see `sparse_softmax`."""
        return sparse_softmax(self.pattern, scores, scale=scale, bias=bias, mask=mask, backend=backend)


@at_first_use
def _group(hybrid: HybridPattern) -> Pattern:
    pattern, buckets = hybrid.pattern.prepare(), len(hybrid.widths)  # the new pattern shares everything found
    if pattern.row_order is not None:
        return pattern
    number = hybrid._bucket_numbers()
    key = torch.where(number < buckets, number, buckets + pattern.row_lengths)
    order = torch.sort(key, stable=True).indices
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        order = order[:0]
    return pattern.with_known(rows_by_length=order.to(pattern.column_indices.dtype), check=False)


@at_first_use
def _transpose(hybrid: HybridPattern) -> tuple[HybridPattern, Tensor]:
    transposed, order = hybrid.pattern.transpose
    return HybridPattern.from_pattern(transposed), order


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
