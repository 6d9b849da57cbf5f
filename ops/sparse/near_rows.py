"""An order of the rows of a square pattern in which rows that read the same rows of the dense factor are near."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.sparse.csr import inverse_order, row_of_each

# Rows keep their order if rows and columns of entries differ by less than this on average. 8192 rows of 128 float32
# are 4 MiB, a tenth of the cache of a large GPU.
MAX_GAP = 8192
GROUP = 4096  # the mean number of rows of a group, whose rows of the dense factor fit into the cache
MIN_GAIN = 4  # the new order has to bring rows and columns nearer by this factor


def near_rows(indptr: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return an order of the rows (rows,), or (0,) if the rows should keep theirs. It waits for a GPU.

    Each row joins the one with the smallest random number among its columns and itself. The groups are the rows of a
    smaller pattern, which is treated in the same way. Rows of a group are neighbors, on each of these levels.
    """
    count, own_order = len(indptr) - 1, indices.new_empty(0)
    if count != columns or count <= MAX_GAP:
        return own_order
    row, column = rows, near = row_of_each(indptr, indices), indices
    gap = (row - column).abs().sum(dtype=torch.int64)
    if gap < MAX_GAP * len(indices):
        return own_order
    generator = torch.Generator(indices.device).manual_seed(0)
    levels, groups = [], count
    while len(rows) > 0 and groups * GROUP > count:
        number = torch.randperm(groups, generator=generator, device=indices.device)
        smallest = number.scatter_reduce(0, rows.long(), number[near], "amin")
        used = torch.zeros_like(number).index_fill_(0, smallest, 1).cumsum(0)
        level = (used[smallest] - 1).to(indices.dtype)  # the group of each row
        rows, near, groups = level[rows], level[near], int(used[-1])
        between = rows != near
        rows, near = rows[between], near[between]
        levels.append(level)
    place = torch.arange(groups, device=indices.device)
    for level in reversed(levels):
        order = torch.sort(place[level], stable=True).indices
        place = inverse_order(order)
    new_gap = (place[row] - place[column]).abs().sum()
    return order.to(indices.dtype) if MIN_GAIN * new_gap < gap else own_order
