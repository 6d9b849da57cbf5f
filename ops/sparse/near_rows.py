"""An order of the rows of a square pattern in which rows that read the same rows of the dense factor are near."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.sparse.csr import inverse_order, row_of_each

MAX_GAP = 2**16  # rows keep their order if the row and the column of an entry differ by less on average
MIN_GAIN = 4  # the new order has to bring them nearer by this factor
SAMPLE = 2**16  # entries that are compared
GROUP = 4096  # the mean number of rows of a group, whose rows of the dense factor fit into the cache


def near_rows(indptr: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return an order of the rows (rows,), or (0,) if the rows should keep theirs. It waits for a GPU.

    Each row joins the one with the smallest random number among its columns and itself. The groups are the rows of a
    smaller pattern, which is treated in the same way. Rows of a group are neighbors, on each of these levels.
    """
    count, device, own_order = len(indptr) - 1, indices.device, indices.new_empty(0)
    if count != columns or min(count, len(indices)) <= MAX_GAP or indices.is_meta:
        return own_order
    generator = torch.Generator(device).manual_seed(0)
    entries = torch.randint(len(indices), (SAMPLE,), generator=generator, device=device, dtype=indptr.dtype)
    sampled = torch.stack([torch.searchsorted(indptr, entries, right=True) - 1, indices[entries].long()])
    gap = sampled.diff(dim=0).abs().double().mean()
    if gap < MAX_GAP:
        return own_order
    rows, near, groups, levels = row_of_each(indptr, indices), indices, count, list[Tensor]()
    while len(rows) > 0 and groups * GROUP > count:
        number = torch.randperm(groups, generator=generator, device=device)
        smallest = number.scatter_reduce(0, rows.long(), number[near], "amin")
        used = torch.zeros_like(number).index_fill_(0, smallest, 1).cumsum(0)
        levels.append((used[smallest] - 1).to(indices.dtype))  # the group of each row
        rows, near, groups = levels[-1][rows], levels[-1][near], int(used[-1])
        between = (rows != near).nonzero().squeeze(1)
        rows, near = rows[between], near[between]
    place = torch.arange(groups, device=device)
    for level in reversed(levels):
        order = torch.sort(place[level], stable=True).indices
        place = inverse_order(order)
    new_gap = place[sampled].diff(dim=0).abs().double().mean()
    return order.to(indices.dtype) if MIN_GAIN * new_gap < gap else own_order
