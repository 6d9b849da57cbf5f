"""The vertices, edges and faces of a mesh as places on the surface: their points, their areas and their neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.mesh import Mesh, mesh_edges
from diffnet.geometry.positions.surface_points import SurfacePoints

if TYPE_CHECKING:
    import scipy.sparse

ElementsAt: TypeAlias = Literal["vertices", "faces", "edges"]


def check_elements(at: str) -> None:
    """Raises ValueError for another word than those of `ElementsAt`."""
    if at not in get_args(ElementsAt):
        raise ValueError(f"at should be vertices, faces or edges, got {at!r}")


def element_points(mesh: Mesh, at: ElementsAt) -> NDArray[np.float64]:
    """The vertices (V, 3), the midpoints of the edges (E, 3) or the centers of the faces (F, 3)."""
    check_elements(at)
    if at == "vertices":
        return mesh.verts
    return mesh.verts[mesh_edges(mesh.faces) if at == "edges" else mesh.faces].mean(axis=1)


def face_areas(mesh: Mesh) -> NDArray[np.float64]:
    """The areas (F,) of the faces."""
    a, b, c = np.moveaxis(mesh.verts[mesh.faces], 1, 0)
    return np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2


def element_areas(mesh: Mesh, at: ElementsAt, per_polygon: bool = False) -> NDArray[np.float64]:
    """The share (N,) of the surface that belongs to each element. A face gives a third to each corner or side.

    per_polygon: whether faces are those of the file, and not triangles

    >>> from diffnet.geometry import make_mesh
    >>> element_areas(make_mesh([[0, 0, 0], [3, 0, 0], [0, 2, 0]], [[0, 1, 2]]), "edges").tolist()
    [1.0, 1.0, 1.0]
    """
    check_elements(at)
    areas = face_areas(mesh)
    if at == "faces":
        return np.bincount(mesh.polygons, areas, mesh.polygon_count).astype(np.float64) if per_polygon else areas
    count = len(mesh.verts) if at == "vertices" else len(mesh_edges(mesh.faces))
    parts = mesh.faces if at == "vertices" else edges_of_faces(mesh.faces)
    shares = np.bincount(parts.reshape(-1), np.repeat(areas / 3, 3), minlength=count)
    return shares.astype(np.float64)  # without faces, they are integers


def edges_of_faces(faces: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers (F, 3) of the edges 0-1, 1-2 and 2-0 of each face, in the order of `mesh_edges`."""
    return edge_numbers(faces, faces[:, [[0, 1], [1, 2], [2, 0]]])


def edge_numbers(faces: NDArray[np.int64], sides: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers (…) of sides of faces in `mesh_edges`, which are given by their ends (…, 2)."""
    edges, size = mesh_edges(faces), int(faces.max(initial=0)) + 1
    ends = np.sort(np.asarray(sides, np.int64), axis=-1)
    codes = edges[:, 0] * size + edges[:, 1]
    order = np.argsort(codes)
    return order[np.searchsorted(codes, ends[..., 0] * size + ends[..., 1], sorter=order)]


def border_lengths(mesh: Mesh, at: ElementsAt, per_polygon: bool = False) -> scipy.sparse.csr_array:
    """The length of the border between each two neighboring elements: a symmetric matrix (N, N).

    per_polygon: whether faces are those of the file, and not triangles

    Faces meet at their common edge. Between two vertices, each of their faces has a border from the midpoint of the
    edge to the center of the face. Between two sides of a face, the border runs from their common corner to the center.
    """
    import scipy.sparse  # the command line loads this module

    check_elements(at)
    corners = mesh.verts[mesh.faces]
    if at == "faces":
        edges = mesh_edges(mesh.faces)
        lengths = np.linalg.norm(mesh.verts[edges[:, 0]] - mesh.verts[edges[:, 1]], axis=1)
        sides = edges_of_faces(mesh.faces).reshape(-1)
        owner, count = np.arange(len(mesh.faces)), len(mesh.faces)
        if per_polygon:
            owner, count = mesh.polygons, mesh.polygon_count
        touching = scipy.sparse.csr_array((np.ones(len(sides)), (sides, np.repeat(owner, 3))), (len(edges), count))
        between = scipy.sparse.csr_array(touching.T @ scipy.sparse.diags_array(lengths) @ touching)
        between.setdiag(0)
        between.eliminate_zeros()
        return between
    centers = corners.mean(axis=1, keepdims=True)
    if at == "vertices":
        sides, count = mesh.faces, len(mesh.verts)
        lengths = np.linalg.norm((corners + np.roll(corners, -1, axis=1)) / 2 - centers, axis=2)
    else:
        sides, count = edges_of_faces(mesh.faces), len(mesh_edges(mesh.faces))
        lengths = np.linalg.norm(np.roll(corners, -1, axis=1) - centers, axis=2)  # sides i and i+1 share corner i+1
    first, second = sides.reshape(-1), np.roll(sides, -1, axis=1).reshape(-1)
    different = first != second
    entries = (lengths.reshape(-1)[different], (first[different], second[different]))
    one_way = scipy.sparse.csr_array(entries, (count, count))
    return scipy.sparse.csr_array(one_way + one_way.T)


def element_weights(
    mesh: Mesh, on_surface: SurfacePoints, at: ElementsAt
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Three elements (N, 3) of a mesh for each point on its surface, and their weights (N, 3), whose sum is 1.

    at: "vertices": the corners of the face, with the barycentric coordinates; "faces": the face alone; "edges": the
        nearest side of the face alone. Elements that have weight 0 repeat the one with the largest weight.

    Raises ValueError for unknown points.
    """
    faces, weights = on_surface.faces, on_surface.weights
    if (faces < 0).any():
        raise ValueError(f"{mesh.name}: {int((faces < 0).sum())} of the {len(faces)} points are unknown (face -1)")
    if at == "vertices":
        elements = mesh.faces[faces]
        heaviest = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)
        return np.where(weights == 0, heaviest, elements), weights
    alone = np.broadcast_to([1.0, 0.0, 0.0], weights.shape).copy()
    if at == "faces":
        return np.repeat(faces[:, None], 3, axis=1), alone
    corners = mesh.verts[mesh.faces[faces]]
    lengths = np.linalg.norm(corners - np.roll(corners, -1, axis=1), axis=2)  # of the sides 0-1, 1-2 and 2-0
    # Twice the area is a side's length times the height of the opposite corner, so weight / length orders distances.
    side = (weights[:, [2, 0, 1]] / np.maximum(lengths, 1e-300)).argmin(axis=1)
    edges = edges_of_faces(mesh.faces)[faces, side]
    return np.repeat(edges[:, None], 3, axis=1), alone


def first_triangles(mesh: Mesh) -> NDArray[np.int64]:
    """The first triangle (P,) of each polygon, or −1 for a polygon of fewer than three corners, which has none."""
    first = np.full(mesh.polygon_count, -1)
    first[mesh.polygons[::-1]] = np.arange(len(mesh.faces))[::-1]  # the last write to a polygon wins
    return first


def polygon_shares(mesh: Mesh) -> NDArray[np.float64]:
    """The share (F,) of the area of its polygon that each triangle has. In a polygon without area, they are equal."""
    areas = face_areas(mesh)
    sums, counts = (np.bincount(mesh.polygons, x, mesh.polygon_count)[mesh.polygons] for x in (areas, None))
    return np.where(sums > 0, areas / np.where(sums > 0, sums, 1), 1 / counts)


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


def majority(
    values: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """For each target element, the most frequent value (count,) of the source elements that touch it, or −1.

    Of equally frequent values, it is the smallest. Negative values don't count.

    source, target: (N,) the numbers of the elements that touch
    """
    labels = values[source]
    touched, labels = target[labels >= 0], labels[labels >= 0]
    distinct, number = np.unique(labels, return_inverse=True)  # numbers fit products, values may not
    votes, times = np.unique(touched * max(len(distinct), 1) + number.reshape(-1), return_counts=True)
    place, number = np.divmod(votes, max(len(distinct), 1))
    order = np.lexsort((-number, times, place))  # the last of each place has most votes and the smallest value
    result = np.full(count, -1, np.int64)
    result[place[order]] = distinct[number[order]]  # the last write to an element wins
    return result


def _missing(values: NDArray[Any]) -> float:
    return {"f": np.nan, "i": -1}.get(values.dtype.kind, 0)
