"""Sparse patterns of any size: meshes with several vertex orders, and rows of uneven length."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from scipy.sparse import csr_array
from torch import Tensor

from diffnet.geometry.discretize.gradient import order_along_surface, order_unless_near
from diffnet.ops import Pattern

Order: TypeAlias = Literal["local", "shuffled", "renumbered", "precomputed"]
ORDERS: tuple[Order, ...] = get_args(Order)


def mesh_pattern(vertices: int, order: Order, device: torch.device) -> Pattern:
    """The pattern of a triangulated grid on a torus, with about `vertices` vertices.

    Each row holds a vertex and its six neighbors.

    order: the numbering of the vertices. "local" numbers row by row, "shuffled" at random. "renumbered" starts at
        random and then renumbers along the surface. "precomputed" is random, with rows stored along the surface as
        `precompute` stores them.
    """
    side = max(3, round(vertices**0.5))
    count = side * side
    x, y = torch.arange(count) % side, torch.arange(count) // side
    steps = [(-1, -1), (0, -1), (-1, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
    columns = torch.stack([(x + i) % side + (y + j) % side * side for i, j in steps], dim=1)
    if order != "local":
        columns = _renumbered(columns, torch.randperm(count, generator=torch.Generator().manual_seed(0)))
    if order == "renumbered":
        columns = _renumbered(columns, torch.argsort(torch.from_numpy(order_along_surface(_graph(columns)))))
    columns = columns.sort(dim=1).values
    pattern = Pattern.from_row_lengths(torch.full((count,), 7), columns.flatten().int(), count)
    rows = order_unless_near(_graph(columns)) if order == "precomputed" else None
    if rows is not None:
        pattern, _ = pattern.with_row_order(torch.from_numpy(rows))
    return pattern.prepare().to(device)


def skewed_pattern(rows: int, device: torch.device) -> Pattern:
    """A square pattern with row lengths from a power law: 7 entries on average, at most a tenth of the columns."""
    generator = torch.Generator().manual_seed(0)
    longest = max(rows // 10, 1)
    lengths = (2.5 * torch.rand(rows, generator=generator, dtype=torch.float64) ** (-1 / 1.5)).long()
    lengths = lengths.clamp(1, longest)
    # The entries of a row are evenly spaced from a random start, so no column appears twice.
    number = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    stride = torch.repeat_interleave(rows // lengths, lengths)
    start = torch.repeat_interleave(torch.randint(rows, (rows,), generator=generator), lengths)
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    columns = (start + number * stride) % rows
    columns = (row * rows + columns).sort().values % rows
    return Pattern.from_row_lengths(lengths, columns.int(), rows).prepare().to(device)


def moved_bytes(pattern: Pattern, size: int, *, values: int, dense: int) -> float:
    """Bytes of an int32 pattern, with `values` numbers per entry and `dense` numbers per row, of `size` bytes each."""
    return float(4 * (pattern.nnz + pattern.shape[0]) + size * (values * pattern.nnz + dense * pattern.shape[0]))


def _graph(columns: Tensor) -> csr_array:
    count, length = columns.shape
    indptr = torch.arange(0, length * count + 1, length).int()
    return csr_array((torch.ones(columns.numel()), columns.flatten().int(), indptr), shape=(count, count))


def _renumbered(columns: Tensor, new: Tensor) -> Tensor:
    out = torch.empty_like(columns)
    out[new] = new[columns]
    return out
