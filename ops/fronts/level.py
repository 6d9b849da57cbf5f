"""The factor of a level of fronts, as solves read it."""

from __future__ import annotations

from typing import NamedTuple

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
