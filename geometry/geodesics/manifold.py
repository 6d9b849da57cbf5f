"""Checks of the triangles that the geodesic solvers require."""

from __future__ import annotations

import numpy as np
import potpourri3d
import scipy.sparse
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Faces with a smaller area, as a share of the squared extent of the mesh, have no usable angles.
MIN_FACE_AREA = 1e-14


def is_manifold(faces: Ints) -> bool:
    """Whether faces (F, 3) without repeated corners are an oriented manifold, with or without boundary.

    >>> is_manifold(np.array([[0, 1, 2], [0, 2, 3]])), is_manifold(np.array([[0, 1, 2], [0, 3, 4]]))  # a bow tie
    (True, False)
    """
    start, end = faces.reshape(-1), np.roll(faces, -1, axis=1).reshape(-1)  # of the half-edge after each corner
    size = int(faces.max(initial=-1)) + 1
    keys = start * size + end
    order = np.argsort(keys)
    if (np.diff(keys[order]) == 0).any():
        return False  # two faces run along an edge in one direction
    # The corners of a vertex are linked across edges. On a manifold, all corners of a vertex are linked.
    twin_place = np.searchsorted(keys, end * size + start, sorter=order).clip(max=len(keys) - 1)
    twin = order[twin_place]
    inner = keys[twin] == end * size + start
    corner, following = np.arange(len(keys)), np.arange(len(keys)).reshape(-1, 3)[:, [1, 2, 0]].reshape(-1)
    links = np.ones(inner.sum()), (corner[inner], following[twin[inner]])
    fans, _ = scipy.sparse.csgraph.connected_components(scipy.sparse.coo_array(links, (len(keys), len(keys))), False)
    return bool(fans == len(np.unique(faces)))


def has_flat_faces(verts: NDArray[np.float64], faces: Ints) -> bool:
    """Whether the area of a face is almost 0."""
    extent = np.ptp(verts, axis=0).max()
    return bool((potpourri3d.face_areas(verts, faces) <= MIN_FACE_AREA * extent**2).any())
