"""The positions and normals that operators are computed from: normalized, chosen and rounded."""

from __future__ import annotations

import os
import reprlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import MeshError, OptionError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, detached_mesh
from diffnet.geometry.mesh.objects import check_normals_rule, user_normals
from diffnet.geometry.options import SCALE_RULES, Scale, counts_all

if TYPE_CHECKING:
    from torch import Tensor

MAX_OFFSET = 64  # sizes of the mesh; float32 would lose 6 of its 24 bits to it
SAMPLED_FACES = 100  # about

Positions = TypeVar("Positions", "Tensor", NDArray[np.float64])


def normalize_positions(verts: Positions, faces: Any = None, scale: Scale = "radius") -> Positions:
    """Move the mean of the vertices (V, 3) to the origin, and scale them to radius 1, to area 1 or by a fixed number.

    verts: an array or a tensor; the result is of the same kind
    faces: (F, 3) integers, for area 1, and to leave out vertices of no face: with faces, only the corners of those with
        three distinct corners count for mean and radius
    scale: "radius" scales the farthest vertex to distance 1. "area" scales the sum of the areas of the faces to 1. A
        mesh of radius or area 0 is only moved. "all-radius" and "all-area" count all vertices, as the original does and
        diffnet did before. "none" only moves all meshes. A float divides the positions, so it becomes the length 1.

    Raises OptionError for another `scale`, and for area 1 without faces.

    >>> normalize_positions(np.array([[0.0, 0, 0], [4, 0, 0]]))
    array([[-1.,  0.,  0.],
           [ 1.,  0.,  0.]])
    """
    centered, length = _centered(verts, faces, scale)
    return centered / length


def normalized_length(mesh: Mesh, scale: Scale) -> float:
    """The length on a mesh that becomes 1, see `normalize_positions`."""
    return float(_centered(mesh.verts, mesh.faces, scale)[1])


def _centered(verts: Positions, faces: Any, scale: Scale) -> tuple[Positions, Any]:
    """The vertices with their mean at the origin, and the length that becomes 1."""
    rule = scale_rule(scale) or "radius"
    surface = verts if counts_all(rule) or faces is None or len(faces) == 0 else _surface(verts, faces)
    center = surface.mean(0)
    centered: Positions = verts - center
    if isinstance(rule, float) or rule == "none":
        return centered, 1.0 if rule == "none" else rule
    if rule.endswith("area"):
        if faces is None or len(faces) == 0:
            raise OptionError(f'scale="{rule}" needs faces (F, 3); a point cloud has none, so use scale="radius"')
        size = _area(centered, faces) ** 0.5
    else:
        size = ((surface - center) ** 2).sum(1).max() ** 0.5
    return centered, size if size > 0 else 1.0


def scale_rule(normalize: bool | Scale) -> Scale | None:
    """The rule that `normalize=` of `precompute` stands for: None for False, "radius" for True.

    Raises OptionError for any other value.
    """
    if isinstance(normalize, (bool, np.bool_)):
        return "radius" if normalize else None
    if isinstance(normalize, float) and 0 < normalize < np.inf:
        return float(normalize)
    if not isinstance(normalize, str) or normalize not in SCALE_RULES:
        words = ", ".join(["True", "False", *(f'"{rule}"' for rule in SCALE_RULES)])
        raise OptionError(f"normalize should be {words} or a positive float, got {reprlib.repr(normalize)}")
    return normalize


def load_normalized(
    source: MeshLike, cache_dir: str | os.PathLike[str] | None = None, normalize: bool | Scale = True
) -> Mesh:
    """`load_mesh` with normalized positions, or with its own ones if `normalize` is False.

    Unless they count, vertices of no face come to the origin, so that nothing depends on where they were.

    Raises MeshError for a mesh that can't be used, and for a point cloud that should have area 1.
    """
    rule = scale_rule(normalize)
    mesh = detached_mesh(source, cache_dir)
    if rule is None:
        return mesh
    if str(rule).endswith("area") and mesh.is_point_cloud:
        raise MeshError(f'{mesh.name}: a point cloud has no faces, so no area to normalize; use normalize="radius"')
    verts = normalize_positions(mesh.verts, mesh.faces, rule)
    if not counts_all(rule):
        verts[~mesh.on_surface] = 0
    return replace(mesh, verts=verts)


def mesh_for_operators(
    source: MeshLike,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    normalize: bool | Scale = False,
    normals: Any = None,
) -> Mesh:
    """Load the mesh that operators are computed from. Its positions and normals are rounded to float32.

    cache_dir: see `load_mesh`
    normalize, normals: see `precompute`. `normals` of the result are those that define the tangent frames, or None if
        the geometry defines them.

    Raises MeshError for a mesh or normals that can't be used, OptionError for unknown words.
    """
    return round_positions(_with_normals_by_rule(load_normalized(source, cache_dir, normalize), normals))


def round_positions(mesh: Mesh) -> Mesh:
    """Round positions and normals to float32 and return them as float64. A mesh far from the origin is moved there.

    Raises MeshError for positions that float32 can't hold.
    """
    verts = mesh.verts
    # Finding all used vertices takes longer than the rest. The mesh is at least as large as some of its faces together,
    # which mostly shows that its offset is small.
    step = len(mesh.faces) // SAMPLED_FACES + 1
    sampled = verts if mesh.is_point_cloud else verts[mesh.faces[::step].reshape(-1)]
    if np.abs(verts).max() > MAX_OFFSET * np.ptp(sampled, axis=0).max():
        surface = np.ascontiguousarray(_surface(verts, mesh.faces).T)  # NumPy is slow along the long axis of (V, 3)
        low, high = surface.min(axis=1), surface.max(axis=1)
        center = (low + high) / 2
        if np.abs(center).max() > MAX_OFFSET * (high - low).max():
            verts = verts - center
    with np.errstate(over="ignore"):
        verts = verts.astype(np.float32).astype(np.float64)
    if not np.isfinite(verts).all():
        raise MeshError(f"{mesh.name}: coordinates up to {np.abs(mesh.verts).max():.3g} are beyond single precision")
    normals = None if mesh.normals is None else mesh.normals.astype(np.float32).astype(np.float64)
    return replace(mesh, verts=verts, normals=normals)


def _with_normals_by_rule(mesh: Mesh, normals: Any) -> Mesh:
    if normals is None:
        return mesh if mesh.is_point_cloud or mesh.normals is None else replace(mesh, normals=None)
    if not isinstance(normals, str):
        return replace(mesh, normals=user_normals(normals, len(mesh.verts), mesh.name))
    check_normals_rule(normals, "an array (V, 3), ")
    if normals == "geometry":
        return replace(mesh, normals=None)
    if mesh.normals is None:
        raise MeshError(
            f"{mesh.name}: it has no normals; PLY files (nx, ny, nz) and OBJ files (vn) can have them. "
            "Pass an array (V, 3), or leave `normals` out"
        )
    return mesh


def _surface(verts: Positions, faces: Any) -> Positions:
    """The vertices (V', 3) that are corners of faces with three distinct corners. All, if there are no such faces."""
    a, b, c = (faces[:, i] for i in range(3))
    used = verts[:, 0] != verts[:, 0]  # False everywhere, and of the same kind
    used[faces[(a != b) & (b != c) & (c != a)].reshape(-1)] = True
    return verts[used] if used.any() and not used.all() else verts


def _area(verts: Any, faces: Any) -> Any:
    a, b, c = (verts[faces[:, i]] for i in range(3))
    u, v = b - a, c - a
    cross = u[:, [1, 2, 0]] * v[:, [2, 0, 1]] - u[:, [2, 0, 1]] * v[:, [1, 2, 0]]
    return ((cross**2).sum(1) ** 0.5).sum() / 2
