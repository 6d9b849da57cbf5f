"""Meshes with fewer faces."""

from __future__ import annotations

from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import Mesh, make_mesh


def decimated(mesh: Mesh, share: float) -> Mesh:
    """Remove a share of the faces by collapsing edges in the order of their quadric error. Vertices move.

    share: from 0 up to, but not including, 1. About this share of the faces is removed, fewer if no more can be.

    A point cloud, and a mesh of which nothing would be left, is returned as it is. Normals of the file are dropped,
    because vertices move.

    Raises OptionError if the package fast-simplification is not installed, ValueError for a share that is not allowed.

    Source: Garland and Heckbert 1997, Surface simplification using quadric error metrics.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share should be at least 0 and below 1, got {share}")
    if mesh.is_point_cloud or share == 0:
        return mesh
    try:
        from fast_simplification import simplify
    except ImportError as e:
        raise OptionError("decimation needs the package fast-simplification: pip install 'diffnet[robustness]'") from e
    verts, faces = simplify(mesh.verts, mesh.faces, target_reduction=share)
    return make_mesh(verts, faces, name=mesh.name) if len(faces) else mesh
