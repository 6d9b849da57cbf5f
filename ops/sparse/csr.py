"""The arrays of a CSR pattern as operators and kernels take them, orders of its rows, and products on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.limits import MAX_INT32

# Rows keep their order if rows and columns of entries differ by less than MAX_GAP on average, or if the new order
# doesn't bring them nearer by the factor MIN_GAIN. The rows of a dense factor for GROUP rows fit into the cache.
MAX_GAP, MIN_GAIN, GROUP = 2**16, 4, 4096


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


def near_rows(indptr: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return an order of rows (rows,) in which those that read the same rows of a dense factor are near.

    It is (0,) if the rows should keep their order, as in patterns that are not square. It waits for a GPU.

    Each row joins the one with the smallest random number among its columns and itself. The groups are the rows of a
    smaller pattern, which is treated in the same way. Rows of a group are neighbors, on each of these levels.
    """
    count, device, no_order = len(indptr) - 1, indices.device, indices.new_empty(0)
    if count != columns or min(count, len(indices)) <= MAX_GAP or indices.is_meta:
        return no_order
    entries = torch.stack([row_of_each(indptr, indices), indices])
    gap = entries.diff(dim=0).abs().double().mean()
    if gap < MAX_GAP:
        return no_order
    generator = torch.Generator(device).manual_seed(0)
    between, groups, levels = entries, count, list[Tensor]()
    while between.shape[1] > 0 and groups * GROUP > count:
        rows, near = between.long()
        number = torch.randperm(groups, generator=generator, device=device)
        smallest = number.scatter_reduce(0, rows, number[near], "amin")
        used = torch.zeros_like(number).index_fill_(0, smallest, 1).cumsum(0)
        levels.append(used[smallest] - 1)  # the group of each row
        between = levels[-1][between]
        between = between[:, between[0] != between[1]]
        groups = int(used[-1])
    place = torch.arange(groups, device=device)
    for level in reversed(levels):
        order = torch.sort(place[level], stable=True).indices
        place = inverse_order(order)
    new_gap = place[entries].diff(dim=0).abs().double().mean()
    return order.to(indices.dtype) if MIN_GAIN * new_gap < gap else no_order
