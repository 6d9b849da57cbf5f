"""Geodesic errors of predicted vertices, against distances that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from shapes import TETRAHEDRON, arrays, cloud_of, moebius

from diffnet.geometry import MeshError, geodesic_label_errors
from diffnet.geometry.geodesics.manifold import is_manifold

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_errors_on_a_plane(plane: tuple[np.ndarray, np.ndarray]) -> None:
    """Straight lines inside of the square, in a mesh with a boundary."""
    verts, faces = plane
    labels, predicted = np.random.default_rng(0).choice(len(verts), (2, 60))
    inside = np.linalg.norm(verts - verts.mean(0), axis=1) < 4  # the lines between these don't leave the mesh
    labels, predicted = (x[inside[labels] & inside[predicted]] for x in (labels, predicted))
    assert len(labels) > 10
    area = trimesh.Trimesh(verts, faces, process=False).area
    expected = np.linalg.norm(verts[labels] - verts[predicted], axis=1) / np.sqrt(area)
    np.testing.assert_allclose(geodesic_label_errors((verts, faces), predicted, labels), expected, rtol=1e-6)


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
        fin = (
            np.concatenate([verts, 1.01 * verts[faces[0, :1]]]),
            np.concatenate([faces, [[*faces[0, :2], len(verts)]]]),
        )
        source, area = fin, trimesh.Trimesh(*fin, process=False).area
        assert not is_manifold(fin[1])
    found = geodesic_label_errors(source, predicted, labels).numpy() * np.sqrt(area)
    assert np.abs(found - distances).mean() < (0.1 if kind == "cloud" else 0.04) * distances.mean()


def test_vertices_at_one_position_are_joined() -> None:
    """In a triangle soup, as `precompute` joins them."""
    mesh, predicted, labels, _ = sphere_case(2)
    verts, faces = arrays(mesh)
    corner = np.argsort(faces.reshape(-1), kind="stable")
    corner = corner[np.searchsorted(faces.reshape(-1)[corner], np.arange(len(verts)))]  # a corner at each vertex
    soup = verts[faces].reshape(-1, 3), np.arange(3 * len(faces)).reshape(-1, 3)
    found = geodesic_label_errors(soup, corner[predicted], corner[labels])
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
def test_wrong_indices(predicted: Any, labels: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        geodesic_label_errors(TETRAHEDRON, predicted, labels)


def test_a_surface_without_area() -> None:
    line = [[0, 0, 0], [1, 0, 0], [2, 0, 0]], [[0, 1, 2]]
    with pytest.raises(MeshError, match="no area"):
        geodesic_label_errors(line, [0], [1])
