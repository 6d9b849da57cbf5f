"""From a mesh or a point cloud to `Operators`."""

from __future__ import annotations

import os
import reprlib
from functools import partial
from typing import Any

import torch

from diffnet.geometry.device import usable_device
from diffnet.geometry.errors import MeshError, refuses
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, is_array
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.mesh.objects import warn_of_gradients
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    Options,
    Scale,
    chosen_scale,
)
from diffnet.geometry.preprocessing.group import compute_on, computed_alone, operators_from
from diffnet.geometry.preprocessing.worker import entry_of, find_operators, stored_arrays, suits_gpu
from diffnet.geometry.store.cache import write_later


@refuses(
    verts="(verts, faces)",
    k_eig="k",
    op_cache_dir="cache_dir",
    overwrite_cache="another cache_dir, or delete the folder; entries are never out of date",
)
def precompute(
    mesh: MeshLike,
    faces: Any = None,
    *,
    k: int = 128,
    laplacian: LaplacianKind | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    normals: Any = None,
    normalize: bool | Scale = False,
    basis: BasisPrecision = "float32",
    device: torch.device | str = "cpu",
    join: JoinRule = "auto",
    operators: OperatorsKind = "diffnet",
) -> Operators:
    """Operators of one mesh or point cloud: mass, Laplacian, gradient, frames and k eigenpairs.

    mesh: the vertices (V, 3), or a whole mesh: a path, a trimesh object, a tuple (verts, faces), or an object that has
        them; see `load_mesh`
    faces: (F, 3), if `mesh` is an array of vertices; None for a point cloud. Arrays are NumPy arrays, tensors or lists.
    k: number of eigenpairs, at least 0. See `eigenbasis` for meshes that have fewer.
    laplacian: "robust", the default, or "cotan"; see `laplacian_and_mass`
    cache_dir: a folder for results. The content of the mesh and the options identify an entry, so data sets and
        processes can share the folder. It can be deleted at any time. Entries are checked when they are read: damage,
        a different key, an older format and indices out of range are found, and the entry is computed again. Reading
        runs no code from an entry. But the checks can't tell whether its numbers are right, and changing a file while
        it is in use can crash a reader. So share a folder only with users whom you trust with your results.
    normals: (V, 3), the normals of the tangent frames, one for each vertex, of any length. By default, the normals of a
        mesh are computed from its faces, and those of surfaces that are inside out are turned, see `Mesh.turned_faces`.
        A point cloud uses the normals of its file, if it is a PLY or OBJ file that has them, or those of a `Data`;
        otherwise they are estimated. "file" uses the normals of the file for a mesh, too. "geometry" uses no normals of
        the file. A vertex for which the file has no normal gets one from the geometry. The Laplacian of a point cloud
        is computed in the tangent planes of given normals.
    normalize: True or "radius" to move the mean of the vertices to the origin and scale the farthest to distance 1
        first, as the command line does. "area" scales the area of the faces to 1 instead. Vertices of no face don't
        count, except with the original's operators. "none" only moves meshes, and a float divides their positions.
        See `normalize_positions`.
    basis: the precision in which eigenvectors are stored. With "float16" and "bfloat16", the cache takes less than half
        of the bytes at k = 128, and reading takes more than twice the time. The returned eigenvectors are float32,
        rounded to that precision with or without a cache.
    device: "cpu", "cuda" or "cuda:N", the device that the operators are on. A GPU computes those of meshes of 4096
        vertices and more, and an entry of the cache is written after the call returns. The CPU computes small meshes,
        and all of point clouds, of meshes with given normals and of the original's operators but their eigenbases.
    join: whether vertices at the same position are joined before anything is computed. "auto" joins them where this
        connects most of the mesh, as in a triangle soup, in which every face has its own vertices. "always" joins all
        of them, "never" joins none. `joined_vertices` has the exact rule. The operators keep all vertices of the mesh
        and their numbers: joined vertices have equal rows in `evecs` and `frames`, and share their mass. `joined` tells
        which they are.
    operators: "diffnet", or "original" for the operators of the original implementation, which its trained networks
        expect; see `original_parts`. They have the cotangent Laplacian of the faces as they are, or the robust one of a
        point cloud, and the original's frames and gradients. Small absolute amounts regularize the masses, gradients
        and eigenpairs, so the result depends on the size of the mesh: normalize it as in training. join="auto" joins no
        vertices then, and laplacian="robust" is refused.

    Positions are first rounded to float32, so float32 and float64 inputs share an entry. Everything else is computed in
    float64 and rounded once, to float32. The units are those of the positions: `mass` has length², eigenvalues have
    1/length², gradients have 1/length. Vertices keep their numbers. Where neighbors have distant numbers, the sparse
    matrices store their rows in an order along the surface; see `Pattern.with_row_order`.

    Raises MeshError for a mesh or normals that can't be used, and for faces beside a mesh that has its own. Raises
    OptionError for a bad option or a device that is not available.
    Warns if the mesh has as many components as eigenpairs, or more: each component has an eigenvalue 0, so there are no
    others then. Warns if vertices or normals require a gradient, too: the operators are constants, and `assemble` makes
    operators that pass gradients on.

    >>> verts = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    >>> faces = [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]
    >>> operators = precompute(verts, faces, k=3)
    >>> operators.num_vertices, operators.k
    (4, 3)
    >>> round(float(operators.mass.sum()), 3)  # the surface area, (3 + √3) / 2
    2.366
    """
    warn_of_gradients(mesh, normals)
    options = Options(k, laplacian, basis, join, operators)
    device = usable_device(device)
    scale = chosen_scale(normalize, operators)
    checked = mesh_for_operators(_source(mesh, faces), cache_dir, normalize=scale, normals=normals)
    return operators_of(checked, options, cache_dir, device)


def operators_of(
    mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str] | None, device: torch.device
) -> Operators:
    """The operators of a mesh, see `mesh_for_operators`, and the warning of `precompute`."""
    if device.type == "cpu" or not suits_gpu(mesh, options):
        return operators_from(mesh, stored_arrays(mesh, options, cache_dir, device), options, device)
    path, arrays = find_operators(mesh, options, cache_dir)
    if arrays is not None:
        return operators_from(mesh, arrays, options, device)
    (result,) = compute_on(device, [mesh], options, map, arrays=path is not None)
    operators, arrays = result or computed_alone(mesh, options, device)
    if path is not None and arrays is not None:
        write_later(path, partial(entry_of, mesh, arrays, options))
    return operators


def _source(mesh: Any, faces: Any) -> MeshLike:
    """The mesh that both arguments describe. Raises MeshError if they can't belong together."""
    if faces is None:
        return mesh  # type: ignore[no-any-return]
    if not isinstance(faces, (list, tuple)) and not getattr(faces, "shape", ()):
        hint = f"; write k={faces}" if hasattr(faces, "__index__") else ""
        raise MeshError(f"faces should be an array (F, 3) or None, got {reprlib.repr(faces)}{hint}")
    whole = isinstance(mesh, tuple) and len(mesh) == 2
    if whole or not is_array(mesh):
        path = isinstance(mesh, (str, os.PathLike))
        words = "a tuple (verts, faces)" if whole else f"the path {str(mesh)!r}" if path else type(mesh).__name__
        raise MeshError(
            f"faces were given beside {words}, which has its own. Write precompute(mesh), or precompute(verts, faces) "
            "with vertices (V, 3)"
        )
    return mesh, faces
