"""The Laplacian and the mass of meshes and point clouds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import trimesh
from shapes import cloud_of, moebius

from diffnet.geometry import (
    LAPLACIANS,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)


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
