"""Distances along a surface between pairs of vertices. Worker processes run these functions, without PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import potpourri3d
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from diffnet.geometry.discretize.coincident import components
from diffnet.geometry.discretize.laplacian import laplacian_and_mass
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, mesh_edges
from diffnet.geometry.mesh.polygons import Floats, Ints
from diffnet.geometry.store.cache import cache_key, check_arrays, entry_path, read_entry, write_entry
from diffnet.geometry.store.codec import Arrays

# Up to this distance / √area, a search for each pair is faster than one search over the mesh for all pairs of a vertex.
MAX_SEARCH = 0.1
# Faces with a smaller area, as a share of the squared extent of the mesh, have no usable angles.
MIN_FACE_AREA = 1e-14
MAX_PAIRS = 2**24  # of one entry, 270 MB


def area(mesh: Mesh) -> float:
    """The area of the surface. Raises MeshError if it is 0."""
    if mesh.is_point_cloud:
        total = laplacian_and_mass(mesh)[1].sum()
    else:
        total = potpourri3d.face_areas(mesh.verts, mesh.faces).sum()
    if not total > 0:
        raise MeshError(f"{mesh.name}: the surface has no area, so distances have no scale")
    return float(total)


def pair_distances(mesh: Mesh, same: Ints, pairs: Ints) -> Floats:
    """The distances (N,) along the surface between the ends (2, N) of pairs.

    same: the vertex (V,) that stands for each vertex where several are at one position, as in `precompute`
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
    solver = None if mesh.is_point_cloud or has_flat_faces(verts, compact) else path_solver(verts, compact)
    if solver is not None:
        lengths = _by_edge_flips(solver, verts, compact, ends, straight <= MAX_SEARCH * np.sqrt(area(mesh)))
    else:
        lengths = _by_heat(verts, None if mesh.is_point_cloud else compact, ends)
    distances[to_find] = np.maximum(lengths, straight)  # the heat method can fall below it
    return distances


def path_solver(verts: Floats, faces: Ints) -> Any:
    """The solver of geodesic paths, or None for faces that it refuses: those that are no oriented manifold."""
    try:
        return potpourri3d.EdgeFlipGeodesicSolver(verts, faces)
    except RuntimeError:
        return None


def _by_edge_flips(solver: Any, verts: Floats, faces: Ints, ends: Ints, near: NDArray[np.bool_]) -> Floats:
    """Lengths of geodesic paths. near: (N,) whether the ends are close to each other"""
    edges = mesh_edges(faces)
    lengths = np.linalg.norm(verts[edges[:, 0]] - verts[edges[:, 1]], axis=1)
    graph = scipy.sparse.coo_array((lengths, edges.T), (len(verts), len(verts))).tocsr()
    path_lengths = np.empty(ends.shape[1])
    for i in np.flatnonzero(near).tolist():
        path_lengths[i] = _length(solver.find_geodesic_path(int(ends[0, i]), int(ends[1, i])))
    root, before = -1, [0]
    for i in np.flatnonzero(~near)[np.argsort(ends[1, ~near], kind="stable")].tolist():
        if root != ends[1, i]:
            root = int(ends[1, i])
            before = dijkstra(graph, directed=False, indices=root, return_predecessors=True)[1].tolist()
        path = [int(ends[0, i])]
        while path[-1] != root:
            path.append(before[path[-1]])
        path_lengths[i] = _length(solver.find_geodesic_path_poly(path))
    return path_lengths


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
    lengths = np.empty(ends.shape[1])
    for root in np.unique(ends[1]).tolist():
        here = ends[1] == root
        lengths[here] = compute(root)[ends[0, here]]
    return lengths


def has_flat_faces(verts: Floats, faces: Ints) -> bool:
    """Whether the area of a face is almost 0."""
    extent = np.ptp(verts, axis=0).max()
    return bool((potpourri3d.face_areas(verts, faces) <= MIN_FACE_AREA * extent**2).any())


class KnownDistances(NamedTuple):
    """Distances of a mesh.

    keys: (N,) int64, ascending: a · V + b for vertices a and b
    values: (N,) float64
    """

    keys: Ints
    values: Floats


NO_DISTANCES = KnownDistances(np.zeros(0, np.int64), np.zeros(0))


def distances_path(mesh: Mesh, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the entry of a mesh. It need not exist."""
    key = cache_key({"verts": mesh.verts, "faces": mesh.faces}, solver="edge flips")
    return entry_path(cache_dir, key, "geodesics")


def read_distances(path: Path, vertices: int) -> KnownDistances:
    """The distances in an entry. None are known if there is no entry, or, with a warning, a damaged one."""
    arrays = read_entry(path, lambda arrays: _check(arrays, vertices))
    return NO_DISTANCES if arrays is None else KnownDistances(arrays["keys"], arrays["values"])


def write_distances(path: Path, distances: KnownDistances) -> None:
    """Write an entry, unless it has more than MAX_PAIRS. See `write_entry`.

    Two processes that extend an entry at once lose the additions of one of them. They are computed again when needed.
    """
    if len(distances.keys) <= MAX_PAIRS:
        write_entry(path, distances._asdict())


def _check(arrays: Arrays, vertices: int) -> None:
    keys = arrays["keys"]
    check_arrays(arrays, {"keys": ("int64", (keys.size,)), "values": ("float64", (keys.size,))})
    if keys.size and not (keys[0] >= 0 and keys[-1] < vertices**2 and (np.diff(keys) > 0).all()):
        raise ValueError(f"keys don't ascend from 0 to {vertices**2 - 1}")
    if not (arrays["values"] >= 0).all():
        raise ValueError("values are negative or NaN")
