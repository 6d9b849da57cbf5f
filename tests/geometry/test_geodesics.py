"""Geodesic errors of vertices and of points in faces, their curve, and closest points."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from refusals import refused
from scipy.integrate import trapezoid
from shapes import TETRAHEDRON, arrays, cloud_of, ellipsoid, moebius, soup

from diffnet.geometry import (
    MeshError,
    SurfacePoints,
    area_under_curve,
    closest_points,
    error_curve,
    geodesic_errors,
    geodesic_errors_of_all,
    geodesic_label_errors,
    make_mesh,
    mean_error,
)
from diffnet.geometry.geodesics import errors as errors_module
from diffnet.geometry.geodesics.errors import path_solver
from diffnet.geometry.positions import closest as closest_module

pytestmark = pytest.mark.usefixtures("one_thread")


def is_manifold(faces: np.ndarray) -> bool:
    verts = np.random.default_rng(0).standard_normal((faces.max() + 1, 3))
    return path_solver(verts, np.ascontiguousarray(faces)) is not None


def sphere_case(subdivisions: int, count: int = 40) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """A unit sphere, pairs of vertices that are close or far, and their distances along the sphere."""
    mesh = trimesh.creation.icosphere(subdivisions)
    rng = np.random.default_rng(0)
    predicted, labels = rng.integers(0, len(mesh.vertices), (2, count))
    labels[: count // 2] = [mesh.vertex_neighbors[i][0] for i in predicted[: count // 2]]
    cosines = (mesh.vertices[predicted] * mesh.vertices[labels]).sum(1)
    return mesh, predicted, labels, np.arccos(np.clip(cosines, -1, 1))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_errors_on_a_sphere(scale: float) -> None:
    mesh, predicted, labels, distances = sphere_case(3)
    found = geodesic_label_errors((scale * mesh.vertices, mesh.faces), torch.from_numpy(predicted), labels)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, distances / np.sqrt(mesh.area), rtol=0.01, atol=1e-9)


def test_unknown_labels_and_other_components() -> None:
    verts, faces = TETRAHEDRON
    two = np.concatenate([verts, verts + 5, [[9, 9, 9]]]), np.concatenate([faces, faces + 4])
    predicted, labels = [0, 0, 0, 4, 8, 8], [1, -1, 4, 5, 8, 0]
    found = geodesic_label_errors(two, predicted, labels)
    area = 2 * trimesh.Trimesh(verts, faces, process=False).area
    expected = np.array([1, np.nan, np.inf * area, 1, 0, np.inf]) / np.sqrt(area)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert float(geodesic_label_errors(two, predicted[:2], labels[:2]).nanmean()) == pytest.approx(area**-0.5)
    assert geodesic_label_errors(two, [], []).shape == (0,)


@pytest.mark.parametrize("kind", ["fin", "cloud"])
def test_the_heat_method_elsewhere(kind: str) -> None:
    """On meshes that are not manifold, and on point clouds."""
    mesh, predicted, labels, distances = sphere_case(3)
    predicted, labels, distances = (x[20:] for x in (predicted, labels, distances))  # pairs that are far
    if kind == "cloud":
        source, area = cloud_of(mesh), 4 * np.pi
    else:
        verts, faces = arrays(mesh)
        more = np.concatenate([verts, 1.01 * verts[faces[0, :1]]])
        fin = more, np.concatenate([faces, [[*faces[0, :2], len(verts)]]])
        source, area = fin, trimesh.Trimesh(*fin, process=False).area
        assert not is_manifold(fin[1])
    found = geodesic_label_errors(source, predicted, labels).numpy() * np.sqrt(area)
    assert np.abs(found - distances).mean() < (0.1 if kind == "cloud" else 0.04) * distances.mean()


def test_vertices_at_one_position_are_joined() -> None:
    """In a triangle soup, as `precompute` joins them."""
    mesh, predicted, labels, _ = sphere_case(2)
    verts, faces = arrays(mesh)
    _, corner = np.unique(faces, return_index=True)  # a corner at each vertex
    found = geodesic_label_errors(soup((verts, faces)), corner[predicted], corner[labels])
    torch.testing.assert_close(found, geodesic_label_errors(mesh, predicted, labels))


def test_distances_are_at_least_straight_lines() -> None:
    """On a mesh with a face of zero area, which only the heat method takes."""
    mesh, predicted, labels, _ = sphere_case(2)
    verts, faces = arrays(mesh)
    middle = verts[faces[0, :2]].mean(0)
    flat = np.concatenate([verts, middle[None]]), np.concatenate([faces, [[faces[0, 1], faces[0, 0], len(verts)]]])
    found = geodesic_label_errors(flat, predicted, labels).numpy() * np.sqrt(mesh.area)
    lines = np.linalg.norm(verts[predicted] - verts[labels], axis=1)
    assert (found >= lines * (1 - 1e-9)).all()
    assert (found <= 1.5 * lines + 0.2).all()


def test_manifolds() -> None:
    _, faces = arrays(trimesh.creation.icosphere(1))
    assert is_manifold(faces)
    assert is_manifold(faces[1:])
    assert not is_manifold(np.concatenate([faces, faces[:1]]))  # a face twice
    assert not is_manifold(np.concatenate([faces[1:], faces[:1, ::-1]]))  # a flipped face
    assert not is_manifold(moebius()[1])  # no orientation
    verts, corners = TETRAHEDRON
    touching = np.where(corners == 0, 0, corners + 3)
    assert not is_manifold(np.concatenate([corners, touching]))  # two tetrahedra that share vertex 0
    assert is_manifold(np.concatenate([corners, corners + len(verts)]))


@pytest.mark.parametrize(
    ("predicted", "labels", "error", "words"),
    [
        ([0, 4], [0, 1], IndexError, "from 0 to 3, got 4"),
        ([0, -1], [0, 1], IndexError, "from 0 to 3, got -1"),
        ([0.0], [0], TypeError, "predicted should be integers, got float64"),
        ([0], [[0]], ValueError, r"labels should have shape \(N,\), shape is \(1, 1\)"),
        ([0, 1], [0], ValueError, r"one length, got 2 and 1"),
    ],
)
def test_wrong_indices_and_a_surface_without_area(predicted: Any, labels: Any, error: Any, words: str) -> None:
    refused(error, words, geodesic_label_errors, TETRAHEDRON, predicted, labels)
    line = [[0, 0, 0], [1, 0, 0], [2, 0, 0]], [[0, 1, 2]]
    refused(MeshError, "no area", geodesic_label_errors, line, [0], [1])


def random_points(mesh_faces: np.ndarray, count: int, seed: int = 0) -> SurfacePoints:
    rng = np.random.default_rng(seed)
    return SurfacePoints(rng.integers(0, len(mesh_faces), count), rng.dirichlet((1, 1, 1), count))


def test_points_in_a_plane(plane: tuple[np.ndarray, np.ndarray]) -> None:
    """Distances are straight lines, also for the vertices of the face and those next to it."""
    verts, faces = plane
    points = random_points(faces, 400)
    places = points.interpolate(faces, verts)
    near = np.linalg.norm(verts - verts.mean(0), axis=1) < 4  # the lines between these don't leave the mesh
    predicted = np.random.default_rng(1).choice(np.flatnonzero(near), 400)
    predicted[:100] = faces[points.faces[:100], 0]
    inside = np.linalg.norm(places - verts.mean(0), axis=1) < 3
    area = trimesh.Trimesh(verts, faces, process=False).area
    expected = np.linalg.norm(places - verts[predicted], axis=1) / np.sqrt(area)
    found = geodesic_errors((verts, faces), predicted, points)
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-6)
    assert inside.sum() > 50


def test_points_agree_with_vertices_at_corners() -> None:
    mesh = ellipsoid(1, 2)
    rng = np.random.default_rng(0)
    chosen, corner = rng.integers(0, len(mesh.faces), 50), rng.integers(0, 3, 50)
    predicted = rng.integers(0, len(mesh.verts), 50)
    at_corners = geodesic_errors(mesh, predicted, SurfacePoints(chosen, np.eye(3)[corner]))
    at_vertices = geodesic_errors(mesh, predicted, mesh.faces[chosen, corner])
    np.testing.assert_allclose(at_corners, at_vertices, rtol=1e-9, atol=1e-12)


def test_unknown_points_and_other_components() -> None:
    ball = trimesh.creation.icosphere(1)
    verts, faces = np.concatenate([ball.vertices, ball.vertices + 5]), np.concatenate([ball.faces, ball.faces + 42])
    truth = SurfacePoints(np.array([0, -1, 80]), np.array([[1, 0, 0], [0, 0, 0], [0.5, 0.5, 0]]))
    found = geodesic_errors((verts, faces), [faces[0, 0], 0, 0], truth)
    np.testing.assert_array_equal(found, [0, np.nan, np.inf])


@pytest.mark.parametrize(
    ("truth", "error", "words"),
    [
        (SurfacePoints(np.array([80]), np.array([[1, 0, 0]])), ValueError, "faces should be from 0 to 79, .* got 80"),
        (SurfacePoints(np.array([0]), np.array([[1, 1, 0]])), ValueError, r"weights should be .* got \[1, 1, 0\]"),
        (SurfacePoints(np.array([0.0]), np.array([[1, 0, 0]])), TypeError, "faces should be integers, got float64"),
        (SurfacePoints(np.array([0]), np.array([1, 0, 0])), ValueError, r"shapes are \(1,\) and \(3,\)"),
        ([0, 1], ValueError, "one length, got 1 and 2"),
    ],
)
def test_wrong_truth(truth: object, error: type[Exception], words: str) -> None:
    ball = trimesh.creation.icosphere(1)
    refused(error, words, geodesic_errors, ball, [0], truth)
    with pytest.raises(MeshError, match="points: a point cloud has no faces"):
        geodesic_errors(ball.vertices, [0], SurfacePoints(np.array([0]), np.eye(3)[:1]))


def cases(count: int) -> list[tuple[object, np.ndarray, object]]:
    """Predictions for three meshes, two for each, to vertices and to points."""
    rng = np.random.default_rng(2)
    found = []
    for seed in range(3):
        mesh = ellipsoid(seed, 2)
        predicted, labels = rng.integers(0, len(mesh.verts), (2, count))
        found += [(mesh, predicted, labels), (mesh, predicted[::-1], random_points(mesh.faces, count, seed))]
    return found


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances are computed once, and entries grow."""
    few, more = cases(20), cases(30)
    expected = [geodesic_errors(*case) for case in few]
    assert all(map(np.array_equal, geodesic_errors_of_all(few, cache_dir=tmp_path, jobs=1), expected))
    whole = geodesic_errors_of_all(more, cache_dir=tmp_path, jobs=1)
    assert all(map(np.array_equal, whole, [geodesic_errors(*case) for case in more]))

    def refuse(mesh: object, same: object, keys: np.ndarray) -> np.ndarray:
        assert len(keys) == 0
        return np.zeros(0)

    monkeypatch.setattr(errors_module, "keyed_distances", refuse)
    for questions, found in ((few, expected), (more, whole)):
        assert all(map(np.array_equal, geodesic_errors_of_all(questions, cache_dir=tmp_path, jobs=1), found))


def test_a_damaged_entry_is_computed_again(tmp_path: Path) -> None:
    case = cases(20)[0]
    expected = geodesic_errors(*case, cache_dir=tmp_path)
    (entry,) = tmp_path.rglob("*.geodesics.safetensors")
    content = bytearray(entry.read_bytes())
    content[-3] ^= 1
    entry.write_bytes(content)
    with pytest.warns(UserWarning, match="checksum"):
        np.testing.assert_array_equal(geodesic_errors(*case, cache_dir=tmp_path), expected)


def test_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors_module, "MIN_FOR_PROCESSES", 1)
    monkeypatch.setattr(errors_module, "PAIRS_OF_CALL", 70)
    meshes = itertools.count()
    questions = cases(40)
    found = geodesic_errors_of_all(questions, jobs=2, advance=lambda: next(meshes))
    assert next(meshes) == 3
    assert all(map(np.array_equal, found, [geodesic_errors(*case) for case in questions]))


def test_the_curve_and_its_area() -> None:
    errors = np.random.default_rng(0).uniform(0, 1, 1000)
    thresholds = np.linspace(0, 0.5, 11)
    curve = error_curve(np.append(errors, np.nan), thresholds)
    np.testing.assert_array_equal(curve, [(errors <= t).mean() for t in thresholds])
    assert area_under_curve(errors, thresholds) == pytest.approx(trapezoid(curve, thresholds) / 0.5)
    assert area_under_curve(np.zeros(3)) == 1
    assert area_under_curve(np.full(3, np.inf)) == 0
    for function in (error_curve, area_under_curve, mean_error):
        refused(ValueError, "at least one known error, got 1 values", function, [np.nan])
    refused(ValueError, "at least 2 ascending", area_under_curve, errors, [0.1])


@pytest.mark.parametrize("stretch", [1.0, 30.0])
def test_closest_points(stretch: float) -> None:
    """Against a dense sampling of every triangle, with triangles of one size and of many."""
    mesh = ellipsoid(0, 2)
    mesh = make_mesh(mesh.verts * np.where(mesh.verts[:, :1] > 0.5, stretch, 1), mesh.faces)
    rng = np.random.default_rng(0)
    given = mesh.verts[rng.integers(0, len(mesh.verts), 30)] + 0.2 * rng.normal(size=(30, 3))
    points = closest_points(mesh, given)
    points.check(mesh)
    found = np.linalg.norm(points.interpolate(mesh.faces, mesh.verts) - given, axis=1)
    grid = np.array([(i, j, 10 - i - j) for i in range(11) for j in range(11 - i)]) / 10
    samples = np.einsum("sk,fkx->fsx", grid, mesh.verts[mesh.faces]).reshape(-1, 3)
    sampled = np.linalg.norm(samples[None] - given[:, None], axis=2).min(axis=1)
    assert (found <= sampled + 1e-12).all()
    spacing = np.linalg.norm(np.diff(mesh.verts[mesh.faces[:, [0, 1, 2, 0]]], axis=1), axis=2).max() / 10
    assert (found >= sampled - spacing).all()
    np.testing.assert_allclose(closest_points(mesh, mesh.verts).interpolate(mesh.faces, mesh.verts), mesh.verts)


def test_closest_points_of_a_triangle() -> None:
    """Inside, beyond a side and beyond a corner."""
    triangle = make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]])
    points = closest_points(triangle, [[0.2, 0.3, 5], [0.5, -2, 0], [1, 1, 1], [-1, -1, 0], [3, 0.5, 0]])
    expected = [[0.2, 0.3, 0], [0.5, 0, 0], [0.5, 0.5, 0], [0, 0, 0], [1, 0, 0]]
    np.testing.assert_allclose(points.interpolate(triangle.faces, triangle.verts), expected, atol=1e-12)
    refused(ValueError, r"shape is \(3,\)", closest_points, triangle, [0, 0, 0])
    refused(ValueError, "finite in single precision, got 1e[+]200", closest_points, triangle, [[1e200, 0, 0]])
    refused(ValueError, "finite in single precision, got nan", closest_points, triangle, [[np.nan, 0, 0]])
    refused(MeshError, "no faces", closest_points, make_mesh([[0, 0, 0]], None), [[0, 0, 0]])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 31])
def test_closest_points_of_few_faces(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each face alone. Few pairs at once give the same distances, as do no points at all."""
    rng = np.random.default_rng(count)
    mesh = make_mesh(rng.normal(size=(3 * count, 3)), np.arange(3 * count).reshape(-1, 3))
    given = 2 * rng.normal(size=(40, 3))

    def distances(faces: np.ndarray) -> np.ndarray:
        one = make_mesh(mesh.verts, faces)
        return np.linalg.norm(closest_points(one, given).interpolate(faces, mesh.verts) - given, axis=1)

    expected = np.min([distances(face[None]) for face in mesh.faces], axis=0)
    np.testing.assert_allclose(distances(mesh.faces), expected, rtol=1e-12)
    monkeypatch.setattr(closest_module, "MAX_PAIRS", 3)
    np.testing.assert_allclose(distances(mesh.faces), expected, rtol=1e-12)
    assert len(closest_points(mesh, np.zeros((0, 3)))) == 0


@pytest.mark.parametrize("height", [0, 1e-15, 1e-11, 1e-7, 1e-4])
def test_closest_points_of_a_thin_triangle(height: float) -> None:
    """They are those of its longest side, up to its height."""
    triangle = make_mesh([[0, 0, 0], [1, 0, 0], [0.3, height, 0]], [[0, 1, 2]])
    given = np.random.default_rng(0).normal(size=(200, 3))
    points = closest_points(triangle, given)
    points.check(triangle)
    found = np.linalg.norm(points.interpolate(triangle.faces, triangle.verts) - given, axis=1)
    on_side = np.clip(given[:, :1], 0, 1) * [1, 0, 0]
    np.testing.assert_allclose(found, np.linalg.norm(on_side - given, axis=1), rtol=0, atol=height + 1e-12)
