"""Geodesic errors of predicted points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import potpourri3d
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.discretize.coincident import joined_vertices
from diffnet.geometry.discretize.laplacian import laplacian_and_mass
from diffnet.geometry.mesh.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh
from diffnet.geometry.preprocessing.recipe import round_positions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Faces with a smaller area, as a share of the squared extent of the mesh, have no usable angles.
SMALLEST_FACE = 1e-14


def geodesic_label_errors(mesh: MeshLike, predicted: Any, labels: Any) -> Tensor:
    """Measure correspondences: the distance along the surface from the predicted to the true vertex, / √area.

    The mean of the result is the usual error of dense correspondence.

    mesh: the mesh or point cloud whose vertices are the labels, see `load_mesh`
    predicted, labels: (N,) integers, vertices of this mesh, as tensors on any device or as arrays. A negative label
        means that the true vertex is unknown.

    Returns (N,) float64 on the CPU: 0 where both are equal, infinity between components, NaN for negative labels, so
    take `errors.nanmean()` if there are any. Errors don't depend on the scale of the mesh.

    On manifold meshes, a distance is the length of a geodesic path, found by edge flips from the shortest path along
    edges. It is exact unless there is a shorter path around another side of the surface. On other meshes and on point
    clouds, distances come from the heat method, which is less accurate for close points. Vertices at the same position
    are joined as in `precompute`. Each pair of vertices is computed once.

    Raises MeshError for a mesh that can't be used or has no area, TypeError for indices that are not integers,
    ValueError for other shapes, IndexError for indices out of range.

    Sources: Sharp, Crane 2020, You Can Find Geodesic Paths in Triangle Meshes by Just Flipping Edges; Crane et al.
    2013, Geodesics in Heat.

    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]  # area 1
    >>> geodesic_label_errors(square, [0, 1, 2, 3], [0, 2, 2, 1])
    tensor([0.0000, 1.0000, 0.0000, 1.4142], dtype=torch.float64)
    """
    surface = load_mesh(mesh)
    found, truth = _indices("predicted", predicted), _indices("labels", labels)
    if len(found) != len(truth):
        raise ValueError(f"predicted and labels should have one length, got {len(found)} and {len(truth)}")
    ends = np.stack([found, truth])
    if (ends >= len(surface.verts)).any() or (ends[0] < 0).any():
        wrong = found[found < 0][0] if (found < 0).any() else ends[ends >= len(surface.verts)][0]
        raise IndexError(f"vertices should be from 0 to {len(surface.verts) - 1}, got {wrong}")
    known = ends[1] >= 0
    joined = joined_vertices(round_positions(surface))
    pairs, place = np.unique(joined[ends[:, known]], axis=1, return_inverse=True)
    errors = np.full(ends.shape[1], np.nan)
    errors[known] = _distances(surface, joined, pairs)[place.reshape(-1)] / np.sqrt(_area(surface))
    return torch.from_numpy(errors)


def _indices(name: str, given: Any) -> Ints:
    array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name} should be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} should have shape (N,), shape is {array.shape}")
    return array.astype(np.int64)


def _area(mesh: Mesh) -> float:
    if mesh.is_point_cloud:
        area = laplacian_and_mass(mesh)[1].sum()
    else:
        area = potpourri3d.face_areas(mesh.verts, mesh.faces).sum()
    if not area > 0:
        raise MeshError(f"{mesh.name}: the surface has no area, so distances have no scale")
    return float(area)


def _distances(mesh: Mesh, joined: Ints, pairs: Ints) -> Floats:
    """The distances (N,) between the ends (2, N) of pairs, all different, of joined vertices."""
    distances = np.where(pairs[0] == pairs[1], 0.0, np.inf)
    corners = joined[mesh.faces]
    faces = corners[(corners != np.roll(corners, 1, axis=1)).all(1)]
    if mesh.is_point_cloud:
        component, used = np.zeros(len(joined), np.int64), np.unique(joined)
    else:
        component, used = _components(faces, len(joined)), np.unique(faces)
    verts = mesh.verts[used]
    number = np.full(len(joined), -1)
    number[used] = np.arange(len(used))
    same = (component[pairs[0]] == component[pairs[1]]) & (number[pairs] >= 0).all(0)
    to_find = np.flatnonzero(same & (pairs[0] != pairs[1]))
    if len(to_find) == 0:
        return distances
    find = _finder(verts, None if mesh.is_point_cloud else number[faces])
    # The solvers of the heat method compute all distances from one vertex, so pairs with equal labels stand together.
    for i in to_find[np.argsort(pairs[1, to_find], kind="stable")]:
        start, end = number[pairs[:, i]]
        straight = float(np.linalg.norm(verts[start] - verts[end]))
        distances[i] = max(find(int(end), int(start)), straight)  # the heat method can fall below it
    return distances


def _finder(verts: Floats, faces: Ints | None) -> Callable[[int, int], float]:
    """A function that returns the distance of two vertices."""
    if faces is not None and is_manifold(faces) and not _has_flat_faces(verts, faces):
        paths = potpourri3d.EdgeFlipGeodesicSolver(verts, faces)

        def length(start: int, end: int) -> float:
            path = paths.find_geodesic_path(start, end)
            return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())

        return length
    heat = (
        potpourri3d.PointCloudHeatSolver(verts)
        if faces is None
        else potpourri3d.MeshHeatMethodDistanceSolver(verts, faces)
    )
    last: dict[int, Floats] = {}

    def distance(start: int, end: int) -> float:
        if start not in last:
            last.clear()
            last[start] = heat.compute_distance(start)
        return float(last[start][end])

    return distance


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


def _has_flat_faces(verts: Floats, faces: Ints) -> bool:
    extent = np.ptp(verts, axis=0).max()
    return bool((potpourri3d.face_areas(verts, faces) <= SMALLEST_FACE * extent**2).any())


def _components(faces: Ints, vertices: int) -> Ints:
    links = np.ones(2 * len(faces)), (faces[:, [0, 1]].reshape(-1), faces[:, [1, 2]].reshape(-1))
    graph = scipy.sparse.coo_array(links, (vertices, vertices))
    label: Ints = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    return label
