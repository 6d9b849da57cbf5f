"""Meshes with fewer faces."""

from __future__ import annotations

import os
from importlib.metadata import version
from threading import Lock

import numpy as np

from diffnet.geometry.discretize.coincident import joined_vertices
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, make_mesh
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry

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
    key = cache_key({"verts": mesh.verts, "faces": mesh.faces}, max_faces=max_faces, library=library)
    path = entry_path(cache_dir, key, "decimated")
    stored = read_entry(path, _check_stored)
    if stored is not None:
        return make_mesh(stored["verts"], stored["faces"], name=mesh.name)
    small = _decimated(mesh, max_faces)
    write_entry(path, {"verts": small.verts, "faces": small.faces})
    return small


def _decimated(mesh: Mesh, max_faces: int) -> Mesh:
    from fast_simplification import simplify

    faces = joined_vertices(mesh)[mesh.faces]
    used, numbers = np.unique(faces, return_inverse=True)
    with _LOCK:
        verts, faces = simplify(
            mesh.verts[used], numbers.reshape(-1, 3).astype(np.int64), target_count=min(max_faces, len(faces))
        )
    if not len(faces):
        raise MeshError(f"{mesh.name}: decimation to {max_faces} faces leaves none; allow more")
    return make_mesh(verts, faces.astype(np.int64), name=mesh.name)


def _check_stored(arrays: Arrays) -> None:
    """Raises ValueError for arrays of a cache entry that can't be a mesh."""
    verts, faces = arrays["verts"], arrays["faces"]
    if verts.shape != (len(verts), 3) or faces.shape != (len(faces), 3) or not len(faces):
        raise ValueError("it holds other arrays than it should")
    if not np.isfinite(verts).all() or faces.min() < 0 or faces.max() >= len(verts):
        raise ValueError("it holds values that can't be a mesh")
