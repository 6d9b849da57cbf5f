"""The nearest point of a surface, and the elements of a mesh that it lies on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffnet.geometry.elements.elements import ElementsAt, edges_of_faces
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.positions.surface_points import SurfacePoints

CANDIDATES = 12  # faces of each size that are compared for a point
_CHUNK = 1 << 14  # points at once


def nearest_on_surface(mesh: Mesh, points: ArrayLike) -> SurfacePoints:
    """The point of the surface nearest to each of the points (N, 3).

    Faces are sorted by size into classes, each four times as large as the one before. In each class, the faces with the
    nearest centers are compared exactly. Of equally near faces, the first is taken.

    Raises ValueError for a mesh without faces, and for points of another shape.

    >>> from diffnet.geometry import load_mesh
    >>> triangle = load_mesh(([[0, 0, 0], [4, 0, 0], [0, 4, 0]], [[0, 1, 2]]))
    >>> nearest_on_surface(triangle, [[1, 1, 5], [-3, 2, 0]]).weights.tolist()
    [[0.5, 0.25, 0.25], [0.5, 0.0, 0.5]]
    """
    from scipy.spatial import cKDTree

    p = np.asarray(points, np.float64)
    if p.ndim != 2 or p.shape[1] != 3:
        raise ValueError(f"points should have shape (N, 3), shape is {p.shape}")
    if mesh.is_point_cloud:
        raise ValueError(f"{mesh.name}: a point cloud has no surface")
    corners = mesh.verts[mesh.faces]
    centers = corners.mean(axis=1)
    radii = np.linalg.norm(corners - centers[:, None], axis=2).max(axis=1)
    sizes = np.floor(np.log2(np.maximum(radii, radii.max() * 1e-6 + 1e-300)) / 2)
    classes = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    trees = [cKDTree(centers[members]) for members in classes]
    faces, weights = np.zeros(len(p), np.int64), np.zeros((len(p), 3))
    for first in range(0, len(p), _CHUNK):
        part = slice(first, first + _CHUNK)
        near, away = [], []
        for members, tree in zip(classes, trees, strict=True):
            distances, found = tree.query(p[part], k=np.arange(1, min(CANDIDATES, len(members)) + 1))
            near.append(members[found])
            away.append(distances)
        faces[part], weights[part] = _nearest_of(p[part], corners, radii, np.hstack(near), np.hstack(away))
    return SurfacePoints(faces, weights)


def _nearest_of(
    p: NDArray[np.float64],
    corners: NDArray[np.float64],
    radii: NDArray[np.float64],
    candidates: NDArray[np.int64],
    distances: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The nearest of the candidates (N, k) for each point (N, 3), and the weights of its nearest point.

    distances: (N, k) from the points to the centers of the candidates. radii: (F,) of the faces around their centers.
    """
    # No face is nearer than its center less its radius, and the nearest face is no farther than the nearest center.
    close = distances - radii[candidates] <= distances.min(axis=1, keepdims=True)
    point, column = np.nonzero(close)
    face = candidates[point, column]
    shares = _barycentric(p[point], corners[face])
    exact = np.linalg.norm(np.einsum("nc,ncx->nx", shares, corners[face]) - p[point], axis=1)
    order = np.lexsort((face, exact, point))
    best = order[np.searchsorted(point[order], np.arange(len(p)))]
    return face[best], shares[best]


def element_weights(
    mesh: Mesh, on_surface: SurfacePoints, at: ElementsAt
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Three elements (N, 3) of a mesh for each point on its surface, and their weights (N, 3), whose sum is 1.

    at: "vertices": the corners of the face, with the barycentric coordinates; "faces": the face alone; "edges": the
        nearest side of the face alone. Elements that have weight 0 repeat the first one.
    """
    faces, weights = on_surface.faces, on_surface.weights
    if at == "vertices":
        return mesh.faces[faces], weights
    alone = np.broadcast_to([1.0, 0.0, 0.0], weights.shape).copy()
    if at == "faces":
        return np.repeat(faces[:, None], 3, axis=1), alone
    corners = mesh.verts[mesh.faces[faces]]
    lengths = np.linalg.norm(corners - np.roll(corners, -1, axis=1), axis=2)  # of the sides 0-1, 1-2 and 2-0
    # Twice the area is a side's length times the height of the opposite corner, so weight / length orders distances.
    side = (weights[:, [2, 0, 1]] / np.maximum(lengths, 1e-300)).argmin(axis=1)
    edges = edges_of_faces(mesh.faces)[faces, side]
    return np.repeat(edges[:, None], 3, axis=1), alone


def _barycentric(p: NDArray[np.float64], corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """The barycentric coordinates (…, 3) of the point of each triangle (…, 3, 3) that is nearest to p (…, 3)."""
    a, b, c = np.moveaxis(corners, -2, 0)
    ab, ac, ap = b - a, c - a, p - a
    d_bb, d_bc, d_cc = _dot(ab, ab), _dot(ab, ac), _dot(ac, ac)
    d_pb, d_pc = _dot(ap, ab), _dot(ap, ac)
    area = d_bb * d_cc - d_bc**2
    flat = area <= 1e-14 * d_bb * d_cc  # a triangle without area is the union of its sides
    safe = np.where(flat, 1, area)
    v, w = (d_cc * d_pb - d_bc * d_pc) / safe, (d_bb * d_pc - d_bc * d_pb) / safe
    inside = np.stack([1 - v - w, v, w], axis=-1)
    is_inside = (inside >= 0).all(axis=-1) & ~flat
    on_ab, on_ac = _along(d_pb, d_bb), _along(d_pc, d_cc)
    on_bc = _along(_dot(p - b, c - b), _dot(c - b, c - b))
    zero = np.zeros_like(on_ab)
    sides = np.stack(
        [
            np.stack([1 - on_ab, on_ab, zero], axis=-1),
            np.stack([zero, 1 - on_bc, on_bc], axis=-1),
            np.stack([1 - on_ac, zero, on_ac], axis=-1),
        ],
        axis=-2,
    )
    away = np.linalg.norm(sides @ corners - p[..., None, :], axis=-1)
    nearest = np.take_along_axis(sides, away.argmin(axis=-1)[..., None, None], axis=-2)[..., 0, :]
    shares: NDArray[np.float64] = np.where(is_inside[..., None], inside, nearest)
    return shares


def _along(product: NDArray[np.float64], squared: NDArray[np.float64]) -> NDArray[np.float64]:
    """The place on a side, from 0 to 1, nearest to a point."""
    place: NDArray[np.float64] = np.clip(product / np.where(squared > 0, squared, 1), 0, 1)
    return place


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    product: NDArray[np.float64] = np.einsum("...x,...x->...", x, y)
    return product
