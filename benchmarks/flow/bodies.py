"""Random bodies of several closed, smooth components that don't touch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import ConvexHull, cKDTree
from scipy.spatial.transform import Rotation

from diffnet.benchmarks.flow.panels import Floats

GAPS = 0.15, 0.4  # the range of distances of a component to the others, in m


def random_body(rng: np.random.Generator, vertices: tuple[int, int]) -> tuple[Floats, NDArray[np.int64]]:
    """The vertices (V, 3) in m and faces (F, 3) of two to four components. Their mean is the origin.

    vertices: the range of vertices of a component
    """
    verts, faces = component(rng, int(rng.integers(*vertices, endpoint=True)))
    for _ in range(rng.integers(1, 3, endpoint=True)):
        points, triangles = component(rng, int(rng.integers(*vertices, endpoint=True)))
        faces = np.concatenate([faces, len(verts) + triangles])
        verts = np.concatenate([verts, place_near(points, verts, rng)])
    return verts - verts.mean(0), faces


def component(rng: np.random.Generator, vertices: int) -> tuple[Floats, NDArray[np.int64]]:
    """A superellipsoid from 0.25 to 0.75 m, blunt or wing-like, tapered and rotated."""
    points, faces = sphere(vertices)
    power = rng.uniform(2, 3.5)
    points /= (np.abs(points) ** power).sum(1, keepdims=True) ** (1 / power)
    points[:, :2] *= 1 + rng.uniform(-0.35, 0.35) * points[:, 2:]
    return Rotation.random(rng=rng).apply(points * rng.uniform(0.25, 0.75, 3)), faces


def sphere(vertices: int) -> tuple[Floats, NDArray[np.int64]]:
    """A Fibonacci lattice on the unit sphere and its convex hull."""
    z = 1 - (2 * np.arange(vertices) + 1) / vertices
    turn = np.pi * (1 + 5**0.5) * np.arange(vertices)
    points = np.stack([np.sqrt(1 - z**2) * np.cos(turn), np.sqrt(1 - z**2) * np.sin(turn), z], 1)
    faces = ConvexHull(points).simplices.astype(np.int64)
    inward = np.linalg.det(points[faces]) < 0
    faces[inward] = faces[inward, ::-1]
    return points, faces


def place_near(points: Floats, others: Floats, rng: np.random.Generator) -> Floats:
    """The points of a component, moved from far away toward a random point of the others until they are near."""
    gap, direction = rng.uniform(*GAPS), rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    tree, target = cKDTree(others), others[rng.integers(len(others))]
    way = 5.0
    while (distance := tree.query(points + target + way * direction)[0].min()) > gap:
        way -= max(distance - gap, 0.01)
    return points + target + (way + gap - distance) * direction
