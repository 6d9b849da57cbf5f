"""`label_instances`: connected parts of labels, small parts, seams, and what is left out."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.geometry import (
    ElementsAt,
    Mesh,
    MeshError,
    edges_of_faces,
    element_areas,
    element_points,
    label_instances,
    make_mesh,
)

AT = pytest.mark.parametrize("at", ["vertices", "faces", "edges"])


def ball(subdivisions: int = 3) -> Mesh:
    sphere = trimesh.creation.icosphere(subdivisions)
    return make_mesh(sphere.vertices, sphere.faces)


def soup(mesh: Mesh) -> Mesh:
    """Each face has corners of its own."""
    return make_mesh(mesh.verts[mesh.faces].reshape(-1, 3), np.arange(3 * len(mesh.faces)).reshape(-1, 3))


def neighbors(mesh: Mesh, at: ElementsAt) -> list[set[int]]:
    """By loops over the faces."""
    found: list[set[int]] = [set() for _ in element_areas(mesh, at)]
    sides = edges_of_faces(mesh.faces)
    groups = {"vertices": mesh.faces, "edges": sides}.get(at)
    if groups is None:
        groups = [np.flatnonzero((sides == edge).any(1)) for edge in range(sides.max() + 1)]
    for group in groups:
        for i in group:
            found[i] |= {int(j) for j in group if j != i}
    return found


def flooded(mesh: Mesh, labels: np.ndarray, at: ElementsAt) -> list[set[int]]:
    """The connected parts of labels, by a search from each element."""
    near, left, parts = neighbors(mesh, at), set(range(len(labels))), []
    while left:
        part, queue = set(), deque([left.pop()])
        while queue:
            i = queue.popleft()
            part.add(i)
            new = {j for j in near[i] if j in left and labels[j] == labels[i]}
            left -= new
            queue.extend(new)
        parts.append(part)
    return parts


@AT
def test_without_a_least_area_they_are_the_connected_parts(at: ElementsAt) -> None:
    mesh = ball(2)
    labels = np.random.default_rng(0).integers(-1, 3, len(element_areas(mesh, at)))
    numbers, new = label_instances(mesh, labels, at=at, least_area=0)
    np.testing.assert_array_equal(new, labels)
    assert (numbers[labels < 0] == -1).all()
    expected = {frozenset(part) for part in flooded(mesh, labels, at) if labels[next(iter(part))] >= 0}
    assert {frozenset(np.flatnonzero(numbers == i).tolist()) for i in range(numbers.max() + 1)} == expected


@AT
def test_small_parts_take_the_label_around_them(at: ElementsAt) -> None:
    """Each half has specks of other labels, also specks in specks. Two caps of one label are two instances."""
    mesh = ball(4)
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
    assert len(flooded(mesh, labels, at)) == 4
    again = label_instances(mesh, labels, at=at, least_area=0.02)
    np.testing.assert_array_equal(again.numbers, numbers)
    np.testing.assert_array_equal(again.labels, labels)


def test_a_thin_band_does_not_cut_an_instance() -> None:
    mesh = ball(4)
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
    large, debris = ball(3), ball(1)
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
    mesh = soup(ball(2))
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
    ],
)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        label_instances(**{"mesh": ball(1), "labels": np.zeros(42, int), **changed})


def test_a_background_and_debris_are_no_instances() -> None:
    """Gum in two pieces, teeth, and debris of both, numbered as in the challenge Teeth3DS: 0 for none, teeth from 1."""
    count = 60
    strip = np.array([[i // 2, i % 2, 0.0] for i in range(count)])
    faces = np.array([[i, i + 1, i + 2] for i in range(count - 2)])
    labels = np.repeat([0, 11, 12, 0, 11], [10, 10, 20, 10, 8])  # one strip: gum, teeth, gum, another crown
    y = np.array([0, 9, 0])
    parts = [strip, strip[:10] + y, 0.01 * strip[:4] + 2 * y, 0.01 * strip[:4] + 3 * y]
    triangles, first = [], 0
    for part in parts:
        triangles.append(faces[: len(part) - 2] + first)
        first += len(part)
    labels = np.concatenate([labels, np.zeros(8, int), [11, 11], [0, 0]])
    mesh = make_mesh(np.concatenate(parts), np.concatenate(triangles))
    truth = np.repeat([0, 1, 3, 0, 2, 0], [10, 10, 20, 10, 8, 12])
    found = label_instances(mesh, labels, at="faces", background=0)
    np.testing.assert_array_equal(found.numbers, truth)
    np.testing.assert_array_equal(found.labels, labels)
    assert set(label_instances(mesh, labels, at="faces").numbers) == {-1, 0, 1, 2, 3, 4, 5}
