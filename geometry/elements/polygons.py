"""Values at the polygons of a mesh file and at their sides, and at its triangles.

Operators and networks have triangles. Labels, targets, predictions and scores count the faces and the edges of the
file. A cut through a polygon is no edge of the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import ElementsAt, edge_numbers, face_areas
from diffnet.geometry.mesh.mesh import Mesh, mesh_edges


def first_triangles(mesh: Mesh) -> NDArray[np.int64]:
    """The first triangle (P,) of each polygon, or −1 for a polygon of fewer than three corners, which has none."""
    first = np.full(mesh.polygon_count, -1)
    first[mesh.polygons[::-1]] = np.arange(len(mesh.faces))[::-1]  # the last write to a polygon wins
    return first


def polygon_shares(mesh: Mesh) -> NDArray[np.float64]:
    """The share (F,) of the area of its polygon that each triangle has. In a polygon without area, they are equal."""
    areas = face_areas(mesh)
    sums, counts = (np.bincount(mesh.polygons, x, mesh.polygon_count)[mesh.polygons] for x in (areas, None))
    shares: NDArray[np.float64] = np.where(sums > 0, areas / np.where(sums > 0, sums, 1), 1 / counts)
    return shares


def file_edges(mesh: Mesh) -> NDArray[np.int64]:
    """The edges of the mesh file: their numbers (E',) in `mesh_edges`, which has cuts through polygons, too.

    They are in the order in which they appear first, walking along the sides of the polygons.

    >>> from diffnet.geometry import load_mesh
    >>> square = load_mesh(([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2, 3]]))
    >>> mesh_edges(square.faces)[file_edges(square)].tolist()
    [[0, 1], [1, 2], [2, 3], [0, 3]]
    """
    if mesh.sizes is None or mesh.corners is None:
        return np.arange(len(mesh_edges(mesh.faces)))
    following = np.arange(1, len(mesh.corners) + 1)
    ends = np.cumsum(mesh.sizes)
    following[ends[mesh.sizes > 0] - 1] = (ends - mesh.sizes)[mesh.sizes > 0]
    sides = np.stack([mesh.corners, mesh.corners[following]], axis=1)
    numbers = edge_numbers(mesh.faces, sides[np.repeat(mesh.sizes > 2, mesh.sizes)])
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


def on_triangles(mesh: Mesh, values: NDArray[Any], at: ElementsAt) -> NDArray[Any]:
    """Values (P, …) or (E', …) at faces or edges of the file as values at all triangles (F, …) or all edges (E, …).

    All triangles of a polygon get its value. Cuts get NaN or −1, or 0 if these are not numbers of the dtype. Values at
    vertices, and those that are at triangles already, stay.
    """
    if not mesh.has_polygons or at == "vertices":
        return values
    if at == "faces":
        return values[mesh.polygons] if len(values) == mesh.polygon_count else values
    edges = file_edges(mesh)
    if len(values) != len(edges):
        return values
    on_all = np.full((len(mesh_edges(mesh.faces)), *values.shape[1:]), _missing(values), values.dtype)
    on_all[edges] = values
    return on_all


def on_polygons(mesh: Mesh, values: NDArray[Any]) -> NDArray[Any]:
    """Values (P, …) at the faces of the file: those of the first triangle of each, of values (F, …) at triangles.

    Polygons without triangles get what cuts get in `on_triangles`.
    """
    missing = np.full((1, *values.shape[1:]), _missing(values), values.dtype)
    return np.concatenate([values, missing])[first_triangles(mesh)]  # -1 is the last


def _missing(values: NDArray[Any]) -> float:
    return {"f": np.nan, "i": -1}.get(values.dtype.kind, 0)
