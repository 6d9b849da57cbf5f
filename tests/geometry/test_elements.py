"""Areas, borders and boundaries of vertices, edges and faces; instances of labels; decimated meshes; nearest points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import trimesh
from refusals import refused
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from shapes import soup

from diffnet.data import labels_at
from diffnet.geometry import (
    ElementsAt,
    Mesh,
    MeshError,
    border_lengths,
    closest_points,
    decimate,
    edges_of_faces,
    element_areas,
    element_points,
    element_weights,
    label_instances,
    load_mesh,
    make_mesh,
    mesh_edges,
    smooth_boundaries,
)
from diffnet.geometry.mesh.mesh import store_mesh

AT = pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
QUAD = load_mesh((np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]), np.array([[0, 1, 2, 3]])))
BALL = load_mesh(trimesh.creation.icosphere(3))


@AT
def test_areas_and_points(at: str) -> None:
    areas = element_areas(BALL, at)
    assert areas.sum() == pytest.approx(trimesh.creation.icosphere(3).area)
    assert element_points(BALL, at).shape == (len(areas), 3)
    np.testing.assert_allclose(areas @ element_points(BALL, at), 0, atol=1e-12)


def test_borders_of_a_square() -> None:
    square = make_mesh([[0, 0, 0], [3, 0, 0], [3, 3, 0], [0, 3, 0], [9, 9, 9]], [[0, 1, 2], [0, 2, 3]])
    np.testing.assert_allclose(border_lengths(square, "faces").toarray(), [[0, 18**0.5], [18**0.5, 0]])
    borders = border_lengths(square, "vertices").toarray()
    np.testing.assert_array_equal(borders, borders.T)
    # Vertices 0 and 2 are neighbors in both faces, 0 and 1 in the first alone, and 1 and 3 in none.
    assert borders[0, 2] == pytest.approx(2 * np.hypot(0.5, 0.5))
    assert borders[0, 1] == pytest.approx(np.hypot(0.5, 1))
    assert borders[1, 3] == 0
    assert not borders[4].any()
    edges = mesh_edges(square.faces).tolist()
    borders = border_lengths(square, "edges").toarray()
    # The sides 0-1 and 1-2 meet at vertex 1, and the center of the face is (2, 1).
    assert borders[edges.index([0, 1]), edges.index([1, 2])] == pytest.approx(np.hypot(1, 1))
    assert borders[edges.index([0, 1]), edges.index([0, 3])] == 0


@AT
def test_noisy_labels_become_smooth(at: str) -> None:
    rng = np.random.default_rng(0)
    height = element_points(BALL, at)[:, 2]
    truth = (height > 0.1).astype(np.int64) + (height > 0.6)
    logits = np.eye(3)[truth] * 1.5 + rng.normal(size=(len(truth), 3))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    likely = smooth_boundaries(BALL, shares, at=at, weight=0)
    np.testing.assert_array_equal(likely, shares.argmax(axis=1))
    assert (likely == truth).mean() < 0.8

    def boundary(labels: np.ndarray) -> float:
        borders = border_lengths(BALL, at).tocoo()
        return borders.data[labels[borders.row] != labels[borders.col]].sum()

    lengths = [boundary(smooth_boundaries(BALL, shares, at=at, weight=weight)) for weight in (0, 0.5, 1, 2)]
    assert lengths == sorted(lengths, reverse=True)
    smooth = smooth_boundaries(BALL, shares, at=at, weight=2)
    assert (smooth == truth).mean() > 0.95
    np.testing.assert_array_equal(smooth, smooth_boundaries(BALL, shares, at=at, weight=2))
    tiny = make_mesh(BALL.verts * 1e-3, BALL.faces)
    np.testing.assert_array_equal(smooth, smooth_boundaries(tiny, shares, at=at, weight=2))


def test_sure_labels_and_lone_vertices_stay() -> None:
    mesh = make_mesh(np.concatenate([BALL.verts, [[5, 5, 5]]]), BALL.faces)
    shares = np.eye(2)[(mesh.verts[:, 2] > 0).astype(int)]
    shares[-1] = [0.4, 0.6]
    np.testing.assert_array_equal(smooth_boundaries(mesh, shares, weight=0.5), shares.argmax(axis=1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"probabilities": np.ones((3, 2))},
            ValueError,
            r"\(642, C\), one row for each of vertices, shape is \(3, 2\)",
        ),
        ({"probabilities": -np.ones((642, 2))}, ValueError, "finite and at least 0"),
        ({"weight": np.nan}, ValueError, r"weight should be from 0 to 1e\+30, got nan"),
        ({"weight": 1e31}, ValueError, r"weight should be from 0 to 1e\+30, got 1e\+31"),
        ({"mesh": load_mesh(BALL.verts)}, MeshError, "a point cloud has no boundaries"),
        ({"mesh": QUAD, "at": "edges"}, MeshError, "neighbors of edges are known in triangles only"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(error, words, smooth_boundaries, **{"mesh": BALL, "probabilities": np.ones((642, 2)), **change})


def test_the_surface_stays() -> None:
    small = decimate(BALL, 200)
    assert len(small.faces) == 200
    solid = trimesh.Trimesh(small.verts, small.faces, process=False)
    assert solid.is_watertight
    assert solid.volume == pytest.approx(4 / 3 * np.pi, rel=0.05)
    assert decimate(BALL, len(BALL.faces)) is BALL
    cloud = load_mesh(BALL.verts)
    assert decimate(cloud, 4) is cloud
    refused(ValueError, "max_faces should be at least 4, got 3", decimate, BALL, 3)


def test_a_triangle_soup_stays_connected() -> None:
    small = decimate(make_mesh(*soup((BALL.verts, BALL.faces))), 200)
    assert len(small.faces) <= 200
    assert trimesh.Trimesh(small.verts, small.faces, process=False).is_watertight


def test_the_cache_knows_the_number_of_faces(tmp_path: Path) -> None:
    first = decimate(BALL, 200, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast_simplification.simplify", None)  # a call would fail
        again = decimate(BALL, 200, tmp_path)
        with pytest.raises(TypeError):
            decimate(BALL, 100, tmp_path)
    np.testing.assert_array_equal(first.verts, again.verts)
    np.testing.assert_array_equal(first.faces, again.faces)
    (entry,) = tmp_path.rglob("*.decimated.safetensors")
    store_mesh(entry, replace(first, faces=first.faces + 1000))
    with pytest.warns(UserWarning, match="is computed again"):
        np.testing.assert_array_equal(decimate(BALL, 200, tmp_path).faces, first.faces)


def test_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.zeros((0, 3)), np.zeros((0, 3), np.int32)
    monkeypatch.setattr("fast_simplification.simplify", Mock(return_value=nothing))
    refused(MeshError, "decimation to 100 faces leaves none; allow more", decimate, BALL, 100)


@AT
def test_points_of_the_mesh_are_their_own_nearest(at: ElementsAt) -> None:
    points = element_points(BALL, at)
    elements, weights = element_weights(BALL, closest_points(BALL, points), at)
    own = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(own, np.arange(len(points)))
    np.testing.assert_allclose(weights.sum(axis=1), 1)


def test_triangles_without_area_and_of_other_sizes() -> None:
    line = make_mesh([[0, 0, 0], [4, 0, 0], [2, 0, 0], [2, 0, 0]], [[0, 1, 2], [3, 3, 3]])
    found = closest_points(line, [[3, 1, 0], [-1, 0, 0]])
    nearest = np.einsum("nc,ncx->nx", found.weights, line.verts[line.faces[found.faces]])
    np.testing.assert_allclose(nearest, [[3, 0, 0], [0, 0, 0]], atol=1e-12)
    # A large face below many small ones, whose centers are nearer to the point.
    tiny = BALL.verts * 0.01 + [0, 0, 1]
    both = make_mesh(
        np.concatenate([tiny, [[-9, -9, 0.9], [9, -9, 0.9], [0, 9, 0.9]]]),
        np.concatenate([BALL.faces, [[len(tiny), len(tiny) + 1, len(tiny) + 2]]]),
    )
    assert closest_points(both, [[1, 0, 0.95]]).faces.tolist() == [len(BALL.faces)]


def test_unknown_points_have_no_elements() -> None:
    unknown = closest_points(BALL, BALL.verts[:2])
    unknown.faces[1] = -1
    refused(ValueError, r"1 of the 2 points are unknown \(face -1\)", element_weights, BALL, unknown, "vertices")


# ---- instances: connected parts of labels ----


def connected_parts(mesh: Mesh, labels: np.ndarray, at: ElementsAt) -> list[set[int]]:
    """Neighbors share a face or, if they are faces, an edge."""
    sides = edges_of_faces(mesh.faces)
    groups = {"vertices": mesh.faces, "edges": sides}.get(at)
    if groups is None:
        groups = [np.flatnonzero((sides == edge).any(1)) for edge in range(sides.max() + 1)]
    pairs = np.array([(i, j) for group in groups for i in group for j in group if labels[i] == labels[j]])
    graph = coo_matrix((np.ones(len(pairs)), pairs.T), (len(labels), len(labels)))
    part = connected_components(graph)[1]
    return [set(np.flatnonzero(part == i).tolist()) for i in range(part.max() + 1)]


@AT
def test_without_a_least_area_they_are_the_connected_parts(at: ElementsAt) -> None:
    mesh = load_mesh(trimesh.creation.icosphere(2))
    labels = np.random.default_rng(0).integers(-1, 3, len(element_areas(mesh, at)))
    numbers, new = label_instances(mesh, labels, at=at, least_area=0)
    np.testing.assert_array_equal(new, labels)
    assert (numbers[labels < 0] == -1).all()
    expected = {frozenset(part) for part in connected_parts(mesh, labels, at) if labels[next(iter(part))] >= 0}
    assert {frozenset(np.flatnonzero(numbers == i).tolist()) for i in range(numbers.max() + 1)} == expected


@AT
def test_small_parts_take_the_label_around_them(at: ElementsAt) -> None:
    """Each half has specks of other labels, also specks in specks. Two caps of one label are two instances."""
    mesh = load_mesh(trimesh.creation.icosphere(4))
    z = element_points(mesh, at)[:, 2]
    clean = np.where(abs(z) > 0.8, 7, np.where(z > 0, 2, 4))
    random = np.random.default_rng(0)
    noisy = np.where(random.random(len(z)) < 0.1, random.integers(0, 9, len(z)), clean)
    numbers, labels = label_instances(mesh, noisy, at=at, least_area=0.02)
    assert numbers.min() == 0
    assert numbers.max() == 3
    assert (labels == clean).mean() > 0.98  # specks at the boundaries may go to either side
    assert [set(labels[numbers == i]) for i in range(4)] == [{2}, {4}, {7}, {7}]
    areas = np.bincount(numbers, element_areas(mesh, at))
    assert areas[2] >= areas[3]
    assert len(connected_parts(mesh, labels, at)) == 4
    again = label_instances(mesh, labels, at=at, least_area=0.02)
    np.testing.assert_array_equal(again.numbers, numbers)
    np.testing.assert_array_equal(again.labels, labels)


def test_a_thin_band_does_not_cut_an_instance() -> None:
    mesh = load_mesh(trimesh.creation.icosphere(4))
    z = element_points(mesh, "faces")[:, 2]
    numbers, labels = label_instances(mesh, np.where(abs(z) < 0.02, 1, 0), at="faces", least_area=0.05)
    assert (labels == 0).all()
    assert (numbers == 0).all()


def test_the_longest_border_decides() -> None:
    """A rectangle of sides 1 and 0.8 has three neighbors. Those with one label count together."""
    verts = [[0, 0, 0], [1, 0, 0], [1, 0.8, 0], [0, 0.8, 0], [-5, 0.5, 0], [0.5, -9, 0], [6, 0.5, 0]]
    mesh = make_mesh(verts, [[0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 5, 1], [1, 6, 2]])
    for sides, expected in (((1, 2, 1), 1), ((1, 2, 2), 2), ((1, 2, 3), 2)):
        labels = label_instances(mesh, [5, 5, *sides], at="faces", least_area=0.15).labels
        assert labels.tolist() == [expected, expected, *sides]


@AT
def test_parts_without_a_larger_neighbor_are_left_out(at: ElementsAt) -> None:
    """Debris keeps its labels, and so do unlabeled elements and vertices without faces."""
    large, debris = BALL, load_mesh(trimesh.creation.icosphere(1))
    verts = np.concatenate([large.verts, 0.02 * debris.verts + 3, [[9, 9, 9]]])
    mesh = make_mesh(verts, np.concatenate([large.faces, debris.faces + len(large.verts)]))
    points = element_points(mesh, at)
    labels = np.where(points[:, 0] > 2, 1 + (points[:, 2] > 3), 0)
    labels[0] = -1
    numbers, new = label_instances(mesh, labels, at=at)
    np.testing.assert_array_equal(new, labels)
    assert numbers[0] == -1
    assert (numbers[points[:, 0] > 2] == -1).all()
    assert (numbers[1:][points[1:, 0] < 2] == 0).all()
    assert label_instances(mesh, labels, at=at, least_area=1).numbers.max() == -1


@AT
def test_triangle_soup(at: ElementsAt) -> None:
    """Vertices at the same position connect faces, as they do in `precompute`."""
    sphere = load_mesh(trimesh.creation.icosphere(2))
    mesh = make_mesh(*soup((sphere.verts, sphere.faces)))
    z = element_points(mesh, at)[:, 2]
    numbers, labels = label_instances(mesh, (z > 0.01).astype(np.uint8), at=at)
    np.testing.assert_array_equal(numbers, z > 0.01)
    np.testing.assert_array_equal(labels, z > 0.01)
    speck = np.zeros(len(z), int)
    speck[: 3 if at != "faces" else 1] = 1
    assert (label_instances(mesh, speck, at=at, least_area=0.01).numbers == 0).all()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"labels": np.zeros(41, int)}, ValueError, r"labels should have shape \(42,\), one for each of vertices"),
        ({"labels": np.zeros(42)}, TypeError, "labels should be integers, dtype is float64"),
        ({"least_area": 1.5}, ValueError, "least_area should be from 0 to 1, got 1.5"),
        ({"least_area": float("nan")}, ValueError, "least_area should be from 0 to 1, got nan"),
        ({"mesh": make_mesh(np.eye(3), None)}, MeshError, "a point cloud has no neighbors"),
        ({"mesh": QUAD, "at": "edges"}, MeshError, "neighbors of edges are known in triangles only"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(
        error,
        words,
        label_instances,
        **{"mesh": load_mesh(trimesh.creation.icosphere(1)), "labels": np.zeros(42, int), **changed},
    )


def test_a_background_and_debris_are_no_instances() -> None:
    """Gum in two pieces, teeth, and debris of both, numbered as in the challenge Teeth3DS: 0 for none, teeth from 1."""
    count = 60
    strip = np.array([[i // 2, i % 2, 0.0] for i in range(count)])
    faces = np.array([[i, i + 1, i + 2] for i in range(count - 2)])
    labels = np.repeat([0, 11, 12, 0, 11], [10, 10, 20, 10, 8])  # one strip: gum, teeth, gum, another crown
    y = np.array([0, 9, 0])
    parts = [strip, strip[:10] + y, 0.01 * strip[:4] + 2 * y, 0.01 * strip[:4] + 3 * y]
    pieces = [trimesh.Trimesh(part, faces[: len(part) - 2], process=False) for part in parts]
    labels = np.concatenate([labels, np.zeros(8, int), [11, 11], [0, 0]])
    mesh = load_mesh(trimesh.util.concatenate(pieces))
    truth = np.repeat([0, 1, 3, 0, 2, 0], [10, 10, 20, 10, 8, 12])
    found = label_instances(mesh, labels, at="faces", background=0)
    np.testing.assert_array_equal(found.numbers, truth)
    np.testing.assert_array_equal(found.labels, labels)
    assert set(label_instances(mesh, labels, at="faces").numbers) == {-1, 0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint32])
def test_edges_of_faces_in_small_types(dtype: Any) -> None:
    """The number of a pair of vertices doesn't fit into the type of the faces."""
    faces = trimesh.creation.icosphere(3).faces if dtype is np.int16 else grid_faces(320)
    labels = np.arange(len(faces)) % 3
    assert np.array_equal(mesh_edges(faces.astype(dtype)), mesh_edges(faces))
    found, expected = (labels_at(labels, f, source="faces", target="edges") for f in (faces.astype(dtype), faces))
    assert np.array_equal(found, expected)
    assert np.array_equal(
        labels_at(found, faces.astype(dtype), source="edges", target="faces"),
        labels_at(found, faces, source="edges", target="faces"),
    )


def grid_faces(n: int) -> np.ndarray:
    """The triangles of a grid of n × n vertices in random order."""
    first = (np.arange(n - 1)[:, None] * n + np.arange(n - 1)).ravel()
    faces = np.concatenate(
        [np.stack([first, first + n, first + n + 1], 1), np.stack([first, first + n + 1, first + 1], 1)]
    )
    return np.random.default_rng(0).permutation(n * n)[faces]


def test_other_words_for_elements_are_named() -> None:
    mesh = make_mesh(np.eye(3), [[0, 1, 2]])
    for call in (element_areas, element_points, border_lengths):
        refused(ValueError, "at should be vertices, faces or edges, got 'vertex'", call, mesh, "vertex")
    for call, values in ((smooth_boundaries, np.ones((1, 2))), (label_instances, np.zeros(1, int))):
        refused(ValueError, "at should be vertices, faces or edges, got 'face'", call, mesh, values, at="face")
