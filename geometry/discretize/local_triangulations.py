"""Local triangulations of a point cloud in given tangent planes (Sharp & Crane 2020).

potpourri3d has local triangulations, too, but only in tangent planes that it estimates itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POINTS_AT_ONCE = 4096  # arrays of a batch of points take up to 60 MB


def local_triangles(points: NDArray[np.float64], frames: NDArray[np.float64], neighbors: int) -> NDArray[np.int64]:
    """The triangles (T, 3) around each point in the Delaunay triangulation of its neighbors in its tangent plane.

    points: (V, 3)
    frames: (V, 3, 3), see `tangent_frames`
    neighbors: the number of nearest neighbors of a point

    Neighbors keep their distance to the point in its plane. So where the surface bends, or another sheet is near,
    points of the other side don't come between the point and its own neighbors.

    A triangle is listed for each of its corners in whose plane it is a Delaunay triangle, so three times at most.

    >>> square = np.array([[0.0, 0, 0], [1, 0, 0], [1.1, 1, 0], [0, 1, 0]])
    >>> len(local_triangles(square, np.tile(np.eye(3), (4, 1, 1)), 3))
    6
    """
    # Imported here: it takes a fifth of the time in which a process starts, and meshes don't need it.
    from scipy.spatial import cKDTree

    count = len(points)
    near = cKDTree(points).query(points, k=range(2, min(neighbors + 1, count) + 1))[1]
    # Four points on a circle, as in a grid, have two Delaunay triangulations. All corners should see the same one.
    spacing = np.ptp(points, axis=0).max() / np.sqrt(count)
    points = points + 1e-7 * spacing * np.random.default_rng(0).uniform(-1, 1, points.shape)
    parts = []
    for first in range(0, count, POINTS_AT_ONCE):
        rows = slice(first, first + POINTS_AT_ONCE)
        plane = _in_plane(points[near[rows]] - points[rows, None], frames[rows, :2])
        point, corner, following = _stars(plane)
        parts.append(np.stack([point + first, near[point + first, corner], near[point + first, following]], axis=1))
    return np.concatenate(parts)


def _in_plane(offsets: NDArray[np.float64], axes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The offsets (N, n, 3), turned into the planes with these axes (N, 2, 3) without a change of length, (N, n, 2)."""
    plane = np.einsum("vni,vai->vna", offsets, axes)
    length, size = np.linalg.norm(offsets, axis=-1), np.linalg.norm(plane, axis=-1)
    has_direction = size > 1e-6 * length
    factor = np.where(has_direction, length / np.where(has_direction, size, 1.0), 0.0)
    scaled: NDArray[np.float64] = plane * factor[..., None]
    return scaled


def _stars(plane: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The Delaunay triangles with a corner at the origin, for many sets of points (N, n, 2) in the plane.

    Returns the set, and the two other corners of each triangle.

    The inversion x ↦ x/|x|² maps circles through the origin to lines. A circle without points inside becomes a line
    with all points on one side. So the triangles are the edges of the convex hull of the origin and the inverted
    points, without the edges at the origin.
    """
    squares = (plane**2).sum(-1, keepdims=True)
    largest = squares.max(axis=1, keepdims=True)
    # Points at the origin stay there.
    inverted = np.where(squares > 1e-12 * largest, plane * largest / np.where(squares > 0, squares, 1.0), 0.0)

    # From a corner of the hull, all points lie to the left of the edge to the next corner.
    following = np.full(inverted.shape[:2], -1)
    edge = -inverted  # to the origin
    for j in range(inverted.shape[1]):
        candidate = inverted[:, j : j + 1] - inverted
        right = _cross(edge, candidate) < 0
        following = np.where(right, j, following)
        edge = np.where(right[..., None], candidate, edge)

    swapped = np.stack([-edge[..., 1], edge[..., 0]], axis=-1)
    left = swapped @ inverted.transpose(0, 2, 1) - _cross(edge, inverted)[..., None]
    size = np.linalg.norm(edge, axis=-1) * np.linalg.norm(inverted, axis=-1).max(axis=1, keepdims=True)
    is_edge = (following >= 0) & (left.min(axis=2) >= -1e-12 * size) & (_cross(edge, -inverted) > 1e-12 * size)
    sets, corner = np.nonzero(is_edge)
    return sets, corner, following[sets, corner]


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    product: NDArray[np.float64] = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return product
