"""Laplacian, also of the intrinsic Delaunay triangulation, mass, tangent frames, and the gradient in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import potpourri3d
import pytest
import robust_laplacian
import scipy.linalg
import scipy.sparse
import trimesh
from conftest import random_rotation
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import gradient, relative
from shapes import arrays, cloud_of, moebius

from diffnet.benchmarks.cases.preprocessing import bumpy_torus
from diffnet.geometry import (
    LAPLACIANS,
    gradient_values,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
    normalize_positions,
    one_ring,
    precompute,
    tangent_frames,
)
from diffnet.geometry.discretize import intrinsic_delaunay
from diffnet.geometry.discretize.intrinsic_delaunay import delaunay_laplacian

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)
SOURCES = pytest.mark.parametrize("source", ["mesh", "cloud"])


@SOURCES
def test_frames_of_a_sphere(sphere: trimesh.Trimesh, source: str) -> None:
    mesh = load_mesh(sphere if source == "mesh" else cloud_of(sphere))
    frames = tangent_frames(mesh)
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (642, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(frames), 1, atol=1e-12)
    assert ((frames[:, 2] * mesh.verts).sum(1) > 0.99).all()  # outward


def test_normals_of_a_cloud_agree_between_neighbors() -> None:
    """The surface is neither closed nor convex, so "outward" doesn't determine the signs."""
    rng = np.random.default_rng(0)
    angle, height = rng.uniform(0, 3 * np.pi, 3000), rng.uniform(0, 6, 3000)
    radius = 2 + angle / np.pi  # a scroll with a distance of 2 between its turns
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1)
    normals = tangent_frames(make_mesh(points, None))[:, 2]
    tangent = np.stack([np.cos(angle) / np.pi - radius * np.sin(angle), np.sin(angle) / np.pi + radius * np.cos(angle)])
    true = np.stack([tangent[1], -tangent[0], np.zeros(3000)], 1) / np.linalg.norm(tangent, axis=0)[:, None]
    agreement = (normals * true).sum(1)
    assert np.abs(agreement).min() > 0.9
    assert len(set(np.sign(agreement))) == 1


def test_normals_of_two_clouds_point_outward_each(sphere: trimesh.Trimesh) -> None:
    points = np.array(sphere.vertices)
    normals = tangent_frames(make_mesh(np.concatenate([points, points + np.array([9, 0, 0])]), None))[:, 2]
    assert ((normals * np.concatenate([points, points])).sum(1) > 0.99).all()


def test_frames_where_normals_cancel() -> None:
    """A double-sided triangle takes the normal of its largest face; unused vertices take z."""
    verts = np.array([[0.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0.9], [5, 5, 5]])
    frames = tangent_frames(make_mesh(verts, [[0, 1, 2], [0, 2, 1]]))
    np.testing.assert_allclose(np.abs(frames[:3, 2]), np.tile([1, 0, 0], (3, 1)), atol=1e-12)
    np.testing.assert_allclose(frames[4, 2], [0, 0, 1])
    assert tangent_frames(make_mesh([[1.0, 2, 3]], None)).shape == (1, 3, 3)


@SOURCES
def test_gradients_of_linear_functions_are_exact(plane: tuple[np.ndarray, np.ndarray], source: str) -> None:
    verts, faces = plane
    operators = precompute((verts, faces if source == "mesh" else None), k=4)
    normal = random_rotation(1)[:, 2]
    for direction in np.random.default_rng(0).standard_normal((3, 3)):
        expected = direction - (direction @ normal) * normal
        found = gradient(operators, verts @ direction + 3)
        assert np.abs(found - expected).max() < 1e-5 * np.linalg.norm(expected)


@SOURCES
@KINDS
def test_gradient_turns_with_the_mesh(sphere: trimesh.Trimesh, source: str, kind: Any) -> None:
    verts, faces = arrays(sphere)
    # Noise makes the distances to neighbors differ.
    verts = verts * [1, 0.7, 0.5] + np.random.default_rng(0).normal(0, 0.01, verts.shape)
    faces = faces if source == "mesh" else None
    turn = random_rotation(3)
    f = np.sin(3 * verts[:, 0]) + verts[:, 1] * verts[:, 2]
    still, turned = (
        precompute((verts, faces), k=8, laplacian=kind),
        precompute((verts @ turn.T, faces), k=8, laplacian=kind),
    )
    before, after = gradient(still, f), gradient(turned, f)
    assert relative(np.linalg.norm(after, axis=1), np.linalg.norm(before, axis=1)) < 1e-4
    assert relative(after, before @ turn.T) < 1e-4
    np.testing.assert_allclose(turned.evals, still.evals, rtol=1e-4, atol=1e-5)


def test_gradient_against_a_loop(sphere: trimesh.Trimesh) -> None:
    mesh = load_mesh(sphere)
    frames, pattern = tangent_frames(mesh), one_ring(mesh.faces, 642)
    values = gradient_values(mesh.verts, frames, pattern)
    f = np.random.default_rng(0).standard_normal(642)
    found = np.stack([scipy.sparse.csr_matrix((v, pattern.indices, pattern.indptr)) @ f for v in values], 1)
    neighbors: list[set[int]] = [set() for _ in range(642)]
    for face in mesh.faces.tolist():
        for i in face:
            neighbors[i] |= set(face) - {i}
    for i, ring in enumerate(neighbors):
        ids = sorted(ring)
        edges = (mesh.verts[ids] - mesh.verts[i]) @ frames[i, :2].T
        np.testing.assert_allclose(found[i], np.linalg.lstsq(edges, f[ids] - f[i])[0], atol=1e-8)


def test_slivers_do_not_blow_gradients_up() -> None:
    verts = np.array([[0.0, 0, 0], [1, 1e-5, 0], [2, 0, 0], [3, 1e-5, 0]])
    operators = precompute((verts, [[0, 1, 2], [1, 3, 2]]), k=2)
    assert np.abs(gradient(operators, np.array([0, 1, 0, 1.0]))).max() < 5


@KINDS
def test_laplacian_is_symmetric_and_semi_definite(sphere: trimesh.Trimesh, plane: Any, kind: Any) -> None:
    for source in (sphere, plane, moebius(), cloud_of(sphere)):
        laplacian, mass = laplacian_and_mass(load_mesh(source), kind)
        assert abs(laplacian - laplacian.T).max() == 0
        largest = abs(laplacian).max()
        assert np.abs(laplacian.sum(1)).max() < 1e-12 * largest
        assert scipy.linalg.eigvalsh(laplacian.toarray())[0] > -1e-10 * largest
        assert (mass > 0).all()
        assert laplacian.has_sorted_indices


@KINDS
def test_mass_is_the_area(sphere: trimesh.Trimesh, kind: Any) -> None:
    _, mass = laplacian_and_mass(load_mesh(sphere), kind)
    assert mass.sum() == pytest.approx(sphere.area, rel=1e-4)
    thirds = np.bincount(sphere.faces.ravel(), np.repeat(sphere.area_faces / 3, 3))
    if kind == "cotan":
        np.testing.assert_allclose(mass, thirds, rtol=1e-6)


def test_cotangents_written_out(plane: tuple[np.ndarray, np.ndarray]) -> None:
    verts, faces = plane
    expected = np.zeros((121, 121))
    for face in faces:
        for i in range(3):
            a, b, c = face[i], face[(i + 1) % 3], face[(i + 2) % 3]
            u, v = verts[a] - verts[c], verts[b] - verts[c]
            half = u @ v / np.linalg.norm(np.cross(u, v)) / 2
            expected[[a, b], [b, a]] -= half
            expected[[a, b], [a, b]] += half
    laplacian, _ = laplacian_and_mass(make_mesh(verts, faces), "cotan")
    np.testing.assert_allclose(laplacian.toarray(), expected, atol=1e-8)


BALL = trimesh.creation.icosphere(2)
VERTS, FACES = np.array(BALL.vertices), np.array(BALL.faces)


def bent(seed: int, jitter: float, stretch: float) -> np.ndarray:
    """The vertices of the ball, jittered and stretched.

    Without jitter, quadrilaterals are Delaunay with either diagonal, and the areas of vertices depend on the choice.
    """
    noise = np.random.default_rng(seed).standard_normal(VERTS.shape)
    return (VERTS + jitter * noise) * [1, 1, stretch]


def compare(verts: np.ndarray, faces: np.ndarray) -> None:
    found = delaunay_laplacian(verts, faces)
    assert found is not None
    laplacian, mass = found
    expected, expected_mass = robust_laplacian.mesh_laplacian(verts, faces)
    # Edges with weights above −10⁻⁶ aren't flipped.
    assert (abs(laplacian - expected) - 1e-6 * abs(expected)).max() <= 1e-5
    np.testing.assert_allclose(mass, expected_mass.diagonal(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("jitter", "stretch"),
    [(0.1, 1), (0.2, 1), (0.02, 8), (0.01, 100)],
    ids=["crumpled", "very-crumpled", "long", "very-long"],
)
def test_agrees_with_robust_laplacian(jitter: float, stretch: float) -> None:
    verts = bent(0, jitter, stretch)
    weights = -potpourri3d.cotan_laplacian(verts, FACES)
    weights.setdiag(0)
    assert weights.min() < -0.1  # some edges must be flipped
    compare(verts, FACES)


@given(st.integers(0, 10_000), st.floats(0.01, 0.3), st.floats(1e-3, 1e3))
@settings(max_examples=15, deadline=None)
def test_agrees_with_robust_laplacian_on_random_balls(seed: int, jitter: float, stretch: float) -> None:
    verts = bent(seed, jitter, stretch)
    compare(verts / np.linalg.norm(verts, axis=1).max(), FACES)


def test_agrees_on_other_closed_surfaces(shared: Path) -> None:
    torus = bumpy_torus(1500)
    compare(torus.verts, torus.faces)
    compare(np.eye(4)[:, :3], np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [2, 0, 3]]))
    compare(np.eye(3), np.array([[0, 1, 2], [2, 1, 0]]))  # two sides of one triangle
    surface = load_mesh(min((shared / "data" / "rna" / "off").iterdir()))
    compare(normalize_positions(surface.verts), surface.faces)


def test_surfaces_that_are_not_closed_are_left_to_the_library() -> None:
    turned = FACES.copy()
    turned[0] = turned[0, ::-1]
    fin = np.concatenate([FACES, [[FACES[0, 0], FACES[0, 1], FACES[5, 2]]]])
    for faces in (FACES[1:], FACES[2:], turned, fin, np.concatenate([FACES, FACES[:1]]), np.concatenate([FACES] * 2)):
        assert delaunay_laplacian(VERTS, faces) is None


def test_endless_flips_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intrinsic_delaunay, "MAX_ROUNDS", 2)
    assert delaunay_laplacian(bent(0, 0.1, 8), FACES) is None
