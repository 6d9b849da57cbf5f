"""Which faces of a mesh have the wrong side outside: all of a surface that is inside out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.polygons import Floats, Ints, corner_positions

MAX_HOLES = 0.5  # area of the cones over holes, as a share of the area of the faces; that of a half sphere
MIN_VOLUME = 1e-12  # as a share of the sum over faces; a double sheet has the volume 0 up to rounding
VOTERS = 9, 256  # vertices of a component; the second number is for surfaces that cross


def turned_faces(verts: Floats, faces: Ints) -> NDArray[np.bool_]:
    """The faces (F,) bool whose normals have to be turned so that surfaces point outward, and cavities inward.

    verts: (V, 3)
    faces: (F, 3)

    Components are decided one by one. Holes are closed for this: a cone joins the edges of each hole with their mean.
    An edge belongs to a hole if faces run along it more often in one direction than in the other.

    - A component stays as it is if the cones have half of the area of its faces or more, as for a sheet or a strip, or
      if it has no volume.
    - The volume of the others should be positive. That of a cavity should be negative. A cavity is a component inside
      an odd number of larger ones: most of its vertices have a winding number there that is not 0.

    So the sides of a component that doesn't stay don't depend on the order in which its faces have their corners.

    >>> corners, faces = np.eye(4, 3), np.array([[0, 1, 2], [0, 3, 1], [1, 3, 2], [2, 3, 0]])
    >>> turned_faces(corners, faces).tolist(), turned_faces(corners, faces[:, ::-1]).tolist()
    ([False, False, False, False], [True, True, True, True])
    """
    a, b, c = faces.T
    is_usable = (a != b) & (b != c) & (c != a)
    if not is_usable.all():
        is_usable[is_usable] = turned_faces(verts, faces[is_usable])
        return is_usable
    import scipy.sparse  # not above, because the command line reads meshes' suffixes and should start fast

    count = len(verts)
    tail, head = faces.reshape(-1), faces[:, [1, 2, 0]].reshape(-1)
    runs = scipy.sparse.csr_matrix((np.ones(len(tail), np.int32), (tail, head)), (count, count))
    component = scipy.sparse.csgraph.connected_components(runs, directed=False)[1]
    owner = component[faces[:, 0]]
    centered = verts - verts.mean(axis=0)
    triangles = corner_positions(centered, faces)
    cones, cone_owner = _cones(centered, component, runs)
    triangles, owner = np.concatenate([triangles, cones], axis=2), np.concatenate([owner, cone_owner])

    cross = np.cross(triangles[1] - triangles[0], triangles[2] - triangles[0], axis=0)
    area, parts = np.sqrt((cross * cross).sum(axis=0)), (triangles[0] * cross).sum(axis=0)
    volume, size = np.bincount(owner, parts, count), np.bincount(owner, np.abs(parts), count)
    surface = np.bincount(owner[: len(faces)], area[: len(faces)], count)
    holes = np.bincount(cone_owner, area[len(faces) :], count)
    is_solid = (holes < MAX_HOLES * surface) & (np.abs(volume) > MIN_VOLUME * size)
    is_turned = is_solid & (volume < 0)
    if np.count_nonzero(is_solid) > 1:
        is_turned ^= _cavities(triangles, owner, np.where(is_solid, np.abs(volume), 0))
    return is_turned[owner[: len(faces)]]


def _cones(verts: Floats, component: Ints, runs: Any) -> tuple[Floats, Ints]:
    """The triangles (3, 3, T) that close holes, see `corner_positions`, and the component (T,) of each.

    runs: (V, V) sparse, how often faces run along an edge from the row to the column
    """
    import scipy.sparse

    rim = scipy.sparse.coo_matrix(runs - runs.T.tocsr())
    times = np.maximum(rim.data, 0)
    if not times.any():
        return np.zeros((3, 3, 0)), component[:0]
    tail, head = np.repeat(rim.row, times), np.repeat(rim.col, times)
    hole = scipy.sparse.csgraph.connected_components(rim, directed=False)[1][tail]
    tips = [np.bincount(hole, verts[tail, i] + verts[head, i]) for i in range(3)]
    tip = (np.stack(tips) / np.maximum(2 * np.bincount(hole), 1))[:, hole]
    return np.stack([tip, verts[head].T, verts[tail].T]), component[tail]


def _cavities(triangles: Floats, owner: Ints, volume: Floats) -> NDArray[np.bool_]:
    """Which components (C,) are inside an odd number of larger ones.

    triangles: (3, 3, T), of closed surfaces, see `corner_positions`
    owner: (T,), the component of each
    volume: (C,), 0 for components that don't count
    """
    # Imported here: it takes a fifth of the time in which a process starts, and most meshes don't need it.
    from scipy.spatial import cKDTree

    solids, number = np.flatnonzero(volume), np.full(len(volume), -1)
    number[solids] = np.arange(len(solids))
    order = np.argsort(number[owner], kind="stable")[np.count_nonzero(volume[owner] == 0) :]
    corners, starts = triangles[:, :, order], np.searchsorted(number[owner[order]], np.arange(len(solids)))
    bounds = corners.min(axis=0), corners.max(axis=0)
    low, high = (f.reduceat(x, starts, 1).T for f, x in zip((np.minimum, np.maximum), bounds, strict=True))
    parts, boxes = np.split(corners, starts[1:], axis=2), np.split(np.stack(bounds), starts[1:], axis=2)
    near = cKDTree((low + high) / 2).query_ball_point((low + high) / 2, (high - low).max(axis=1) / 2, np.inf)
    depth = np.zeros(len(volume), np.int64)
    for outer, numbers in enumerate(near):
        inner = np.array(numbers)
        has_room = (low[inner] >= low[outer]) & (high[inner] <= high[outer])
        inner = inner[has_room.all(axis=1) & (volume[solids[inner]] < volume[solids[outer]])]
        if len(inner):
            depth[solids[inner]] += _are_inside([parts[i] for i in inner], parts[outer], boxes[outer])
    return depth % 2 == 1


def _are_inside(inner: list[Floats], outer: Floats, boxes: Floats) -> list[bool]:
    """Which surfaces have most of their vertices inside another one. All are (3, 3, T), see `corner_positions`.

    boxes: (2, 3, T), the bounds of the triangles of the outer one
    """
    (low, high), answers = boxes, list[bool]()
    for surface in inner:
        points = np.unique(surface.transpose(0, 2, 1).reshape(-1, 3), axis=0)
        nearest, farthest = points.min(axis=0)[:, None], points.max(axis=0)[:, None]
        above = np.flatnonzero((high >= nearest).all(axis=0) & (low[:2] <= farthest[:2]).all(axis=0))
        for voters in VOTERS:
            some = points[:: -(-len(points) // voters)]
            votes = [winding_number(p, outer[:, :, above[_covers(p, low, high, above)]]) != 0 for p in some]
            if all(votes) or not any(votes):
                break
        answers.append(2 * sum(votes) > len(votes))
    return answers


def _covers(point: Floats, low: Floats, high: Floats, numbers: Ints) -> NDArray[np.bool_]:
    """Which of the numbered boxes (3, T) a ray upward from a point meets."""
    x, y, z = point
    meets = (low[0, numbers] <= x) & (high[0, numbers] >= x) & (low[1, numbers] <= y) & (high[1, numbers] >= y)
    return meets & (high[2, numbers] >= z)


def winding_number(point: Floats, triangles: Floats) -> int:
    """How often a closed surface goes around a point (3,). triangles: (3, 3, T), those above the point are enough

    They are counted where a ray upward leaves the surface, less those where it enters. Which of the triangles at an
    edge or a corner counts is decided as if the point were a little farther along x, and much less along y.
    """
    a, b, c = triangles - point[:, None]
    is_left, area = zip(*(_side(u, v) for u, v in ((b, c), (c, a), (a, b))), strict=True)
    height = area[0] * a[2] + area[1] * b[2] + area[2] * c[2]  # of the plane, times the area of the triangle
    leaves, enters = np.all(is_left, axis=0) & (height > 0), ~np.any(is_left, axis=0) & (height < 0)
    return int(leaves.sum() - enters.sum())


def _side(u: Floats, v: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """Whether the origin is left of the edges from u to v (3, T), seen from above, and the areas of the triangles."""
    swapped = (u[0] > v[0]) | ((u[0] == v[0]) & (u[1] > v[1]))  # both triangles of an edge should round alike
    tail, head = np.where(swapped, v, u), np.where(swapped, u, v)
    area = tail[0] * head[1] - tail[1] * head[0]
    is_left = (area > 0) | ((area == 0) & (head[1] <= tail[1]))
    return swapped ^ is_left, np.where(swapped, -area, area)
