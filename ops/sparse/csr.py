"""The arrays of a CSR pattern as operators and kernels take them, and products with them on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.limits import MAX_INT32


class CsrArrays(NamedTuple):
    """The arrays of one pattern. An empty `long_pieces`, `row_order` or `by_length` means that there is none.

    The fields are described at the properties of `Pattern` with the same names; `by_length` is `rows_by_length`.
    """

    indptr: Tensor
    indices: Tensor
    long_pieces: Tensor
    row_order: Tensor
    by_length: Tensor


def row_of_each(indptr: Tensor, indices: Tensor, row_order: Tensor | None = None) -> Tensor:
    """Return the row of each entry, (nnz,): the place where it is stored, or with a row order its number."""
    rows = torch.arange(indptr.shape[0] - 1, dtype=indices.dtype, device=indices.device)
    rows = torch.repeat_interleave(rows, torch.diff(indptr), output_size=indices.shape[0])
    return rows if row_order is None or len(row_order) == 0 else row_order[rows]


def shifted(numbers: Tensor, sets: int, size: int) -> Tensor:
    """Return the numbers (n,) plus s · size for each set s, (sets · n,).

    The result is int64 if sets · size exceeds 2³¹, else it has the dtype of the numbers.
    """
    dtype = torch.int64 if sets * size > MAX_INT32 else numbers.dtype
    shifts = torch.arange(sets, device=numbers.device, dtype=dtype)[:, None] * size
    return (numbers + shifts).reshape(-1)


def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of a permutation of 0 to n − 1, (n,) int64."""
    places = torch.empty_like(order, dtype=torch.int64)
    places[order.long()] = torch.arange(len(order), device=order.device)
    return places


def csr_product(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """A x on the CPU in float32: indptr (rows + 1,), indices and values (nnz,), x (columns, C) → (rows, C)

    PyTorch's weighted sums of table rows take a third of the time of its sparse products. Their code is generated for
    the width C.
    """
    if len(indices) == 0 or x.shape[1] == 0:
        return x.new_zeros(len(indptr) - 1, x.shape[1])
    # `F.embedding_bag` would also compute values for its backward.
    weighted_sums = torch.ops.aten._embedding_bag_forward_only
    return weighted_sums(x, indices, indptr.to(indices.dtype), False, 0, False, values, True)[0]


def csr_chunks(indptr: Tensor, chunks: Sequence[slice]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Divide a CSR matrix by rows: the rows of each chunk, its entries, and its own indptr."""
    for chunk in chunks:
        part = indptr[chunk.start : chunk.stop + 1]
        entries = slice(int(part[0]), int(part[-1]))
        yield chunk, entries, part if entries.start == 0 else part - entries.start
