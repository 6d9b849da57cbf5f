"""The closest points of a triangle mesh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import cKDTree

from diffnet.geometry.mesh.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.positions.surface_points import SurfacePoints

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FIRST_CANDIDATES = 8  # triangles for each point; more where these don't decide
FIRST_GUESSES = 3  # triangles for each point, whose distances rule out most others
SIZES = 4  # groups of triangles


def closest_points(mesh: Mesh, points: ArrayLike) -> SurfacePoints:
    """The points of a triangle mesh that are closest to given points (N, 3).

    Of several closest points, one is returned. The result is exact up to rounding.

    Raises MeshError for a point cloud, ValueError for points of another shape or that are not finite.

    >>> from diffnet.geometry import make_mesh
    >>> square = make_mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]])
    >>> found = closest_points(square, [[0.75, 0.25, 3.0]])
    >>> found.faces, found.weights
    (array([0]), array([[0.25, 0.5 , 0.25]]))
    """
    if mesh.is_point_cloud:
        raise MeshError(f"{mesh.name}: a point cloud has no faces, so there are no points in faces")
    given = np.asarray(points, np.float64)
    if given.ndim != 2 or given.shape[1] != 3 or not np.isfinite(given).all():
        raise ValueError(f"points should be finite, of shape (N, 3), got shape {given.shape}")
    corners = mesh.verts[mesh.faces]
    centers = corners.mean(axis=1)
    reach = np.linalg.norm(corners - centers[:, None], axis=2).max(axis=1)
    found = _Found(np.zeros(len(given), np.int64), np.zeros((len(given), 3)), np.full(len(given), np.inf))
    for nearest in np.reshape(cKDTree(centers).query(given, k=min(FIRST_GUESSES, len(centers)))[1], (len(given), -1)).T:
        _improve(given, found, np.arange(len(given)), nearest, corners[nearest])
    # A few large triangles would make all points look at many candidates, so sizes are searched one after the other.
    for faces in np.array_split(np.argsort(reach, kind="stable"), min(SIZES, len(reach))):
        _search(given, found, faces, corners[faces], centers[faces], float(reach[faces].max()))
    return SurfacePoints(found.faces, found.weights)


class _Found(NamedTuple):
    """The best so far: faces (N,), barycentric coordinates (N, 3) and distances (N,)."""

    faces: Ints
    weights: Floats
    distances: Floats


def _search(points: Floats, found: _Found, faces: Ints, corners: Floats, centers: Floats, reach: float) -> None:
    """Put closer points in these faces into `found`. No corner is farther than `reach` from the center of its face."""
    tree = cKDTree(centers)
    waiting, count = np.arange(len(points)), FIRST_CANDIDATES
    while len(waiting):
        count = min(count, len(centers))
        away, near = tree.query(points[waiting], k=count)
        away, near = away.reshape(-1, count), near.reshape(-1, count)
        row, column = np.nonzero(away - reach < found.distances[waiting, None])  # the others can't be closer
        face = near[row, column]
        _improve(points, found, waiting[row], faces[face], corners[face])
        # The centers of all other triangles are farther away than the last one.
        undecided = (found.distances[waiting] > away[:, -1] - reach) & (count < len(centers))
        waiting, count = waiting[undecided], 4 * count


def _improve(points: Floats, found: _Found, numbers: Ints, faces: Ints, corners: Floats) -> None:
    """Put closer points into `found`, of candidates (N,): the numbers of the points, and the faces to try."""
    weights, distances = _in_triangles(corners, points[numbers])
    order = np.lexsort((-distances, numbers))  # the last write to a point wins
    order = order[distances[order] < found.distances[numbers[order]]]
    found.faces[numbers[order]], found.weights[numbers[order]] = faces[order], weights[order]
    found.distances[numbers[order]] = distances[order]


def _in_triangles(corners: Floats, points: Floats) -> tuple[Floats, Floats]:
    """The barycentric coordinates (N, 3) of the closest points in triangles (N, 3, 3), and their distances (N,)."""
    a, b, c = corners.transpose(1, 0, 2)
    normal = np.cross(b - a, c - a)
    square = np.maximum((normal**2).sum(axis=1), np.finfo(np.float64).tiny)
    second = (np.cross(points - a, c - a) * normal).sum(axis=1) / square
    third = (np.cross(b - a, points - a) * normal).sum(axis=1) / square
    best = np.stack([1 - second - third, second, third], axis=1)
    is_flat = (normal**2).sum(axis=1) <= np.finfo(np.float64).tiny
    off = (best < 0).any(axis=1) | is_flat
    distances = np.where(off, np.inf, _distances(corners, best, points))
    for i, j in ((0, 1), (1, 2), (2, 0)):
        side = corners[off, j] - corners[off, i]
        length = np.maximum((side**2).sum(axis=1), np.finfo(np.float64).tiny)
        along = np.clip(((points[off] - corners[off, i]) * side).sum(axis=1) / length, 0, 1)
        on_side = np.zeros((len(along), 3))
        on_side[:, i], on_side[:, j] = 1 - along, along
        away = _distances(corners[off], on_side, points[off])
        closer = np.flatnonzero(off)[away < distances[off]]
        best[closer], distances[closer] = on_side[away < distances[off]], away[away < distances[off]]
    return best, distances


def _distances(corners: Floats, weights: Floats, points: Floats) -> Floats:
    return np.asarray(np.linalg.norm(np.einsum("nk,nkx->nx", weights, corners) - points, axis=1), np.float64)
