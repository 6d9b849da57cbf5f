"""Distances along a surface between pairs of vertices. Worker processes run these functions, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import potpourri3d
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from diffnet.geometry.discretize.coincident import components, joined_vertices
from diffnet.geometry.discretize.laplacian import laplacian_and_mass
from diffnet.geometry.errors import MeshError
from diffnet.geometry.geodesics.manifold import has_flat_faces, is_manifold
from diffnet.geometry.mesh.mesh import Mesh, mesh_edges
from diffnet.geometry.mesh.normalize import round_positions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Up to this distance / √area, a search for each pair is faster than one search over the mesh for all pairs of a vertex.
MAX_SEARCH = 0.1


def area(mesh: Mesh) -> float:
    """The area of the surface. Raises MeshError if it is 0."""
    if mesh.is_point_cloud:
        total = laplacian_and_mass(mesh)[1].sum()
    else:
        total = potpourri3d.face_areas(mesh.verts, mesh.faces).sum()
    if not total > 0:
        raise MeshError(f"{mesh.name}: the surface has no area, so distances have no scale")
    return float(total)


def joined(mesh: Mesh) -> Ints:
    """The vertex (V,) that stands for each vertex where several are at one position, as in `precompute`."""
    return joined_vertices(round_positions(mesh))


def pair_distances(mesh: Mesh, same: Ints, pairs: Ints) -> Floats:
    """The distances (N,) along the surface between the ends (2, N) of pairs.

    same: the result of `joined`
    pairs: vertices that stand for themselves. Pairs with equal second ends are fastest if they stand together.

    Infinity between components. On manifold meshes, a distance is the length of a geodesic path, found by edge flips
    from the shortest path along edges (Sharp, Crane 2020). Elsewhere it comes from the heat method (Crane et al. 2013).
    """
    distances = np.where(pairs[0] == pairs[1], 0.0, np.inf)
    corners = same[mesh.faces]
    faces = corners[(corners != np.roll(corners, 1, axis=1)).all(1)]
    if mesh.is_point_cloud:
        component, used = np.zeros(len(same), np.int64), np.unique(same)
    else:
        component, used = components(faces, len(same)), np.unique(faces)
    number = np.full(len(same), -1)
    number[used] = np.arange(len(used))
    connected = (component[pairs[0]] == component[pairs[1]]) & (number[pairs] >= 0).all(0)
    to_find = np.flatnonzero(connected & (pairs[0] != pairs[1]))
    if len(to_find) == 0:
        return distances
    verts, ends = mesh.verts[used], number[pairs[:, to_find]]
    straight = np.linalg.norm(verts[ends[0]] - verts[ends[1]], axis=1)
    compact = number[faces]
    if not mesh.is_point_cloud and is_manifold(compact) and not has_flat_faces(verts, compact):
        found = _by_edge_flips(verts, compact, ends, straight <= MAX_SEARCH * np.sqrt(area(mesh)))
    else:
        found = _by_heat(verts, None if mesh.is_point_cloud else compact, ends)
    distances[to_find] = np.maximum(found, straight)  # the heat method can fall below it
    return distances


def _by_edge_flips(verts: Floats, faces: Ints, ends: Ints, near: NDArray[np.bool_]) -> Floats:
    """Lengths of geodesic paths. near: (N,) whether the ends are close to each other"""
    solver = potpourri3d.EdgeFlipGeodesicSolver(verts, faces)
    edges = mesh_edges(faces)
    lengths = np.linalg.norm(verts[edges[:, 0]] - verts[edges[:, 1]], axis=1)
    graph = scipy.sparse.coo_array((lengths, edges.T), (len(verts), len(verts))).tocsr()
    found = np.empty(ends.shape[1])
    for i in np.flatnonzero(near).tolist():
        found[i] = _length(solver.find_geodesic_path(int(ends[0, i]), int(ends[1, i])))
    root, before = -1, [0]
    for i in np.flatnonzero(~near)[np.argsort(ends[1, ~near], kind="stable")].tolist():
        if root != ends[1, i]:
            root = int(ends[1, i])
            before = dijkstra(graph, directed=False, indices=root, return_predecessors=True)[1].tolist()
        path = [int(ends[0, i])]
        while path[-1] != root:
            path.append(before[path[-1]])
        found[i] = _length(solver.find_geodesic_path_poly(path))
    return found


def _length(path: Floats) -> float:
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())


def _by_heat(verts: Floats, faces: Ints | None, ends: Ints) -> Floats:
    """Distances by the heat method, which computes those of one vertex to all others."""
    solver = (
        potpourri3d.PointCloudHeatSolver(verts)
        if faces is None
        else potpourri3d.MeshHeatMethodDistanceSolver(verts, faces)
    )
    compute: Callable[[int], Floats] = solver.compute_distance
    found = np.empty(ends.shape[1])
    for root in np.unique(ends[1]).tolist():
        own = ends[1] == root
        found[own] = compute(root)[ends[0, own]]
    return found
