"""Transforms of operators agree with the operators of the transformed meshes; cuts and decimation of meshes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_sound, gradient, matrix, relative

from diffnet.geometry import (
    Mesh,
    Operators,
    collate,
    curvature,
    hks,
    make_mesh,
    mirrored,
    precompute,
    random_rotations,
    rotated,
    scaled,
    wks,
)

pytestmark = pytest.mark.usefixtures("one_thread")

K = 12


@cache
def shapes() -> list[Mesh]:
    """A closed mesh, one with a boundary, and a point cloud. None is symmetric, so eigenvalues are simple."""
    rng = np.random.default_rng(0)
    ball = trimesh.creation.icosphere(2)
    verts = np.array(ball.vertices) * [1.0, 0.7, 0.5] + 0.1 * np.sin(3 * np.array(ball.vertices)[:, [1, 2, 0]])
    faces = np.array(ball.faces)
    cloud = verts + rng.normal(scale=0.01, size=verts.shape)
    used, rest = np.unique(faces[40:], return_inverse=True)
    opened = make_mesh(1.3 * verts[used], rest.reshape(-1, 3))
    return [make_mesh(verts, faces), opened, make_mesh(cloud, None)]


@cache
def batch() -> Operators:
    return collate([precompute(mesh, k=K) for mesh in shapes()])


def assert_equal_operators(found: Operators, expected: Operators, mesh: Mesh) -> None:
    """Everything that does not depend on the choice of tangents and on the signs of eigenvectors."""
    assert relative(found.mass, expected.mass) < 1e-5
    assert relative(found.evals[:, 1:], expected.evals[:, 1:]) < 1e-4
    assert abs(matrix(found.laplacian) - matrix(expected.laplacian)).max() < 1e-4
    overlap = (found.evecs * expected.mass[:, None] * expected.evecs).sum(0).abs()
    np.testing.assert_allclose(overlap, 1, atol=2e-3)
    assert relative(found.normals, expected.normals) < 1e-4
    assert relative(found.frames[:, 0].cross(found.frames[:, 1], dim=1), found.normals) < 1e-5  # right-handed
    f = np.sin(2 * mesh.verts[:, 0]) + mesh.verts[:, 1] * mesh.verts[:, 2]
    assert relative(gradient(found, f), gradient(expected, f)) < 1e-3
    assert relative(curvature(found), curvature(expected)) < 5e-3
    assert relative(hks(found), hks(expected)) < 1e-3
    assert relative(wks(found), wks(expected)) < 1e-2


@pytest.mark.parametrize("number", range(3))
def test_transforms_of_operators_are_the_operators_of_transformed_meshes(number: int) -> None:
    mesh, factors = shapes()[number], torch.tensor([0.4, 1.7, 3.0])
    factor = float(factors[number])
    turns = random_rotations(3, torch.Generator().manual_seed(1))
    turn = turns[number].double().numpy()
    found = scaled(batch(), factors)[number]
    assert_equal_operators(found, precompute(make_mesh(mesh.verts * factor, mesh.faces), k=K), mesh)
    assert_equal_operators(scaled(precompute(mesh, k=K), factor), found, mesh)
    turned = precompute(make_mesh(mesh.verts @ turn, mesh.faces), k=K)
    assert_equal_operators(rotated(batch(), turns)[number], turned, mesh)
    for axis in range(3):
        sign = np.where(np.arange(3) == axis, -1, 1)
        expected = precompute(make_mesh(mesh.verts * sign, mesh.faces[:, ::-1]), k=K)
        found = mirrored(batch(), torch.arange(3) == number, axis=axis)
        assert_equal_operators(found[number], expected, mesh)
        assert_equal_operators(found[number - 1], batch()[number - 1], shapes()[number - 1])
        assert torch.equal(found.edges, batch().edges)
        assert torch.equal(mirrored(precompute(mesh, k=K), axis=axis).gradient.values, found[number].gradient.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_eigenvectors_are_transformed_too(dtype: torch.dtype) -> None:
    prepared = batch().with_gradient_evecs().with_basis_dtype(dtype)
    which, factors = torch.tensor([True, False, True]), torch.tensor([0.5, 2.0, 3.0])
    found = mirrored(scaled(prepared, factors), which)
    expected = mirrored(scaled(batch(), factors), which).with_gradient_evecs()
    assert found.evecs.dtype == found.gradient_evecs.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative(found.gradient_evecs.float(), expected.gradient_evecs) < tolerance
    assert relative(found.evecs.float(), expected.evecs) < tolerance
    assert found.lengths == batch().lengths


def test_what_is_not_read_is_not_packed() -> None:
    packed = collate(batch().split())
    transformed = mirrored(scaled(packed, torch.ones(3)))
    assert transformed.mass.shape == packed.mass.shape
    assert transformed.evecs.shape == packed.evecs.shape
    assert "gradient" not in packed.__dict__
    assert "laplacian" not in packed.__dict__
    assert_sound(transformed[0], K)


@pytest.mark.parametrize(
    ("function", "argument", "error", "message"),
    [
        (scaled, 0.0, ValueError, "factors should be positive and finite, got 0.0"),
        (scaled, torch.ones(2), ValueError, r"factors should have shape \(3,\), shape is \(2,\)"),
        (scaled, torch.ones(3, dtype=torch.int64), TypeError, "factors should be floating point"),
        (mirrored, torch.ones(3), ValueError, "which should be a tensor of 3 booleans"),
        (rotated, torch.eye(3), ValueError, r"rotations should have shape \(3, 3, 3\)"),
    ],
)
def test_wrong_arguments_are_named(function: Any, argument: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(batch(), argument)
    with pytest.raises(ValueError, match="axis should be 0, 1 or 2, got 3"):
        mirrored(batch(), axis=3)


@pytest.mark.gpu
def test_transforms_read_nothing_back_from_a_gpu() -> None:
    on_gpu = batch().with_gradient_evecs().to("cuda")
    factors, which = torch.tensor([0.5, 2.0, 3.0]).cuda(), torch.tensor([True, False, True]).cuda()
    turns = random_rotations(3).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = rotated(mirrored(scaled(on_gpu, factors), which), turns)
        read = [found.mass, found.evals, found.evecs, found.frames, found.gradient.values]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = rotated(mirrored(scaled(batch(), factors.cpu()), which.cpu()), turns.cpu())
    for a, b in zip(
        read,
        [expected.mass, expected.evals, expected.evecs, expected.frames, expected.gradient.values],
        strict=True,
    ):
        assert relative(a.cpu(), b) < 1e-5
