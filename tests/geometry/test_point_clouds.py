"""`precompute` on point clouds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trimesh
from conftest import random_rotation
from operator_checks import assert_sound, gradient, relative
from shapes import cloud_of

from diffnet.geometry import MeshError, laplacian_and_mass, make_mesh, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def test_small_and_flat_point_clouds() -> None:
    rng = np.random.default_rng(0)
    for points in (rng.random((4, 3)), rng.random((5, 3)), rng.random((31, 3))):
        assert_sound(precompute((points, None), k=6), 6)
    flat = np.c_[rng.random((300, 2)), np.zeros(300)] @ random_rotation(2).T
    operators = precompute((flat, None), k=6)
    assert_sound(operators, 6)
    assert float(operators.mass.sum()) == pytest.approx(1, abs=0.15)
    normals = operators.frames[:, 2].double().numpy()
    np.testing.assert_allclose(np.abs(normals @ random_rotation(2)[:, 2]), 1, atol=1e-5)


@pytest.mark.parametrize("copies", [3, 40], ids=lambda copies: f"{copies}-copies")
def test_coincident_points(sphere: trimesh.Trimesh, copies: int) -> None:
    points = np.array(sphere.vertices)[:60]
    assert_sound(precompute((np.concatenate([points, np.repeat(points[:1], copies, 0)]), None), k=6), 6)
    everywhere = np.repeat(points, copies, 0), None
    operators = precompute(everywhere, k=6)
    assert_sound(operators, 6)
    distinct = precompute((points, None), k=6)
    assert torch.equal(operators.evals, distinct.evals)
    assert torch.equal(operators.evecs, distinct.evecs.repeat_interleave(copies, 0))
    assert torch.equal(operators.frames, distinct.frames.repeat_interleave(copies, 0))
    f = np.sin(3 * points[:, 0])
    np.testing.assert_allclose(gradient(operators, np.repeat(f, copies)), np.repeat(gradient(distinct, f), copies, 0))
    assert relative(operators.mass, distinct.mass.repeat_interleave(copies) / copies) < 1e-6
    if copies < 30:  # the number of neighbors that a local triangulation has
        assert_sound(precompute(everywhere, k=6, join="never"), 6)
    else:
        with pytest.raises(MeshError, match=r"arrays: the robust Laplacian can't be computed"):
            precompute(everywhere, k=6, join="never")


def test_point_cloud_operators_resemble_those_of_the_surface(sphere: trimesh.Trimesh) -> None:
    mesh, cloud = precompute(sphere, k=9), precompute(cloud_of(sphere), k=9)
    assert_sound(cloud, 9)
    assert float(cloud.mass.sum()) == pytest.approx(4 * np.pi, rel=0.1)
    np.testing.assert_allclose(cloud.evals, mesh.evals, rtol=0.1, atol=0.02)
    f = np.array(sphere.vertices)[:, 0]
    assert relative(gradient(cloud, f), gradient(mesh, f)) < 0.1
    assert len(cloud.faces) == 0
    assert cloud.face_ptr.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"no faces and so no \.edges; write \.edge_index\(\)"):
        cloud.edges  # noqa: B018


def test_dense_point_clouds_keep_their_area() -> None:
    """Each point is much closer to its neighbors than to the origin."""
    points = np.random.default_rng(0).normal(size=(8_000, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    laplacian, mass = laplacian_and_mass(make_mesh(points, None))
    assert mass.sum() == pytest.approx(4 * np.pi, rel=0.01)
    for f in points.T:  # the coordinates are eigenfunctions with the eigenvalue 2
        assert f @ (laplacian @ f) / (f @ (mass * f)) == pytest.approx(2, rel=0.06)
