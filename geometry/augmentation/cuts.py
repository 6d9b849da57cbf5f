"""Meshes cut by a plane."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffnet.geometry.elements.elements import element_points, face_areas
from diffnet.geometry.mesh.mesh import Mesh, make_mesh


class MeshPart(NamedTuple):
    """A part of a mesh, and the numbers of its vertices and faces in the whole mesh.

    vertices: (V,) int64, ascending; faces: (F,) int64, ascending
    """

    mesh: Mesh
    vertices: NDArray[np.int64]
    faces: NDArray[np.int64]


def cut_by_plane(mesh: Mesh, direction: ArrayLike, share: float) -> MeshPart:
    """Cut off a share of the surface: the faces whose centers lie farthest in a direction.

    direction: (3,), not zero; the normal of the plane, which points to the part that is removed
    share: from 0 up to, but not including, 1, of the area. At least one face stays. Of a point cloud, it is the share
        of the points.

    The faces that stay keep their order, and so do their vertices. Vertices without a face are removed. Normals and
    names stay; the part is not read from a file, so `path` is None.

    Raises ValueError for a direction or a share that is not allowed.

    >>> from diffnet.geometry import load_mesh
    >>> square = load_mesh(([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]))
    >>> part = cut_by_plane(square, [1, 0, 0], 0.5)
    >>> part.faces.tolist(), part.vertices.tolist()
    ([1], [0, 2, 3])
    """
    d = np.asarray(direction, np.float64)
    if d.shape != (3,) or not np.isfinite(d).all() or not d.any():
        raise ValueError(f"direction should be three finite numbers, not all 0, got {direction!r}")
    if not 0 <= share < 1:
        raise ValueError(f"share should be at least 0 and below 1, got {share}")
    if mesh.is_point_cloud:
        kept = _kept(mesh.verts @ d, np.ones(len(mesh.verts)), share)
        return MeshPart(_part(mesh, kept, None), kept, np.zeros(0, np.int64))
    faces = _kept(element_points(mesh, "faces") @ d, face_areas(mesh), share)
    vertices, numbers = np.unique(mesh.faces[faces], return_inverse=True)
    return MeshPart(_part(mesh, vertices, numbers.reshape(-1, 3)), vertices, faces)


def _kept(height: NDArray[np.float64], size: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """The numbers of the items that stay, ascending, if the highest ones with this share of the size are removed."""
    order = np.argsort(height, kind="stable")
    below = np.cumsum(size[order]) - size[order]  # the total size of all lower items
    count = np.count_nonzero(below < (1 - share) * size.sum())
    return np.sort(order[: max(count, 1)])


def _part(mesh: Mesh, vertices: NDArray[np.int64], faces: NDArray[np.int64] | None) -> Mesh:
    normals = None if mesh.normals is None else mesh.normals[vertices]
    return replace(make_mesh(mesh.verts[vertices], faces, name=mesh.name), normals=normals)
