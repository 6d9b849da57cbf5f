"""Meshes with fewer faces: decimated, cut by a plane, with holes, or as a camera sees them."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from diffnet.geometry.discretize.coincident import components, joined_vertices
from diffnet.geometry.elements.elements import element_points, face_areas
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, make_mesh, mesh_edges, store_mesh, stored_mesh
from diffnet.geometry.store.cache import cache_key, entry_path

# fast-simplification compares errors, which depend on the unit of length, with fixed numbers. So meshes get these
# extents, one after the other. At 100, decimated bodies and RNA surfaces are nearer to the whole ones than at 1, mostly
# by 5 to 40 %. At 1, each number of faces is reached.
SIZES = (100.0, 1.0)
_LOCK = Lock()  # the library keeps its mesh in global variables


def decimate(mesh: Mesh, max_faces: int, cache_dir: str | os.PathLike[str] | None = None) -> Mesh:
    """The surface of a mesh with at most this number of faces, by collapsing edges in the order of their quadric error.

    A mesh that has no more faces, and a point cloud, is returned as it is. Otherwise vertices move, polygons become
    triangles, and normals and own arrays of the file are left out. Vertices at the same position are joined first where
    this connects most of the mesh, see `joined_vertices`; a triangle soup would fall apart. The border of a surface may
    move, too. Where no further edge can be collapsed, more faces may be left.

    max_faces: at least 4
    cache_dir: a folder that keeps decimated meshes, see `precompute`

    Raises ValueError for a smaller number of faces, MeshError if no face is left.

    Source: Garland and Heckbert 1997, Surface simplification using quadric error metrics, as implemented in the library
    fast-simplification (MIT).

    >>> import trimesh
    >>> from diffnet.geometry import load_mesh
    >>> len(decimate(load_mesh(trimesh.creation.icosphere(3)), 100).faces)
    100
    """
    if max_faces < 4:
        raise ValueError(f"max_faces should be at least 4, got {max_faces}")
    if len(mesh.faces) <= max_faces:
        return mesh
    if cache_dir is None:
        return _decimated(mesh, max_faces)
    library = version("fast-simplification")
    key = cache_key({"verts": mesh.verts, "faces": mesh.faces}, max_faces=max_faces, library=library, stored=3)
    entry = entry_path(cache_dir, key, "decimated")
    small = stored_mesh(entry, mesh.name)
    if small is None:
        small = _decimated(mesh, max_faces)
        store_mesh(entry, small)
    return small


def _decimated(mesh: Mesh, max_faces: int) -> Mesh:
    from fast_simplification import simplify

    used, numbers = np.unique(joined_vertices(mesh)[mesh.faces], return_inverse=True)
    verts, faces = mesh.verts[used], numbers.reshape(-1, 3).astype(np.int64)
    low, extent = verts.min(0), max(float(np.ptp(verts, axis=0).max()), np.finfo(float).tiny)
    for size in SIZES:
        with _LOCK:
            verts, faces = simplify((verts - low) * (size / extent), faces, target_count=min(max_faces, len(faces)))
        verts, faces = verts * (extent / size) + low, faces.astype(np.int64)
        if len(faces) <= max_faces:
            break
    if not len(faces):
        raise MeshError(f"{mesh.name}: decimation to {max_faces} faces leaves none; allow more")
    return make_mesh(verts, faces, name=mesh.name)


class MeshPart(NamedTuple):
    """A part of a mesh, and the numbers of its vertices and faces in the whole mesh.

    vertices: (V,) int64, ascending; faces: (F,) int64, ascending
    """

    mesh: Mesh
    vertices: NDArray[np.int64]
    faces: NDArray[np.int64]


def cut_by_plane(mesh: Mesh, direction: ArrayLike, share: float) -> MeshPart:
    """Cut off a share of the surface: the faces whose centers lie farthest in a direction.

    direction: (3,), not zero; the normal of the plane, which points to the part that is removed
    share: from 0 up to, but not including, 1, of the area. At least one face stays. Of a point cloud, it is the share
        of the points.

    The faces that stay keep their order, and so do their vertices. Vertices without a face are removed. Normals and
    names stay; the part is not read from a file, so `path` is None.

    Raises ValueError for a direction or a share that is not allowed.

    >>> from diffnet.geometry import load_mesh
    >>> square = load_mesh(([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]))
    >>> part = cut_by_plane(square, [1, 0, 0], 0.5)
    >>> part.faces.tolist(), part.vertices.tolist()
    ([1], [0, 2, 3])
    """
    d = _checked_direction(direction)
    if mesh.is_point_cloud:
        inside = _lowest(mesh.verts @ d, np.ones(len(mesh.verts)), share)
        return MeshPart(_part(mesh, inside, None), inside, np.zeros(0, np.int64))
    return _part_of_faces(mesh, _lowest(element_points(mesh, "faces") @ d, face_areas(mesh), share))


def cut_holes(mesh: Mesh, centers: ArrayLike, share: float) -> MeshPart:
    """Cut holes into a surface: remove a share of the area, the faces nearest to the centers of the holes.

    centers: (H,) vertices. All holes have the same radius along the edges of the mesh.
    share: see `cut_by_plane`, also for the result

    Raises ValueError for a vertex or a share that is not allowed, and for a point cloud.
    """
    starts = np.atleast_1d(np.asarray(centers))
    if not len(starts) or starts.dtype.kind not in "iu" or not ((starts >= 0) & (starts < len(mesh.verts))).all():
        raise ValueError(f"centers should be vertices from 0 to {len(mesh.verts) - 1}, got {centers!r}")
    edges, lengths = _edges(mesh)
    graph = csr_array((np.maximum(lengths, np.finfo(float).tiny), tuple(edges.T)), shape=(len(mesh.verts),) * 2)
    distances = dijkstra(graph, directed=False, indices=starts, min_only=True)
    return _part_of_faces(mesh, _lowest(-distances[mesh.faces].mean(1), face_areas(mesh), share))


def cut_to_view(mesh: Mesh, direction: ArrayLike, share: float) -> MeshPart:
    """Remove a share of the area that a distant camera doesn't see, or sees worst.

    The faces that lie deepest behind the surface that the camera sees go first, and of the faces that it sees those
    that it sees from the side. What hides what is decided on a grid whose cells are as wide as two mean edges.

    direction: (3,), not zero; from the mesh to the camera
    share: see `cut_by_plane`, also for the result

    Raises ValueError for a direction or a share that is not allowed, and for a point cloud.
    """
    d, cell = _checked_direction(direction) / np.linalg.norm(direction), 2 * _edges(mesh)[1].mean()
    first, second, third = mesh.verts[mesh.faces].swapaxes(0, 1)
    normals = np.cross(second - first, third - first)
    facing = np.abs(normals @ d) / np.maximum(np.linalg.norm(normals, axis=1), np.finfo(float).tiny)
    centers = (first + second + third) / 3
    side = np.linalg.svd(d[None])[2][1:]  # two axes of the picture
    points = np.concatenate([centers, mesh.verts])
    _, cells = np.unique(np.floor(points @ side.T / cell), axis=0, return_inverse=True)
    highest = np.full(cells.max() + 1, -np.inf)
    np.maximum.at(highest, cells.ravel(), points @ d)
    depth = highest[cells.ravel()[: len(centers)]] - centers @ d
    badness = np.where(depth > 2 * cell, depth, -facing)
    return _part_of_faces(mesh, _lowest(badness, face_areas(mesh), share))


def _checked_direction(direction: ArrayLike) -> NDArray[np.float64]:
    d = np.asarray(direction, np.float64)
    if d.shape != (3,) or not np.isfinite(d).all() or not d.any():
        raise ValueError(f"direction should be three finite numbers, not all 0, got {direction!r}")
    return d


def _edges(mesh: Mesh) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The edges (E, 2) and their lengths (E,). Raises ValueError for a point cloud."""
    if mesh.is_point_cloud:
        raise ValueError(f"{mesh.name}: a point cloud has no faces to remove; cut it by a plane")
    edges = mesh_edges(mesh.faces)
    return edges, np.linalg.norm(mesh.verts[edges[:, 0]] - mesh.verts[edges[:, 1]], axis=1)


def _part_of_faces(mesh: Mesh, faces: NDArray[np.int64]) -> MeshPart:
    """The part of a mesh with these faces (F,) int64, ascending, and the vertices that they use."""
    vertices, numbers = np.unique(mesh.faces[faces], return_inverse=True)
    return MeshPart(_part(mesh, vertices, numbers.reshape(-1, 3)), vertices, faces)


def largest_component(part: MeshPart) -> MeshPart:
    """The connected component of a part that has the largest area."""
    component = components(part.mesh.faces, len(part.mesh.verts))[part.mesh.faces[:, 0]]
    largest = np.bincount(component, face_areas(part.mesh)).argmax()
    inner = _part_of_faces(part.mesh, np.flatnonzero(component == largest))
    return MeshPart(inner.mesh, part.vertices[inner.vertices], part.faces[inner.faces])


def _lowest(height: NDArray[np.float64], size: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """The numbers of the items that stay, ascending, if the highest ones with this share of the size are removed.

    Raises ValueError for a share that is not allowed.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share should be at least 0 and below 1, got {share}")
    if share == 0:
        return np.arange(len(height))
    order = np.argsort(height, kind="stable")
    below = np.cumsum(size[order]) - size[order]  # the total size of all lower items
    count = np.count_nonzero(below < (1 - share) * size.sum())
    return np.sort(order[: max(count, 1)])


def _part(mesh: Mesh, vertices: NDArray[np.int64], faces: NDArray[np.int64] | None) -> Mesh:
    normals = None if mesh.normals is None else mesh.normals[vertices]
    return replace(make_mesh(mesh.verts[vertices], faces, name=mesh.name), normals=normals)
