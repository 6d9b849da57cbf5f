"""The closest points of a triangle mesh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.objects import real_array
from diffnet.geometry.mesh.polygons import Floats, Ints
from diffnet.geometry.positions.surface_points import SurfacePoints

MAX_PAIRS = 1 << 16  # pairs of a point and a box at once; more pairs wait, so memory is bounded


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
    from scipy.spatial import cKDTree  # slow to import, and most commands don't need it

    if mesh.is_point_cloud:
        raise MeshError(f"{mesh.name}: a point cloud has no faces, so there are no points in faces")
    positions = real_array("points", points)
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise ValueError(f"points should have shape (N, 3), shape is {positions.shape}")
    if not (np.abs(positions) <= np.finfo(np.float32).max).all():  # squares of larger ones are infinite
        raise ValueError(f"points should be finite in single precision, got {np.abs(positions).max()}")
    corners = mesh.verts[mesh.faces]
    tree, centers = _face_tree(corners), cKDTree(corners.mean(axis=1))
    best = _Closest(np.zeros(len(positions), np.int64), np.zeros((len(positions), 3)), np.full(len(positions), np.inf))
    for first in range(0, len(positions), MAX_PAIRS):
        rows = np.arange(first, min(first + MAX_PAIRS, len(positions)))
        # The faces with the nearest centers are often the closest ones. Their distances rule out most boxes.
        _improve(best, corners, positions, rows, centers.query(positions[rows])[1])
        _search(best, tree, corners, positions, rows)
    return SurfacePoints(best.faces, best.weights)


class _Closest(NamedTuple):
    """The closest points so far: faces (N,), barycentric coordinates (N, 3) and squared distances (N,)."""

    faces: Ints
    weights: Floats
    squares: Floats


def _search(best: _Closest, tree: _FaceTree, corners: Floats, points: Floats, rows: Ints) -> None:
    """Put closer points of all faces into `best`. Boxes that are farther away than the best face are left out."""
    waiting, last = [(0, rows, np.zeros(len(rows), np.int64))], len(tree.lows) - 1
    while waiting:
        level, rows, boxes = waiting.pop()
        places, lows, highs = points[rows], tree.lows[level][boxes], tree.highs[level][boxes]
        gaps = np.maximum(lows - places, places - highs).clip(0)  # 0 for points in their boxes
        near = _dot(gaps, gaps) < best.squares[rows]
        rows, boxes = rows[near], boxes[near]
        if level == last:
            _improve(best, corners, points, rows, tree.faces[boxes])
            continue
        count = len(tree.lows[level + 1]) // len(tree.lows[level])
        rows, boxes = np.repeat(rows, count), (count * boxes[:, None] + np.arange(count)).ravel()
        for first in range(0, len(rows), MAX_PAIRS):
            group = slice(first, first + MAX_PAIRS)
            waiting.append((level + 1, rows[group], boxes[group]))


def _improve(best: _Closest, corners: Floats, points: Floats, rows: Ints, faces: Ints) -> None:
    """Put closer points into `best`, of candidates (N,): the numbers of the points, and the faces to try."""
    weights, squares = _in_triangles(corners[faces], points[rows])
    order = np.lexsort((-squares, rows))  # the last write to a point wins
    order = order[squares[order] < best.squares[rows[order]]]
    rows = rows[order]
    best.faces[rows], best.weights[rows], best.squares[rows] = faces[order], weights[order], squares[order]


def _in_triangles(corners: Floats, points: Floats) -> tuple[Floats, Floats]:
    """The barycentric coordinates (N, 3) of the closest points in triangles (N, 3, 3), and squared distances (N,)."""
    a, b, c = corners.transpose(1, 0, 2)
    normals = np.cross(b - a, c - a)
    areas = _dot(normals, normals)  # squared, of the parallelograms
    is_flat = areas <= np.finfo(np.float64).tiny
    areas[is_flat] = 1
    second = _dot(np.cross(points - a, c - a), normals) / areas
    third = _dot(np.cross(b - a, points - a), normals) / areas
    best = np.stack([1 - second - third, second, third], axis=1)
    squares = _squares(corners, best, points)
    off = np.flatnonzero((best < 0).any(axis=1) | is_flat)  # their closest points are on a side
    squares[off] = np.inf
    corners, points = corners[off], points[off]
    for i, j in ((0, 1), (1, 2), (2, 0)):
        start, side = corners[:, i], corners[:, j] - corners[:, i]
        length = np.maximum(_dot(side, side), np.finfo(np.float64).tiny)
        along = np.clip(_dot(points - start, side) / length, 0, 1)
        on_side = np.zeros((len(along), 3))
        on_side[:, i], on_side[:, j] = 1 - along, along
        distances = _squares(corners, on_side, points)
        closer = distances < squares[off]
        best[off[closer]], squares[off[closer]] = on_side[closer], distances[closer]
    return best, squares


def _squares(corners: Floats, weights: Floats, points: Floats) -> Floats:
    gaps = np.einsum("nk,nkx->nx", weights, corners) - points
    return _dot(gaps, gaps)


def _dot(x: Floats, y: Floats) -> Floats:
    return np.einsum("nx,nx->n", x, y)


class _FaceTree(NamedTuple):
    """A tree of boxes with sides along the axes. The boxes of the last level hold one face each.

    Each level has a whole multiple of the boxes of the level before: box i holds boxes i * n to i * n + n - 1.

    lows, highs: the corners of the boxes of each level, (1, 3), (2, 3), (4, 3) …
    faces: the face in each box of the last level. A face may occur twice.
    """

    lows: list[Floats]
    highs: list[Floats]
    faces: Ints


def _face_tree(corners: Floats) -> _FaceTree:
    """The tree of faces with these corners (F, 3, 3). There must be at least one face.

    Each box is divided where half of its faces are on either side, across its longest extent.
    """
    depth = max(0, len(corners).bit_length() - 2)
    count = -(-len(corners) // 2**depth)  # 2 or 3 faces, or 4 in the largest meshes of a depth
    order = np.resize(np.arange(len(corners)), count * 2**depth)
    low, high = corners.min(axis=1), corners.max(axis=1)
    middles = (low + high) / 2
    for level in range(depth):
        order = order.reshape(2**level, -1)
        places = middles[order]
        axes = np.ptp(places, axis=1).argmax(axis=1)
        along = np.take_along_axis(places, axes[:, None, None], axis=2)[:, :, 0]
        order = np.take_along_axis(order, np.argpartition(along, order.shape[1] // 2, axis=1), axis=1)
    faces = order.ravel()
    lows, highs = [low[faces]], [high[faces]]
    for parts in [count] + depth * [2]:
        lows.append(lows[-1].reshape(-1, parts, 3).min(axis=1))
        highs.append(highs[-1].reshape(-1, parts, 3).max(axis=1))
    return _FaceTree(lows[::-1], highs[::-1], faces)
