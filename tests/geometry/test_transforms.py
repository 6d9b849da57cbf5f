"""Random rotations, farthest points, and transforms, cuts and decimation of meshes and operators."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_sound, gradient, matrix, relative
from refusals import refused

from diffnet.geometry import (
    Mesh,
    Operators,
    closest_points,
    collate,
    curvature,
    cut_by_plane,
    decimate,
    farthest_points,
    hks,
    make_mesh,
    mirrored,
    precompute,
    random_rotation,
    random_rotations,
    rotated,
    scaled,
    wks,
)
from diffnet.geometry.augmentation.reduction import cut_holes, cut_to_view, largest_component

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def seeded(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_each_mesh_has_its_own_rotation(dtype: torch.dtype, device: str) -> None:
    points = torch.randn(60, 3, generator=seeded(0), dtype=torch.float64).to(device, dtype)
    lengths = (10, 0, 30, 20)
    turned = random_rotation(points, lengths, seeded(1))
    assert (turned.dtype, turned.device) == (points.dtype, points.device)
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    found = []
    for x, y in zip(points.split(lengths), turned.split(lengths), strict=True):
        if len(x):
            rotation = np.linalg.lstsq(x.double().cpu().numpy(), y.double().cpu().numpy(), rcond=None)[0]
            np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=4 * tolerance)
            assert np.linalg.det(rotation) == pytest.approx(1, abs=8 * tolerance)
            found.append(rotation)
    assert all(np.abs(a - b).max() > 0.1 for i, a in enumerate(found) for b in found[:i])
    again = random_rotation(points, lengths, seeded(1))
    assert torch.equal(turned, again)
    expected = random_rotations(4, seeded(1), torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(turned[:10], (points[:10].to(expected) @ expected[0]).to(points), rtol=0, atol=tolerance)


def test_rotations_are_uniform() -> None:
    """Where a fixed axis goes is uniform on the sphere, and the angle has the density (1 − cos θ) / π."""
    rotations = random_rotations(20_000, seeded(0)).double()
    assert rotations.mean(0).abs().max() < 0.02
    second = torch.einsum("nij,nkl->ijkl", rotations, rotations) / len(rotations)
    expected = torch.einsum("ik,jl->ijkl", torch.eye(3), torch.eye(3)).double() / 3
    assert (second - expected).abs().max() < 0.02
    cosine = (rotations.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
    angle = torch.arccos(cosine.clamp(-1, 1)).sort().values
    share = (angle - torch.sin(angle)) / torch.pi
    assert (share - torch.linspace(0, 1, len(share))).abs().max() < 0.02  # Kolmogorov and Smirnov's distance


@pytest.mark.parametrize("axis", range(3))
def test_rotations_about_an_axis(axis: int) -> None:
    rotations = random_rotations(5000, seeded(0), torch.float64, axis=axis)
    torch.testing.assert_close(rotations @ rotations.mT, torch.eye(3, dtype=torch.float64).expand(5000, 3, 3))
    torch.testing.assert_close(torch.linalg.det(rotations), torch.ones(5000, dtype=torch.float64))
    assert torch.equal(rotations[:, axis], torch.eye(3, dtype=torch.float64)[axis].expand(5000, 3))
    others = [i for i in range(3) if i != axis]
    angle = torch.atan2(rotations[:, others[0], others[1]], rotations[:, others[0], others[0]]).sort().values
    uniform = torch.linspace(-torch.pi, torch.pi, 5000, dtype=torch.float64)
    assert (angle - uniform).abs().max() < 0.03 * 2 * torch.pi
    points = torch.randn(4, 3, generator=seeded(1))
    assert torch.equal(random_rotation(points, generator=seeded(2), axis=axis)[:, axis], points[:, axis])
    refused(ValueError, "axis should be 0, 1, 2 or None, got 3", random_rotations, 2, axis=3)


def test_rotations_use_the_given_generator_only() -> None:
    points = torch.eye(3)
    state = torch.get_rng_state()
    first = random_rotation(points, generator=seeded(3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert torch.equal(random_rotation(points), first)
    generator = seeded(3)
    assert torch.equal(random_rotation(points, generator=generator), first)
    assert not torch.equal(random_rotation(points, generator=generator), first)
    points.requires_grad_()
    (grad,) = torch.autograd.grad(random_rotation(points, generator=seeded(3)).square().sum(), points)
    torch.testing.assert_close(grad, 2 * points.detach())  # rotations keep lengths


def test_positions_that_cannot_be_rotated() -> None:
    refused(ValueError, r"\(V, 3\), shape is \(4, 2\)", random_rotation, torch.zeros(4, 2))
    refused(ValueError, r"add up to the 4 rows of verts, got \[2, 3\]", random_rotation, torch.zeros(4, 3), [2, 3])
    for call in (random_rotation, lambda points, lengths: farthest_points(points, 1, lengths)):
        refused(ValueError, r"lengths\[0\] should be at least 0, got -1", call, torch.zeros(4, 3), [-1, 5])
        refused(TypeError, r"lengths\[0\] should be an integer, got 1\.5", call, torch.zeros(4, 3), [1.5, 2.5])
    refused(ValueError, "count should be at least 0, got -1", random_rotations, -1)
    refused(TypeError, "verts should be a tensor, got ndarray", random_rotation, np.zeros((4, 3)))
    assert random_rotation(torch.zeros(0, 3), []).shape == (0, 3)


# ---- farthest points ----


def farthest_by_loop(x: np.ndarray, count: int, start: int) -> list[int]:
    chosen = [start]
    while len(chosen) < count:
        distance = np.min([((x - x[i]) ** 2).sum(1) for i in chosen], axis=0)
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
    return chosen


@DEVICES
def test_farthest_points_against_a_loop(device: str) -> None:
    lengths = (40, 7, 25)
    x = torch.randn(72, 3, generator=seeded(0), dtype=torch.float64)
    found = farthest_points(x.to(device), 7, lengths)
    assert (found.dtype, found.device.type) == (torch.int64, device)
    for points, chosen, first in zip(x.split(lengths), found.cpu(), (0, 40, 47), strict=True):
        p = points.numpy()
        start = int(((p - p.mean(0)) ** 2).sum(1).argmax())
        assert (chosen - first).tolist() == farthest_by_loop(p, 7, start)
    assert sorted(found[1].tolist()) == list(range(40, 47))
    drawn = farthest_points(x.to(device), 5, lengths, generator=seeded(2)).cpu()
    for points, chosen, first in zip(x.split(lengths), drawn, (0, 40, 47), strict=True):
        assert (chosen - first).tolist() == farthest_by_loop(points.numpy(), 5, int(chosen[0]) - first)
    assert torch.equal(drawn, farthest_points(x.to(device), 5, lengths, generator=seeded(2)).cpu())
    starts = {tuple(farthest_points(x, 1, lengths, generator=seeded(i))[:, 0].tolist()) for i in range(8)}
    assert len(starts) > 4


@DEVICES
def test_no_point_is_chosen_twice(device: str) -> None:
    """Also if points coincide, and if the meshes have different sizes."""
    x = torch.zeros(9, 3, device=device, dtype=torch.float16)
    x[4:] += 1
    assert farthest_points(x, 4, (4, 5)).sort().values.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert farthest_points(torch.zeros(0, 3, device=device), 2, ()).shape == (0, 2)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e38])
def test_farthest_points_of_any_size(scale: float) -> None:
    """Squares of these distances underflow or overflow."""
    points = torch.rand(200, 3, generator=seeded(0))
    assert torch.equal(farthest_points(points * scale, 20), farthest_points(points, 20))


def test_farthest_points_cover_a_sphere() -> None:
    verts = torch.from_numpy(trimesh.creation.icosphere(3).vertices)
    chosen = verts[farthest_points(verts, 50)[0]]
    # 50 caps that cover the sphere have a mean radius of about 0.3; those of random points leave larger gaps.
    assert torch.cdist(verts, chosen).amin(1).max() < 0.45


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(3, 3), 4), ValueError, r"at least count = 4 points, lengths are \[3\]"),
        ((torch.zeros(3, 3), 0), ValueError, "count should be at least 1, got 0"),
        ((torch.zeros(3, 3), 1.0), TypeError, "count should be an integer"),
        ((torch.zeros(3), 1), ValueError, r"\(V, N\), shape is \(3,\)"),
        ((torch.zeros(3, 3), 1, [2]), ValueError, r"add up to the 3 rows of positions, got \[2\]"),
        ((torch.tensor([[0.0], [torch.nan]]), 1), ValueError, r"positions should be finite, got nan at index \[1, 0\]"),
        ((torch.zeros(3, 0), 1), ValueError, r"at least one column, shape is \(3, 0\)"),
        ((torch.zeros(3, 3, dtype=torch.int64), 1), TypeError, "positions should be floating point"),
    ],
)
def test_positions_without_farthest_points(arguments: Any, error: type[Exception], words: str) -> None:
    refused(error, words, farthest_points, *arguments)


# ---- transforms of operators agree with the operators of the transformed meshes ----


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
    refused(error, message, function, batch(), argument)
    refused(ValueError, "axis should be 0, 1 or 2, got 3", mirrored, batch(), axis=3)


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
    values = [expected.mass, expected.evals, expected.evecs, expected.frames, expected.gradient.values]
    for a, b in zip(read, values, strict=True):
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


def test_cuts_of_point_clouds_of_a_single_face_and_of_normals() -> None:
    cloud = shapes()[2]
    part = cut_by_plane(cloud, [1, 0, 0], 0.25)
    assert len(part.vertices) == pytest.approx(0.75 * len(cloud.verts), abs=1)
    assert cloud.verts[part.vertices, 0].max() <= np.delete(cloud.verts[:, 0], part.vertices).min()
    assert part.mesh.is_point_cloud
    triangle = make_mesh(np.eye(3), [[0, 1, 2]])
    assert len(cut_by_plane(triangle, [1, 1, 1], 0.99).faces) == 1
    mesh = make_mesh(shapes()[0].verts, shapes()[0].faces, normals=shapes()[0].verts)
    part = cut_by_plane(mesh, [0, 1, 0], 0.4)
    assert np.array_equal(part.mesh.normals, mesh.normals[part.vertices])


def test_no_share_cuts_no_face() -> None:
    """The last face has no area."""
    verts = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [5, 0, 0], [5, 1, 0], [5, 2, 0]]
    assert cut_by_plane(make_mesh(verts, [[0, 1, 2], [3, 4, 5]]), [1, 0, 0], 0).faces.tolist() == [0, 1]


def test_decimation_does_not_depend_on_the_unit_of_length() -> None:
    ball = trimesh.creation.icosphere(4)
    verts = ball.vertices * [1, 0.7, 0.5]
    first = decimate(make_mesh(verts, ball.faces), 500)
    for unit in (1e-3, 1e3, 1e6):
        mesh = decimate(make_mesh(verts * unit, ball.faces), 500)
        assert len(mesh.faces) == 500
        np.testing.assert_allclose(np.sort(mesh.verts / unit, axis=0), np.sort(first.verts, axis=0), atol=0.02)
    corners = first.verts[first.faces]
    points = closest_points(first, verts).interpolate(first.faces, first.verts)
    assert corners.shape == (500, 3, 3)
    assert np.sqrt(((points - verts) ** 2).sum(1).mean()) < 0.0033  # the library alone, in these units: 0.0037
    ball = trimesh.creation.icosphere(6)
    assert len(decimate(make_mesh(ball.vertices, ball.faces), 4).faces) == 4


def test_holes_and_views_remove_the_share_of_the_area() -> None:
    ball = trimesh.creation.icosphere(4)
    mesh = make_mesh(ball.vertices, ball.faces)
    centers = mesh.verts[mesh.faces].mean(axis=1)
    holes = cut_holes(mesh, [0, 7], 0.4)
    gone = np.setdiff1d(np.arange(len(mesh.faces)), holes.faces)
    away = [
        np.linalg.norm(centers[faces][:, None] - mesh.verts[[0, 7]], axis=2).min(axis=1)
        for faces in (gone, holes.faces)
    ]
    assert away[0].max() < 1.15 * away[1].min()  # shortest paths along edges are up to 15 % longer
    view = cut_to_view(mesh, [0, 0, 2.0], 0.5)
    assert centers[view.faces, 2].min() > -0.2  # the half that the camera doesn't see is gone
    for part, share in ((holes, 0.4), (view, 0.5), (cut_to_view(mesh, [0, 0, 2.0], 0.7), 0.7)):
        assert np.array_equal(part.vertices[part.mesh.faces], mesh.faces[part.faces])
        assert area(mesh, part.faces) == pytest.approx((1 - share) * area(mesh), abs=0.01 * area(mesh))
    assert len(largest_component(cut_holes(mesh, [0, 7], 0.1)).faces) == pytest.approx(0.9 * len(mesh.faces), rel=0.02)
    band = cut_by_plane(mesh, [1, 0, 0], 0.1)
    two = make_mesh(
        np.concatenate([mesh.verts, band.mesh.verts + 5]), np.concatenate([band.mesh.faces + 2562, mesh.faces])
    )
    largest = largest_component(cut_by_plane(two, [1, 0, 0], 0.0))
    assert np.array_equal(largest.vertices, np.arange(2562))
    assert np.array_equal(largest.faces, len(band.faces) + np.arange(len(mesh.faces)))
    refused(ValueError, "centers should be vertices from 0 to 2561", cut_holes, mesh, [2562], 0.4)
    refused(ValueError, "a point cloud has no faces to remove", cut_to_view, shapes()[2], [0, 0, 1], 0.4)


@pytest.mark.parametrize(
    ("direction", "share", "message"),
    [
        ([0, 0, 0], 0.5, "direction should be three finite numbers, not all 0"),
        ([1, 0], 0.5, "direction should be three finite numbers"),
        ([1, 0, 0], 1.0, r"share should be at least 0 and below 1, got 1\.0"),
    ],
)
def test_cuts_that_cannot_be_made(direction: list[float], share: float, message: str) -> None:
    refused(ValueError, message, cut_by_plane, shapes()[0], direction, share)
