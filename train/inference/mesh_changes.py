"""Changes of a mesh: other poses, numberings, triangulations, and damage.

Every function returns the changed mesh and stand_ins (V,) int64. These give, for each original vertex, the vertex of
the changed mesh that takes its place, or LOST. A change that moves or replaces the vertices gives the nearest ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import trimesh
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from diffnet.geometry import Mesh, decimate, make_mesh, mesh_edges

Changed: TypeAlias = tuple[Mesh, NDArray[np.int64]]

LOST = -1


def rotated(mesh: Mesh, rng: np.random.Generator) -> Changed:
    """Rotate at random, uniformly over all rotations."""
    # A normalized quaternion of four normal variates is a uniformly random rotation.
    return _same_vertices(mesh, Rotation.from_quat(rng.normal(size=4)).apply(mesh.verts), mesh.faces)


def renumbered(mesh: Mesh, rng: np.random.Generator) -> Changed:
    """Put the vertices, the faces and the corners of each face into a random order. Faces keep their orientation."""
    order = rng.permutation(len(mesh.verts))
    new_number = np.empty_like(order)
    new_number[order] = np.arange(len(order))
    faces = new_number[mesh.faces[rng.permutation(len(mesh.faces))]]
    first = rng.integers(3, size=(len(faces), 1))
    faces = np.take_along_axis(faces, (first + np.arange(3)) % 3, axis=1)
    return make_mesh(mesh.verts[order], faces, name=mesh.name), new_number


def subdivided(mesh: Mesh) -> Changed:
    """Split each face into four at the midpoints of its edges."""
    verts, faces = trimesh.remesh.subdivide(mesh.verts, mesh.faces)  # type: ignore[no-untyped-call]
    return make_mesh(verts, faces, name=mesh.name), np.arange(len(mesh.verts))  # midpoints follow the vertices


def decimated(mesh: Mesh, share: float) -> Changed:
    """Collapse edges by quadric error until this share of the faces is left. Vertices move."""
    small = decimate(mesh, max(4, round(share * len(mesh.faces))))
    return _nearest(mesh, small.verts, small.faces)


def sampled(mesh: Mesh, rng: np.random.Generator) -> Changed:
    """As many points as the mesh has vertices, spread at random over the faces, as a point cloud."""
    corners = mesh.verts[mesh.faces]
    areas = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    faces = rng.choice(len(corners), len(mesh.verts), p=areas / areas.sum())
    weights = rng.dirichlet((1, 1, 1), size=len(faces))  # uniform over a triangle
    return _nearest(mesh, np.einsum("pc,pcx->px", weights, corners[faces]), None)


def noisy(mesh: Mesh, rng: np.random.Generator, strength: float) -> Changed:
    """Add Gaussian noise to the positions. Its standard deviation per coordinate is `strength` mean edge lengths."""
    edges = mesh_edges(mesh.faces)
    length = np.linalg.norm(mesh.verts[edges[:, 0]] - mesh.verts[edges[:, 1]], axis=1).mean()
    return _same_vertices(mesh, mesh.verts + rng.normal(scale=strength * length, size=mesh.verts.shape), mesh.faces)


def with_missing_faces(mesh: Mesh, rng: np.random.Generator, share: float) -> Changed:
    """Remove a random share of the faces. All vertices stay."""
    rest = np.sort(rng.permutation(len(mesh.faces))[round(share * len(mesh.faces)) :])
    return _same_vertices(mesh, mesh.verts, mesh.faces[rest])


def cut(mesh: Mesh, share: float) -> Changed:
    """Remove this share of the vertices, those with the smallest z, with their faces and vertices left without any."""
    above = mesh.verts[:, 2] > np.quantile(mesh.verts[:, 2], share)
    rows, faces = np.unique(mesh.faces[above[mesh.faces].all(axis=1)], return_inverse=True)
    stand_ins = np.full(len(mesh.verts), LOST)
    stand_ins[rows] = np.arange(len(rows))
    return make_mesh(mesh.verts[rows], faces.reshape(-1, 3), name=mesh.name), stand_ins


def soup(mesh: Mesh) -> Changed:
    """Give each face three vertices of its own. The first of its copies stands for a vertex."""
    corners = mesh.faces.reshape(-1)
    rows, first = np.unique(corners, return_index=True)
    stand_ins = np.full(len(mesh.verts), LOST)
    stand_ins[rows] = first
    return make_mesh(mesh.verts[corners], np.arange(len(corners)).reshape(-1, 3), name=mesh.name), stand_ins


def _same_vertices(mesh: Mesh, verts: NDArray[np.float64], faces: NDArray[np.int64] | None) -> Changed:
    return make_mesh(verts, faces, name=mesh.name), np.arange(len(mesh.verts))


def _nearest(mesh: Mesh, verts: NDArray[np.float64], faces: NDArray[np.int64] | None) -> Changed:
    return make_mesh(verts, faces, name=mesh.name), cKDTree(verts).query(mesh.verts)[1]


# The changes by their names in the first column of docs/robustness.md.
CHANGES: dict[str, Callable[[Mesh, np.random.Generator], Changed]] = {
    "scaled by 0.01": lambda mesh, rng: _same_vertices(mesh, 0.01 * mesh.verts, mesh.faces),
    "scaled by 100": lambda mesh, rng: _same_vertices(mesh, 100 * mesh.verts, mesh.faces),
    "rotated": rotated,
    "renumbered": renumbered,
    # Faces are turned around, so that their normals point to the same side as before.
    "mirrored": lambda mesh, rng: _same_vertices(mesh, mesh.verts * [-1, 1, 1], mesh.faces[:, ::-1]),
    "subdivided, 4 × the faces": lambda mesh, rng: subdivided(mesh),
    "decimated to 50 % of the faces": lambda mesh, rng: decimated(mesh, 0.5),
    "decimated to 25 % of the faces": lambda mesh, rng: decimated(mesh, 0.25),
    "point cloud of the vertices": lambda mesh, rng: _same_vertices(mesh, mesh.verts, None),
    "point cloud of random points": sampled,
    "noise of 10 % of an edge": lambda mesh, rng: noisy(mesh, rng, 0.1),
    "noise of 25 % of an edge": lambda mesh, rng: noisy(mesh, rng, 0.25),
    "noise of 50 % of an edge": lambda mesh, rng: noisy(mesh, rng, 0.5),
    "5 % of the faces missing": lambda mesh, rng: with_missing_faces(mesh, rng, 0.05),
    "20 % of the faces missing": lambda mesh, rng: with_missing_faces(mesh, rng, 0.2),
    "30 % of the vertices cut off": lambda mesh, rng: cut(mesh, 0.3),
    "triangle soup": lambda mesh, rng: soup(mesh),
}
