"""Meshes and point clouds that several tests share."""

from __future__ import annotations

import numpy as np
import trimesh

from diffnet.data import LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.geometry import Mesh, make_mesh, mesh_edges

Arrays = tuple[np.ndarray, np.ndarray]

TETRAHEDRON: Arrays = (
    np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]),
    np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]),
)


def arrays(mesh: trimesh.Trimesh) -> Arrays:
    """Vertices and faces."""
    return np.array(mesh.vertices), np.array(mesh.faces)


def soup(mesh: Arrays) -> Arrays:
    """The faces, each with three vertices of its own."""
    verts, faces = mesh
    return verts[faces].reshape(-1, 3), np.arange(faces.size).reshape(-1, 3)


def cloud_of(mesh: trimesh.Trimesh) -> tuple[np.ndarray, None]:
    """The vertices as a point cloud."""
    return np.array(mesh.vertices), None


def ellipsoid(seed: int, subdivisions: int = 1) -> Mesh:
    """A subdivided icosahedron (42 vertices by default) with random axes from 0.5 to 1.5."""
    ball = trimesh.creation.icosphere(subdivisions)
    verts = ball.vertices * np.random.default_rng(seed).uniform(0.5, 1.5, 3)
    return make_mesh(verts, ball.faces, name=f"ellipsoid {seed}")


def moebius(count: int = 40) -> Arrays:
    """A Möbius strip of 2 · count vertices."""
    angle = np.arange(count) * 2 * np.pi / count
    rims = []
    for side in (-0.3, 0.3):
        radius = 1 + side * np.cos(angle / 2)
        rims.append(np.stack([radius * np.cos(angle), radius * np.sin(angle), side * np.sin(angle / 2)], 1))
    here = np.arange(count)
    after = (here + 1) % count
    twist = here == count - 1
    near, far = np.where(twist, after + count, after), np.where(twist, after, after + count)
    faces = np.concatenate([np.stack([here, near, here + count], 1), np.stack([near, far, here + count], 1)])
    return np.concatenate(rims), faces


def strip_on_a_line(direction: tuple[float, float, float]) -> Arrays:
    """Triangles whose vertices all lie on one line."""
    start = np.arange(9)
    return np.linspace(0, 1, 11)[:, None] * np.array(direction), np.stack([start, start + 1, start + 2], 1)


def degraded_sphere(seed: int) -> Arrays:
    """A squeezed, noisy sphere: vertices coincide, faces are missing, doubled or flipped, and corners are moved."""
    rng = np.random.default_rng(seed)
    ball = trimesh.creation.icosphere(3)
    count = len(ball.vertices)
    verts = ball.vertices * 10.0 ** rng.uniform(-6, 0, 3)
    verts += rng.normal(size=verts.shape) * 10.0 ** rng.uniform(-8, 0)
    snapped = rng.random(count) < rng.uniform(0, 0.3)
    verts[snapped] = verts[rng.integers(0, count, snapped.sum())]
    faces = ball.faces[rng.random(len(ball.faces)) < rng.uniform(0.2, 1)]
    faces = np.concatenate([faces, faces[rng.random(len(faces)) < 0.1][:, ::-1]])
    target = np.arange(count)
    moved = rng.random(count) < rng.uniform(0, 0.1)
    target[moved] = rng.integers(0, count, moved.sum())
    return verts, target[faces]


def spheres(at: LabelsAt, sizes: tuple[int, ...], classes: int = 4, unlabeled: int | None = 5) -> LabeledMeshes:
    """Stretched spheres labeled by height. Every so many elements are unlabeled. The first two are the test part.

    sizes: how often an icosahedron is divided
    """
    items = []
    for i, size in enumerate(sizes):
        ball = trimesh.creation.icosphere(size)
        verts = ball.vertices * np.random.default_rng(i).uniform(0.6, 1.4, 3)
        faces = np.asarray(ball.faces)
        corners = {"vertices": np.arange(len(verts))[:, None], "faces": faces, "edges": mesh_edges(faces)}[at]
        height = verts[corners, 2].mean(axis=1)
        labels = np.searchsorted(np.quantile(height, np.linspace(0, 1, classes + 1)[1:-1]), height)
        if unlabeled is not None:
            labels[::unlabeled] = -1
        items.append(LabeledMesh(f"ball {i}", make_mesh(verts, faces, name=f"ball {i}"), labels.astype(np.int64)))
    return LabeledMeshes(items, items[:2], [str(i) for i in range(classes)], at)
