"""Surfaces as checked arrays, the normals and elements of their corners, and the direction that they are seen from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from diffnet.geometry.elements.elements import edges_of_faces
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, detached_mesh
from diffnet.geometry.mesh.polygons import Floats, Ints

if TYPE_CHECKING:
    from diffnet.geometry import Operators

ValuesAt: TypeAlias = Literal["vertices", "faces", "edges"]
_MARGIN = 0.05  # of the picture, on each side


class Surface(NamedTuple):
    """A mesh or, if it has no faces, a point cloud: vertices (V, 3) and triangles (F, 3) with indices of vertices.

    mesh: if it has polygons, the mesh, which says what they are
    """

    verts: Floats
    faces: Ints
    mesh: Mesh | None = None


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
    loaded = detached_mesh(mesh)
    return Surface(loaded.verts, loaded.faces, loaded if loaded.has_polygons else None)


def shown_points(surface: Surface) -> Floats:
    """The points (N, 3) that a picture must show: the finite ones. On a mesh, only those that a face uses."""
    verts, faces = surface[:2]
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
    flat = unit(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))[:, None]
    weighted = (flat * angles[..., None]).reshape(-1, 3)
    mean = np.zeros_like(verts)
    for i in range(3):
        mean[:, i] = np.bincount(faces.ravel(), weighted[:, i], len(verts))
    smooth = unit(mean)[faces]
    return np.where((smooth * flat).sum(-1, keepdims=True) > 0.6, smooth, flat)


def unit(vectors: Floats) -> Floats:
    """Vectors (..., 3) at length 1. Zero vectors stay zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)


class View(NamedTuple):
    """The viewer's direction. Angles are in degrees.

    up: the coordinate axis that points up in the picture, "y" or "z"
    azimuth: 0 looks from +z if y is up, and from -y if z is up. It grows counterclockwise as seen from above.
    elevation: angle above the horizon; 90 looks straight down
    """

    up: str
    azimuth: float
    elevation: float


def view_for(points: Any, view: View | tuple[float, float] | None) -> View:
    """The view itself, the view with an azimuth and an elevation and the default up axis, or the default view."""
    if isinstance(view, View):
        return view
    default = default_view(points)
    return default if view is None else View(default.up, *view)


def default_view(points: Any) -> View:
    """The default view of finite points (N, 3).

    Up is the axis, y or z, along which the points extend farther; y wins a tie. The viewer looks along the horizontal
    direction of least variance, where the points look widest. A turn of 15° to the side and 15° up then shows depth.
    """
    extent = np.ptp(points, axis=0)
    up = "z" if extent[2] > extent[1] else "y"
    right, _, front = _axes(up)
    flat = (points - points.mean(axis=0)) @ np.stack([right, front], axis=1)
    across, toward = np.linalg.eigh(flat.T @ flat)[1][:, 0]
    if across + toward < 0:  # of the two sides, the one nearer to azimuths 0 and 90
        across, toward = -across, -toward
    return View(up, float(np.degrees(np.arctan2(across, toward))) + 15.0, 15.0)


def _axes(up: str) -> tuple[Floats, Floats, Floats]:
    """The directions right, up and toward the viewer at azimuth and elevation 0."""
    x, y, z = np.eye(3)
    return (x, y, z) if up == "y" else (x, z, -y)


def rotation_of(view: View) -> Floats:
    """The directions right, up and toward the viewer, as the rows of a rotation matrix (3, 3)."""
    right, up, front = _axes(view.up)
    a, e = np.radians(view.azimuth), np.radians(view.elevation)
    ahead = np.sin(a) * right + np.cos(a) * front
    across = np.cos(a) * right - np.sin(a) * front
    toward = np.cos(e) * ahead + np.sin(e) * up
    return np.stack([across, np.cross(toward, across), toward])


def to_screen(verts: Floats, points: Floats, rotation: Floats, samples: tuple[int, int]) -> tuple[Floats, float]:
    """Project vertices (V, 3) so that the shown points (N, 3) fill the picture.

    samples: height and width of the picture

    Returns (V, 3): x to the right, y down and depth away from the viewer, in samples; and the samples per unit length.
    """
    turned = points @ rotation.T
    low, high = turned.min(axis=0), turned.max(axis=0)
    height, width = samples
    # The lower bound keeps the scale finite for a single point, and for points in line with the viewer.
    extent = np.maximum(high - low, 1e-6 * np.abs(turned).max() + 1e-30)
    scale = float(min(width / extent[0], height / extent[1]) * (1 - 2 * _MARGIN))
    middle = (verts @ rotation.T - (low + high) / 2) * scale
    return middle * [1, -1, -1] + [width / 2, height / 2, 0], scale
