"""Surfaces as checked arrays, and the normals and elements of their corners."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import edges_of_faces
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import MeshLike, load_mesh

if TYPE_CHECKING:
    from diffnet.geometry import Operators

ValuesAt: TypeAlias = Literal["vertices", "faces", "edges"]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class Surface(NamedTuple):
    """A mesh or, if it has no faces, a point cloud: vertices (V, 3) and triangles (F, 3) with indices of vertices."""

    verts: Floats
    faces: Ints

    @property
    def is_cloud(self) -> bool:
        return len(self.faces) == 0


def make_surface(verts: Any, faces: Any) -> Surface:
    """Arrays as a surface. Raises ValueError if they do not fit. Coordinates may be NaN or infinite.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    """
    verts = np.asarray(verts, np.float64)
    if verts.ndim != 2 or verts.shape[1] != 3:
        raise ValueError(f"vertices should have shape (V, 3), shape is {verts.shape}")
    faces = np.zeros((0, 3), np.int64) if faces is None or len(faces) == 0 else np.asarray(faces, np.int64)
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {faces.shape}")
    if len(faces) and not (faces.min() >= 0 and faces.max() < len(verts)):
        raise ValueError(f"faces should index {len(verts)} vertices, but run from {faces.min()} to {faces.max()}")
    return Surface(verts, faces)


def is_operators(mesh: Any) -> TypeGuard[Operators]:
    """Whether an object is an `Operators`. This doesn't load PyTorch."""
    # If the module isn't loaded yet, the object can't be one.
    module = sys.modules.get("diffnet.geometry.operators")
    return module is not None and isinstance(mesh, module.Operators)


def surface_of(mesh: MeshLike | Surface) -> Surface:
    """The surface of what `load_mesh` accepts. Raises MeshError as it does, and for `Operators`."""
    if isinstance(mesh, Surface):
        return mesh
    if is_operators(mesh):
        raise MeshError("operators hold no vertices. Pass the mesh, and frames=operators for tangent vectors")
    loaded = load_mesh(mesh)
    return Surface(loaded.verts, loaded.faces)


def shown_points(surface: Surface) -> Floats:
    """The points (N, 3) that a picture must show: the finite ones. On a mesh, only those that a face uses."""
    verts, faces = surface
    if len(faces):
        verts = verts[np.unique(faces)]
    return verts[np.isfinite(verts).all(axis=1)]


def face_elements(faces: Ints, at: ValuesAt) -> Ints:
    """For every face, the three elements (F, 3) int64 that color it.

    These are its corners for values at vertices, and the face itself for values at faces. For values at edges they are
    its sides, where side k is opposite corner k.
    """
    if at == "vertices":
        return faces
    if at == "faces":
        return np.repeat(np.arange(len(faces))[:, None], 3, axis=1)
    return edges_of_faces(faces)[:, [1, 2, 0]]


def corner_normals(verts: Floats, faces: Ints) -> Floats:
    """A unit normal (F, 3, 3) for every corner of every face.

    The normal is the mean over the faces at the vertex, weighted by their angles. A face far from this mean keeps its
    own normal: at a sharp edge, or if its neighbors have the opposite orientation. Faces without area have normal 0.
    """
    corners = verts[faces]
    along = unit(np.roll(corners, -1, axis=1) - corners)
    angles = np.arccos((along * -np.roll(along, 1, axis=1)).sum(-1).clip(-1, 1))
    own = unit(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))[:, None]
    weighted = (own * angles[..., None]).reshape(-1, 3)
    mean = np.zeros_like(verts)
    for i in range(3):
        mean[:, i] = np.bincount(faces.ravel(), weighted[:, i], len(verts))
    smooth = unit(mean)[faces]
    return np.where((smooth * own).sum(-1, keepdims=True) > 0.6, smooth, own)


def unit(vectors: Floats) -> Floats:
    """Vectors (..., 3) at length 1. Zero vectors stay zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return scaled
