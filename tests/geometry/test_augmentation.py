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
    cut_by_plane,
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
    times = torch.tensor([0.05, 0.5, 5.0])
    assert relative(hks(found, scales=times), hks(expected, scales=times)) < 1e-3
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
        (scaled, "a", TypeError, "factors should be a number, got 'a' of type str"),
        (scaled, True, TypeError, "factors should be a number, got True of type bool"),
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


# ---- cuts and decimation ----


def test_a_cut_removes_the_share_of_the_area_that_lies_farthest() -> None:
    mesh = shapes()[0]
    for share in (0.0, 0.3, 0.9):
        part = cut_by_plane(mesh, [0, 0, -2.0], share)
        assert np.array_equal(part.mesh.verts, mesh.verts[part.vertices])
        assert np.array_equal(part.vertices[part.mesh.faces], mesh.faces[part.faces])
        height = mesh.verts[mesh.faces].mean(axis=1)[:, 2]
        gone = np.setdiff1d(np.arange(len(mesh.faces)), part.faces)
        assert len(gone) == 0 or height[gone].max() <= height[part.faces].min()
        assert area(mesh, part.faces) == pytest.approx((1 - share) * area(mesh), abs=0.02 * area(mesh))
    assert_sound(precompute(part.mesh, k=K), K)


def area(mesh: Mesh, faces: Any = slice(None)) -> float:
    return float(trimesh.Trimesh(mesh.verts, mesh.faces[faces], process=False).area)


def test_cuts_of_point_clouds_and_of_a_single_face() -> None:
    cloud = shapes()[2]
    part = cut_by_plane(cloud, [1, 0, 0], 0.25)
    assert len(part.vertices) == pytest.approx(0.75 * len(cloud.verts), abs=1)
    assert cloud.verts[part.vertices, 0].max() <= np.delete(cloud.verts[:, 0], part.vertices).min()
    assert part.mesh.is_point_cloud
    triangle = make_mesh(np.eye(3), [[0, 1, 2]])
    assert len(cut_by_plane(triangle, [1, 1, 1], 0.99).faces) == 1


def test_cuts_keep_normals() -> None:
    mesh = make_mesh(shapes()[0].verts, shapes()[0].faces, normals=shapes()[0].verts)
    part = cut_by_plane(mesh, [0, 1, 0], 0.4)
    assert mesh.normals is not None
    assert np.array_equal(part.mesh.normals, mesh.normals[part.vertices])


@pytest.mark.parametrize(
    ("direction", "share", "message"),
    [
        ([0, 0, 0], 0.5, "direction should be three finite numbers, not all 0"),
        ([1, 0], 0.5, "direction should be three finite numbers"),
        ([1, 0, 0], 1.0, r"share should be at least 0 and below 1, got 1\.0"),
    ],
)
def test_cuts_that_cannot_be_made(direction: list[float], share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_by_plane(shapes()[0], direction, share)
