"""Triangles of polygons, and the corners of triangles and sums over them.

NumPy computes on rows of F numbers, one for each coordinate, several times faster than on F rows of three.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

ROUNDING = 1e-6  # of a product of lengths, in single precision
CHUNK = 500  # polygons


def triangulate(verts: Floats, sizes: Ints, corners: Ints) -> tuple[Ints, Ints]:
    """Triangles (F, 3) of polygons, in their order, and the polygon (F,) of each triangle.

    verts: (V, 3)
    sizes: (P,) the number of corners of each polygon
    corners: the vertices of all corners. Ints out of range are allowed, and give fans.

    A polygon of n corners has n − 2 triangles, and one of fewer than three corners has none. They are the fan at its
    first corner. If this fan leaves the polygon, as it can if the polygon isn't convex, ears are cut off instead.
    Polygons that aren't flat are taken as seen along their normal (Newell's).
    """
    if (sizes == 3).all():
        return corners.reshape(-1, 3), np.arange(len(sizes))
    count = np.maximum(sizes - 2, 0)
    source = np.repeat(np.arange(len(sizes)), count)
    begin, first = np.cumsum(sizes) - sizes, np.cumsum(count) - count
    place = begin[source]
    faces = np.empty((len(source), 3), np.int64)
    faces[:, 0] = corners[place]
    place += np.arange(1, len(source) + 1) - first[source]
    faces[:, 1] = corners[place]
    place += 1
    faces[:, 2] = corners[place]
    if not len(faces) or faces.min() < 0 or faces.max() >= len(verts):
        return faces, source
    some = np.flatnonzero(count)
    for chunk in np.split(some, range(CHUNK, len(some), CHUNK)):  # arrays for all triangles would take more memory
        low, high = first[chunk[0]], first[chunk[-1]] + count[chunk[-1]]
        for polygon in chunk[_are_left_by_fans(verts, faces[low:high], first[chunk] - low)].tolist():
            ring = corners[begin[polygon] :][: sizes[polygon]]
            faces[first[polygon] :][: count[polygon]] = ring[_ears(_flat(verts[ring]))]
    return faces, source


def _are_left_by_fans(verts: Floats, faces: Ints, first: Ints) -> NDArray[np.bool_]:
    """Which polygons their fans leave: those with a triangle that is turned over.

    faces: (F, 3) the fans of several polygons
    first: the first triangle of each
    """
    with np.errstate(over="ignore", invalid="ignore"):  # coordinates are not checked yet
        origin = verts[faces[:, 0]]
        one, other = verts[faces[:, 1]] - origin, verts[faces[:, 2]] - origin
        normals = np.cross(one, other)
        sums = np.repeat(np.add.reduceat(normals, first), np.diff(first, append=len(faces)), axis=0)
        lengths = np.linalg.norm(sums, axis=1) * ((one**2).sum(1) + (other**2).sum(1))
        turns_over = (normals * sums).sum(1) < -ROUNDING * lengths
    return np.logical_or.reduceat(turns_over, first)


def _flat(points: Floats) -> Floats:
    """A polygon (n, 3) as seen along its normal, (n, 2). It runs counterclockwise."""
    around = points - points[0]
    normal = np.cross(around, np.roll(around, -1, axis=0)).sum(axis=0)
    along = np.cross(normal, np.eye(3)[np.abs(normal).argmin()])
    across = np.cross(normal, along)
    axes: Any = np.stack([along / np.linalg.norm(along), across / np.linalg.norm(across)], axis=1)
    return around @ axes


def _ears(points: Floats) -> Ints:
    """Triangles (n − 2, 3) of a polygon (n, 2) that runs counterclockwise, by cutting off ears (Meisters 1975).

    Where no ear is left, because sides cross each other, the rest is a fan.
    """
    rest, triangles, at = list(range(len(points))), [], 0
    while len(rest) > 3:
        count = len(rest)
        places = (k % count for k in range(at, at + count))
        at = next((k for k in places if _is_ear(points[rest], k)), -1)
        if at < 0:
            break
        triangles.append([rest[at - 1], rest[at], rest[(at + 1) % count]])
        del rest[at]
    triangles += [[rest[0], rest[k], rest[k + 1]] for k in range(1, len(rest) - 1)]
    return np.array(triangles)


def _is_ear(points: Floats, k: int) -> bool:
    """Whether the triangle at corner k of a polygon is turned like the polygon, and no other corner lies in it."""
    a, b, c = points[k - 1], points[k], points[(k + 1) % len(points)]
    if not _turn(a, b, c) > 0:
        return False
    inside = (_turn(a, b, points) >= 0) & (_turn(b, c, points) >= 0) & (_turn(c, a, points) >= 0)
    corners = ((points[:, None] == np.stack([a, b, c])).all(axis=2)).any(axis=1)  # also others at the same place
    return not (inside & ~corners).any()


def _turn(a: Floats, b: Floats, c: Floats) -> Any:
    """Twice the area of the triangles a, b, c, negative if they run clockwise."""
    return (b[0] - a[0]) * (c[..., 1] - a[1]) - (b[1] - a[1]) * (c[..., 0] - a[0])


def corner_positions(verts: Floats, faces: Ints) -> Floats:
    """Positions (corner, coordinate, F) of the corners of faces (F, 3), from the positions (V, 3) of vertices."""
    coordinates = np.ascontiguousarray(verts.T)
    return np.stack([coordinates.take(corner, axis=1) for corner in faces.T])


def sums_at_vertices(values: Floats, faces: Ints, vertices: int) -> Floats:
    """For each vertex (V,), the sum of the values (F,) of the faces (F, 3) around it."""
    first, second, third = (np.bincount(corner, values, vertices).astype(np.float64) for corner in faces.T)
    return first + second + third


def first_at_position(verts: Floats) -> Ints:
    """For each row (V,) of the positions (V, 3), the first row with the same position.

    >>> first_at_position(np.array([[0.0, 0, 0], [1, 0, 0], [-0.0, 0, 0]])).tolist()
    [0, 1, 0]
    """
    # Most meshes have no equal positions. Equal ones have equal sums, and sums are sorted several times faster.
    with np.errstate(over="ignore", invalid="ignore"):  # coordinates may not be checked yet
        sums = verts[:, 0] + np.e * verts[:, 1] + np.pi * verts[:, 2]
    ascending = np.sort(sums)
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    first = np.arange(len(verts))
    if len(repeated) == 0:
        return first
    some = np.flatnonzero(np.isin(sums, repeated))
    order = some[np.lexsort(verts[some].T)]  # stable; several times faster than np.unique of rows
    ordered = verts[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first[order] = order[new][np.cumsum(new) - 1]
    return first
