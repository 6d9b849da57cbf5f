"""Normalized positions."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", "Tensor", NDArray[np.float64])


def normalize_positions(verts: Positions) -> Positions:
    """Move the mean of the vertices (V, 3) to the origin and scale the farthest vertex to distance 1.

    Takes and returns an array or a tensor. If all vertices coincide, they all move to the origin.

    >>> normalize_positions(np.array([[0.0, 0, 0], [4, 0, 0]]))
    array([[-1.,  0.,  0.],
           [ 1.,  0.,  0.]])
    """
    centered: Positions = verts - verts.mean(0)
    radius = (centered**2).sum(1).max() ** 0.5
    scaled: Positions = centered / (radius if radius > 0 else 1.0)
    return scaled


def load_normalized(source: MeshLike, cache_dir: str | os.PathLike[str] | None = None) -> Mesh:
    """`load_mesh` with normalized positions. Raises MeshError for a mesh that can't be used."""
    mesh = load_mesh(source, cache_dir)
    return replace(mesh, verts=normalize_positions(mesh.verts))
