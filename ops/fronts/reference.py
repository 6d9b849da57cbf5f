"""Solves with a level of fronts in plain PyTorch. Empty places have inverse 1 on the diagonal and coupling 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FrontLevel(NamedTuple):
    """F fronts, each with up to T vertices of its own and up to R vertices of upper fronts, its border.

    A front holds the matrix [[A, Bᵀ], [B, ·]] of its own vertices and its border, after the updates of its children.

    own: (F, T) int32, vertices; places from own_size on are empty
    border: (F, R) int32, vertices; places from border_size on are empty
    own_size, border_size: (F,) int32
    child_rows: (2, F, T + R) int32, the row of each vertex in the updates of both children, counted over all fronts of
        the level below; −1 where a child doesn't have the vertex
    inverse: (F, T, T) float64, A⁻¹
    coupling: (F, R, T) float64, B A⁻¹
    """

    own: Tensor
    border: Tensor
    own_size: Tensor
    border_size: Tensor
    child_rows: Tensor
    inverse: Tensor
    coupling: Tensor


def forward(level: FrontLevel, right: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Collect the right-hand sides of the fronts' own vertices, and eliminate these vertices.

    right: (n, C) float64, right-hand sides
    updates: (rows, C), what the level below passes on

    Returns the collected right-hand sides (F, T, C) and the updates (F · R, C) for the level above.
    """
    width = level.own.shape[1]
    sums = _rows_at(updates, level.child_rows[0]) + _rows_at(updates, level.child_rows[1])
    right = sums[:, :width] + _rows_at(right, _used(level.own, level.own_size))
    return right, (sums[:, width:] - level.coupling @ right).flatten(0, 1)


def backward(level: FrontLevel, right: Tensor, x: Tensor) -> None:
    """Write the solution at the fronts' own vertices to x (n, C). The solution at their borders must be there already.

    own: (F, T, C), see `forward`
    """
    border = _rows_at(x, _used(level.border, level.border_size))
    solution = level.inverse.mT @ right - level.coupling.mT @ border
    places = _used(level.own, level.own_size)
    x[places[places >= 0]] = solution[places >= 0]


def _used(vertices: Tensor, size: Tensor) -> Tensor:
    return torch.where(torch.arange(vertices.shape[1], device=size.device) < size[:, None], vertices, -1)


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index, zeros where the index is −1."""
    return torch.where(index[..., None] >= 0, rows[index.clamp(min=0)], 0.0)
