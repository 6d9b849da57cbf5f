"""The operators of the original implementation of DiffusionNet, with its regularization.

It adds absolute amounts in the units of the positions, so results depend on the size of the mesh. Everything is
computed in float64 here. The original computes frames in float32.

Source: `compute_operators` in https://github.com/nmwsharp/diffusion-net
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import potpourri3d
import robust_laplacian
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.discretize.gradient import gradient_values, one_ring, pattern_with_diagonal
from diffnet.geometry.discretize.laplacian import LIBRARY_ERRORS
from diffnet.geometry.errors import IN_BRACKETS, MeshError, raised_as
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.objects import unit_normals
from diffnet.geometry.mesh.polygons import Floats

SHIFT = 1e-8  # times the mean mass, added to each mass; also added to the diagonal of L for eigenpairs
GRADIENT_REGULARIZER = 1e-5  # length², added to the diagonal of the normal equations of each gradient
UNIT_EPSILON = 1e-6  # added to lengths that vectors are divided by
CLOUD_NEIGHBORS = 30
SEED = 777  # of the normals of vertices without any


class Parts(NamedTuple):
    """Operators without eigenpairs: L (V, V), mass (V,), frames (V, 3, 3), the gradient's pattern and values (2, nnz).

    lone_mass: (V,), the mass of each vertex that L joins with no other, 0 for all others
    """

    laplacian: scipy.sparse.csr_matrix
    mass: Floats
    frames: Floats
    pattern: scipy.sparse.csr_matrix
    gradient: Floats
    lone_mass: Floats


def original_parts(mesh: Mesh) -> Parts:
    """The original's operators of a mesh or point cloud: cotangent Laplacian, mass, frames and gradient.

    mesh: see `mesh_for_operators`

    A point cloud has the robust Laplacian, and its gradient is fitted to the 30 nearest neighbors of each point.

    Raises MeshError for a mesh without area, a point cloud of 30 points or fewer, and a Laplacian that is not finite.
    """
    vertices = len(mesh.verts)
    if mesh.is_point_cloud:
        neighbors = _nearest(mesh)
        laplacian, mass = _cloud_laplacian(mesh)
        rows = np.repeat(np.arange(vertices), CLOUD_NEIGHBORS)
        to_neighbors = np.ones(len(rows)), (rows, neighbors.reshape(-1))
        pattern = pattern_with_diagonal(scipy.sparse.csr_matrix(to_neighbors, (vertices, vertices)))
        offsets = mesh.verts[neighbors] - mesh.verts[:, None]
        normals = np.linalg.svd(offsets, full_matrices=False)[2][:, 2]
    else:
        laplacian = potpourri3d.cotan_laplacian(mesh.verts, mesh.faces, denom_eps=1e-10)
        mass = potpourri3d.vertex_areas(mesh.verts, mesh.faces)
        mass = mass + SHIFT * mass.mean()
        pattern = one_ring(mesh.faces, vertices)
        normals = _mesh_normals(mesh)
    if not (np.isfinite(laplacian.data).all() and np.isfinite(mass).all()):
        raise MeshError(f'{mesh.name}: the original\'s Laplacian is not finite; use operators="diffnet"')
    if not mass.sum() > 0:
        raise MeshError(f"{mesh.name}: the surface has no area")
    of_mesh = unit_normals(mesh.normals)
    if of_mesh is not None:
        normals = np.where(of_mesh.any(axis=1, keepdims=True), of_mesh, normals)
    frames = frames_of_normals(normals)
    gradient = gradient_values(mesh.verts, frames, pattern, GRADIENT_REGULARIZER)
    laplacian = scipy.sparse.csr_matrix(laplacian)
    laplacian.sort_indices()
    lone = np.asarray(abs(laplacian).sum(axis=1)).reshape(-1) == 0
    return Parts(laplacian, mass, frames, pattern, gradient, np.where(lone, mass, 0))


def frames_of_normals(normals: Floats) -> Floats:
    """Frames (V, 3, 3) of normals (V, 3): tangent x is the projected x-axis, or the y-axis where that is too close."""
    axis = np.where(np.abs(normals[:, :1]) < 0.9, [[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]])
    tangent = axis - (axis * normals).sum(1, keepdims=True) * normals
    tangent /= np.linalg.norm(tangent, axis=1, keepdims=True) + UNIT_EPSILON
    return np.stack([tangent, np.cross(normals, tangent), normals], axis=1)


def _mesh_normals(mesh: Mesh) -> Floats:
    """The mean of the normals of the faces around each vertex, each with the same weight."""
    normals = _mean_normals(mesh.verts, mesh.faces)
    missing = ~np.isfinite(normals).all(axis=1, keepdims=True)
    if missing.any():  # where normals cancel out, those of a slightly moved vertex
        random = np.random.RandomState(SEED).rand(*mesh.verts.shape) - 0.5
        extent = np.linalg.norm(mesh.verts.max(axis=0) - mesh.verts.min(axis=0))
        normals = _mean_normals(mesh.verts + missing * random * extent * 1e-4, mesh.faces)
        missing = ~np.isfinite(normals).all(axis=1, keepdims=True)
        normals = np.where(missing, random / np.linalg.norm(random, axis=1, keepdims=True), normals)
    return normals


def _mean_normals(verts: Floats, faces: NDArray[np.int64]) -> Floats:
    a, b, c = (verts[faces[:, i]] for i in range(3))
    normals = np.cross(b - a, c - a)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True) + UNIT_EPSILON
    corners = faces.reshape(-1)
    sums = np.stack([np.bincount(corners, np.repeat(normals[:, i], 3), len(verts)) for i in range(3)], axis=1)
    with np.errstate(invalid="ignore"):
        mean: Floats = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return mean


def _nearest(mesh: Mesh) -> NDArray[np.int64]:
    """The nearest neighbors (V, 30) of each point, without the point itself."""
    from scipy.spatial import cKDTree  # slow to import, and meshes don't need it

    count = len(mesh.verts)
    if count <= CLOUD_NEIGHBORS:
        raise MeshError(
            f"{mesh.name}: the original's operators need more than {CLOUD_NEIGHBORS} points, this cloud has {count}; "
            'use operators="diffnet"'
        )
    nearest = cKDTree(mesh.verts).query(mesh.verts, k=CLOUD_NEIGHBORS + 1)[1]
    others = nearest != np.arange(count)[:, None]
    others[others.all(axis=1), -1] = False  # among many points at one position, the point itself may be missing
    return np.asarray(nearest[others].reshape(count, CLOUD_NEIGHBORS), np.int64)


def _cloud_laplacian(mesh: Mesh) -> tuple[scipy.sparse.csc_matrix, Floats]:
    place = f"{mesh.name}: the original's Laplacian can't be computed"
    with raised_as(MeshError, place, *LIBRARY_ERRORS, form=IN_BRACKETS):
        laplacian, mass = robust_laplacian.point_cloud_laplacian(mesh.verts, n_neighbors=CLOUD_NEIGHBORS)
    return laplacian, mass.diagonal()
