"""The intrinsic Delaunay Laplacian of closed surfaces, compared with robust_laplacian."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import potpourri3d
import pytest
import robust_laplacian
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st

from diffnet.benchmarks.cases.preprocessing import bumpy_torus
from diffnet.geometry import load_mesh, normalize_positions
from diffnet.geometry.discretize import intrinsic_delaunay
from diffnet.geometry.discretize.intrinsic_delaunay import delaunay_laplacian

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
