"""Geodesic errors of predicted vertices, and distances along surfaces. Worker processes run this without PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import potpourri3d
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.csgraph import dijkstra

from diffnet.geometry.discretize.coincident import components, joined_vertices
from diffnet.geometry.discretize.laplacian import laplacian_and_mass
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh, mesh_edges
from diffnet.geometry.mesh.normalize import round_positions
from diffnet.geometry.mesh.polygons import Floats, Ints
from diffnet.geometry.positions.surface_points import SurfacePoints
from diffnet.geometry.processes import WorkerPool, available_cores
from diffnet.geometry.store.cache import cache_key, check_arrays, entry_path, read_entry, write_entry
from diffnet.geometry.store.codec import Arrays

if TYPE_CHECKING:
    from torch import Tensor

PAIRS_OF_CALL = 10_000  # pairs of vertices that a worker process gets at once
MIN_FOR_PROCESSES = 2 * PAIRS_OF_CALL  # fewer take less time than starting processes
# The thresholds of the literature on correspondence: errors / √area from 0 to 0.25.
THRESHOLDS = np.linspace(0.0, 0.25, 101)
# Up to this distance / √area, a search for each pair is faster than one search over the mesh for all pairs of a vertex.
MAX_SEARCH = 0.1
# Faces with a smaller area, as a share of the squared extent of the mesh, have no usable angles.
MIN_FACE_AREA = 1e-14
MAX_PAIRS = 2**24  # of one entry, 270 MB


class Prediction(NamedTuple):
    """Predicted vertices of a mesh, and where they should be. See `geodesic_errors`."""

    mesh: MeshLike
    predicted: Any
    truth: Any


def geodesic_errors(
    mesh: MeshLike, predicted: Any, truth: Any, *, cache_dir: str | os.PathLike[str] | None = None
) -> Floats:
    """Measure a correspondence: the distance along the surface from the predicted to the true point, / √area.

    mesh: the mesh or point cloud with these vertices and points, see `load_mesh`
    predicted: (N,) integers, vertices of the mesh
    truth: (N,) integers, vertices of the mesh, where a negative one is unknown; or `SurfacePoints` of a triangle mesh
    cache_dir: folder that keeps distances of pairs of vertices, see `precompute`. None computes all of them.

    Returns (N,) float64, for any scale of the mesh: infinity between components, NaN where the truth is unknown.

    On manifold meshes, a distance is the length of a geodesic path, found by edge flips from the shortest path along
    edges. It is exact unless there is a shorter path around another side of the surface. On other meshes and on point
    clouds, distances come from the heat method, which is less accurate for close points. Vertices at one position are
    joined as in `precompute`. The distance to a point in a face follows from those to its corners: the path is
    unfolded into the plane of the face, so it is exact if the paths to the corners run side by side.

    Raises MeshError for a mesh that can't be used or has no area, TypeError for indices that are not integers,
    ValueError for other shapes, IndexError for indices out of range.

    Sources: Sharp, Crane 2020, You Can Find Geodesic Paths in Triangle Meshes by Just Flipping Edges; Crane et al.
    2013, Geodesics in Heat.

    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]  # area 1
    >>> geodesic_errors(square, [0, 1, 1], [0, 2, -1])
    array([ 0.,  1., nan])
    >>> center = SurfacePoints(np.array([0]), np.array([[0.5, 0.0, 0.5]]))
    >>> round(float(geodesic_errors(square, [3], center)[0]), 4)
    0.7071
    """
    return geodesic_errors_of_all([Prediction(mesh, predicted, truth)], cache_dir=cache_dir, jobs=1)[0]


def geodesic_label_errors(mesh: MeshLike, predicted: Any, labels: Any) -> Tensor:
    """Measure correspondences: the distance along the surface from the predicted to the true vertex, / √area.

    The mean of the result is the usual error of dense correspondence.

    mesh: the mesh or point cloud whose vertices are the labels, see `load_mesh`
    predicted, labels: (N,) integers, vertices of this mesh, as tensors on any device or as arrays. A negative label
        means that the true vertex is unknown.

    Returns (N,) float64 on the CPU: 0 where both are equal, infinity between components, NaN for negative labels, so
    take `errors.nanmean()` if there are any. Errors don't depend on the scale of the mesh. For the kinds of distances
    and the errors raised, see `geodesic_errors`.

    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]  # area 1
    >>> geodesic_label_errors(square, [0, 1, 2, 3], [0, 2, 2, 1])
    tensor([0.0000, 1.0000, 0.0000, 1.4142], dtype=torch.float64)
    """
    import torch  # worker processes, which import this module, start without it

    return torch.from_numpy(geodesic_errors(mesh, predicted, indices("labels", labels)))


def geodesic_errors_of_all(
    predictions: Sequence[Prediction | tuple[MeshLike, Any, Any]],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> list[Floats]:
    """`geodesic_errors` of many predictions, on several cores. Each pair of vertices of a mesh is computed once.

    predictions: tuples (mesh, predicted, truth). Predictions for one mesh should hold the same `Mesh` object.
    cache_dir: see `geodesic_errors`
    jobs: number of worker processes; by default one for each core. Little work is done without them.
    advance: called for each mesh when its distances are known

    With several jobs, a script must call this under ``if __name__ == "__main__":``, see `precompute_all`.
    """
    meshes: dict[int, Mesh] = {}
    surfaces: dict[int, _Surface] = {}
    requests = []
    for source, predicted, truth in predictions:
        if id(source) not in meshes:  # all sources are alive, so their numbers differ
            meshes[id(source)] = load_mesh(source)
        mesh = meshes[id(source)]
        if id(mesh) not in surfaces:
            surfaces[id(mesh)] = _surface(mesh, cache_dir)
        requests.append((surfaces[id(mesh)], _request(surfaces[id(mesh)], predicted, truth)))
    for surface in surfaces.values():
        keys = [request.keys.reshape(-1) for other, request in requests if other is surface]
        surface.missing = np.setdiff1d(np.unique(np.concatenate(keys)), surface.keys, assume_unique=True)
    _find(list(surfaces.values()), available_cores() if jobs is None else jobs, advance)
    return [_errors(surface, request) for surface, request in requests]


@dataclass
class _Surface:
    """A mesh, and its distances.

    same: the vertex (V,) that stands for each, see `keyed_distances`
    scale: √area
    entry: the file of the cache entry that holds the distances, or None
    keys: (N,), ascending: a · V + b for the vertices a and b of each distance
    values: (N,), the distances
    missing: the keys of distances that are still to be computed, ascending
    """

    mesh: Mesh
    same: Ints
    scale: float
    entry: Path | None
    keys: Ints
    values: Floats
    missing: Ints


def _surface(mesh: Mesh, cache_dir: str | os.PathLike[str] | None) -> _Surface:
    none, entry, stored = np.zeros(0, np.int64), None, None
    if cache_dir is not None:
        key = cache_key({"verts": mesh.verts, "faces": mesh.faces}, solver="edge flips")
        entry = entry_path(cache_dir, key, "geodesics")
        stored = read_entry(entry, lambda arrays: _check(arrays, len(mesh.verts)))
    keys, values = (none, np.zeros(0)) if stored is None else (stored["keys"], stored["values"])
    scale = float(np.sqrt(area(mesh)))
    return _Surface(mesh, joined_vertices(round_positions(mesh)), scale, entry, keys, values, none)


@dataclass(frozen=True)
class _Request:
    """The distances that a prediction of N vertices needs.

    keys: (N, C) the pairs of vertices, true · V + predicted. C is 1 for true vertices, 3 for true points.
    weights: (N, 3) of points in faces, or None
    corners: (N, 3) of these faces
    has_truth: (N,) whether the truth is known
    """

    keys: Ints
    weights: Floats | None
    corners: Ints
    has_truth: NDArray[np.bool_]


def _request(surface: _Surface, predicted: Any, truth: Any) -> _Request:
    mesh = surface.mesh
    vertices = len(mesh.verts)
    answers = indices("predicted", predicted)
    if isinstance(truth, SurfacePoints):
        if mesh.is_point_cloud:
            raise MeshError(f"{mesh.name}: a point cloud has no faces, so the truth should be vertices")
        truth.check(mesh, f"{mesh.name}, truth")
        has_truth, corners = truth.faces >= 0, mesh.faces[truth.faces]
        weights: Floats | None = np.clip(truth.weights, 0, None)
    else:
        labels = indices("truth", truth)
        has_truth, corners, weights = labels >= 0, labels[:, None], None
    if len(answers) != len(corners):
        raise ValueError(f"predicted and truth should have one length, got {len(answers)} and {len(corners)}")
    for array in (answers, corners[has_truth]):
        wrong = array[(array < 0) | (array >= vertices)]
        if len(wrong):
            raise IndexError(f"vertices should be from 0 to {vertices - 1}, got {wrong.flat[0]}")
    keys = surface.same[np.where(has_truth[:, None], corners, 0)] * vertices + surface.same[answers][:, None]
    return _Request(np.where(has_truth[:, None], keys, 0), weights, corners, has_truth)


def indices(name: str, value: Any) -> Ints:
    """Integers (N,) of an array, a list, or a tensor on any device. Raises TypeError or ValueError for others."""
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name} should be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} should have shape (N,), shape is {array.shape}")
    return array.astype(np.int64)


def _find(surfaces: list[_Surface], jobs: int, advance: Callable[[], Any]) -> None:
    """Compute the distances that are missing, and add them to the surfaces and the cache.

    Two processes that extend an entry at once lose the additions of one of them. They are computed again when needed.
    """

    def done(surface: _Surface, lengths: list[Floats]) -> None:
        if len(surface.missing):
            keys = np.concatenate([surface.keys, surface.missing])
            order = np.argsort(keys, kind="stable")
            surface.keys, surface.values = keys[order], np.concatenate([surface.values, *lengths])[order]
            if surface.entry is not None and len(keys) <= MAX_PAIRS:
                write_entry(surface.entry, {"keys": surface.keys, "values": surface.values})
        advance()

    if jobs <= 1 or sum(len(surface.missing) for surface in surfaces) < MIN_FOR_PROCESSES:
        for surface in surfaces:
            done(surface, [keyed_distances(surface.mesh, surface.same, surface.missing)])
        return
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        waiting = [
            [
                pool.submit(keyed_distances, surface.mesh, surface.same, surface.missing[i : i + PAIRS_OF_CALL])
                for i in range(0, len(surface.missing), PAIRS_OF_CALL)
            ]
            for surface in surfaces
        ]
        for surface, futures in zip(surfaces, waiting, strict=True):
            done(surface, [future.result() for future in futures])


def _errors(surface: _Surface, request: _Request) -> Floats:
    distances = surface.values[np.searchsorted(surface.keys, request.keys)].astype(np.float64)
    if request.weights is None:
        errors = distances[:, 0]
    else:
        errors = to_points(distances, surface.mesh.verts[request.corners], request.weights)
    return np.where(request.has_truth, errors / surface.scale, np.nan)


def to_points(distances: Floats, corners: Floats, weights: Floats) -> Floats:
    """The distances (N,) from a source to points in triangles, from its distances (N, 3) to their corners.

    corners: (N, 3, 3) positions
    weights: (N, 3) barycentric coordinates of the points

    A straight path enters the triangle through a side. The distances to the ends of the side place the source in the
    plane of the triangle. Other paths run through a corner.
    """
    points = np.einsum("nk,nkx->nx", weights, corners)
    to_corners = np.linalg.norm(points[:, None] - corners, axis=2)
    shortest = np.asarray((distances + to_corners).min(axis=1))
    lower = np.abs(np.where(np.isfinite(distances), distances - to_corners, 0)).max(axis=1)
    for i, j in ((0, 1), (1, 2), (2, 0)):
        start, side = corners[:, i], corners[:, j] - corners[:, i]
        length = np.linalg.norm(side, axis=1)
        has_length = (length > 0) & np.isfinite(distances).all(axis=1)
        first, second = (np.where(has_length, distances[:, end], 0) for end in (i, j))
        length = np.where(has_length, length, 1)
        # Coordinates along the side and away from it. The source is on the other side than the triangle.
        x = ((points - start) * side).sum(axis=1) / length
        y = np.sqrt(np.clip(to_corners[:, i] ** 2 - x**2, 0, None))
        source_x = (first**2 - second**2 + length**2) / (2 * length)
        source_y = np.sqrt(np.clip(first**2 - source_x**2, 0, None))
        crossing = source_x + (x - source_x) * source_y / np.where(y + source_y > 0, y + source_y, 1)
        inside = has_length & (crossing >= 0) & (crossing <= length)
        straight = np.hypot(x - source_x, y + source_y)
        shortest = np.where(inside, np.minimum(shortest, straight), shortest)
    return np.asarray(np.maximum(shortest, lower), np.float64)


def error_curve(errors: ArrayLike, thresholds: ArrayLike = THRESHOLDS) -> NDArray[np.float64]:
    """The share (T,) of errors that are at most each threshold (T,), as in Kim et al. 2011. NaNs don't count.

    Raises ValueError if there are no errors.

    >>> error_curve([0.0, 0.05, 0.3, 0.1], [0.0, 0.1, 0.2])
    array([0.25, 0.75, 0.75])
    """
    numbers = _numbers(errors)
    limits = np.asarray(thresholds, np.float64)
    return np.asarray(np.searchsorted(np.sort(numbers), limits, side="right") / len(numbers), np.float64)


def area_under_curve(errors: ArrayLike, thresholds: ArrayLike = THRESHOLDS) -> float:
    """The area under the error curve, divided by the range of thresholds. 1 if all errors are 0.

    The curve is sampled at the thresholds, which ascend, and joined by straight lines. Raises ValueError if there are
    no errors, or fewer than two thresholds.

    >>> area_under_curve([0.0, 1.0])
    0.5
    """
    limits = np.asarray(thresholds, np.float64)
    if limits.ndim != 1 or len(limits) < 2 or not (np.diff(limits) > 0).all():
        raise ValueError(f"thresholds should be at least 2 ascending numbers, got shape {limits.shape}")
    curve = error_curve(errors, limits)
    return float(((curve[1:] + curve[:-1]) / 2 * np.diff(limits)).sum() / (limits[-1] - limits[0]))


def mean_error(errors: ArrayLike) -> float:
    """The mean of the errors that are known. Raises ValueError if there are none.

    >>> mean_error([0.25, 0.75, float("nan")])
    0.5
    """
    return float(_numbers(errors).mean())


def _numbers(errors: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(errors, np.float64).reshape(-1)
    numbers = values[~np.isnan(values)]
    if len(numbers) == 0:
        raise ValueError(f"there should be at least one known error, got {len(values)} values, none of them known")
    return numbers


# ---- distances along a surface between pairs of vertices ----


def area(mesh: Mesh) -> float:
    """The area of the surface. Raises MeshError if it is 0."""
    if mesh.is_point_cloud:
        total = laplacian_and_mass(mesh)[1].sum()
    else:
        total = potpourri3d.face_areas(mesh.verts, mesh.faces).sum()
    if not total > 0:
        raise MeshError(f"{mesh.name}: the surface has no area, so distances have no scale")
    return float(total)


def keyed_distances(mesh: Mesh, same: Ints, keys: Ints) -> Floats:
    """The distances (N,) along the surface between pairs of vertices by their keys, a · V + b.

    same: the vertex (V,) that stands for each vertex where several are at one position, as in `precompute`
    keys: of vertices that stand for themselves. Pairs with equal a are fastest if they stand together.

    Infinity between components. On manifold meshes, a distance is the length of a geodesic path, found by edge flips
    from the shortest path along edges (Sharp, Crane 2020). Elsewhere it comes from the heat method (Crane et al. 2013).
    """
    pairs = np.stack(np.divmod(keys, len(mesh.verts))[::-1])
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
    apart = np.flatnonzero(connected & (pairs[0] != pairs[1]))
    if len(apart) == 0:
        return distances
    verts, ends = mesh.verts[used], number[pairs[:, apart]]
    straight = np.linalg.norm(verts[ends[0]] - verts[ends[1]], axis=1)
    compact = number[faces]
    solver = None if mesh.is_point_cloud else path_solver(verts, compact)
    if solver is not None:
        lengths = _by_edge_flips(solver, verts, compact, ends, straight <= MAX_SEARCH * np.sqrt(area(mesh)))
    else:
        lengths = _by_heat(verts, None if mesh.is_point_cloud else compact, ends)
    distances[apart] = np.maximum(lengths, straight)  # the heat method can fall below it
    return distances


def path_solver(verts: Floats, faces: Ints) -> Any:
    """The solver of geodesic paths. None for faces that are no oriented manifold, or if one has almost no area."""
    if (potpourri3d.face_areas(verts, faces) <= MIN_FACE_AREA * np.ptp(verts, axis=0).max() ** 2).any():
        return None
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


def _check(arrays: Arrays, vertices: int) -> None:
    keys = arrays["keys"]
    check_arrays(arrays, {"keys": ("int64", (keys.size,)), "values": ("float64", (keys.size,))})
    if keys.size and not (keys[0] >= 0 and keys[-1] < vertices**2 and (np.diff(keys) > 0).all()):
        raise ValueError(f"keys don't ascend from 0 to {vertices**2 - 1}")
    if not (arrays["values"] >= 0).all():
        raise ValueError("values are negative or NaN")
