"""The generated pairs: topology, one-to-one correspondences that keep the parts of the body, mirror images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.data import MeshPairs, PairShape, figure_pairs, load_pairs, save_pairs
from diffnet.data.synthetic.pairs import pair_figure, template
from diffnet.geometry import closest_points, geodesic_errors, make_mesh

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data() -> MeshPairs:
    """Two of the test figures."""
    return two("figures", (0, 1))


def two(bodies: str, numbers: tuple[int, int]) -> MeshPairs:
    standard, mirror = template(bodies)
    return MeshPairs([], [pair_figure((bodies, "test", i)) for i in numbers], [], [(0, 1)], standard.faces, mirror)


def positions(shape: PairShape, points: object) -> np.ndarray:
    return points.interpolate(shape.mesh.faces, shape.mesh.verts)


def test_figures_are_closed_and_different(data: MeshPairs) -> None:
    for one in data.test:
        surface = trimesh.Trimesh(one.mesh.verts, one.mesh.faces, process=False)
        assert surface.is_watertight
        assert surface.euler_number == 2
        assert surface.volume > 0
        assert 4500 < len(one.mesh.verts) < 5500
    assert len(data.test[0].mesh.verts) != len(data.test[1].mesh.verts)


def test_representations_have_one_line(data: MeshPairs) -> None:
    known = "train=0 meshes, test=2 meshes, train_pairs=0, test_pairs=1, is_supervised=True"
    assert repr(data) == f"MeshPairs({known})"
    shape = data.test[0]
    points = f"template={len(shape.template)} points, folder=''"
    assert repr(shape) == f"PairShape(name={shape.name!r}, mesh={shape.mesh}, {points})"
    assert "template=None" in repr(PairShape("a", shape.mesh))


def test_correspondences_are_one_to_one(data: MeshPairs) -> None:
    """There and back, points return, and triangles keep their orientation."""
    first, second = data.test
    truth = data.truth(first, second)
    there = positions(second, truth.points)
    template = make_mesh(positions(second, second.template), data.template_faces)
    back = closest_points(template, there).interpolate(data.template_faces, positions(first, first.template))
    size = np.sqrt(trimesh.Trimesh(first.mesh.verts, first.mesh.faces, process=False).area)
    away = np.linalg.norm(back - first.mesh.verts, axis=1) / size
    assert away.mean() < 0.0015
    assert away.max() < 0.015
    floor = geodesic_errors(second.mesh, truth.nearest_vertices(second.mesh), truth.points)
    assert away.mean() < floor.mean() / 3
    assert 0.003 < floor.mean() < 0.01

    assert outward_share(data) > 0.995
    a, b, _ = there[first.mesh.faces].transpose(1, 0, 2)
    stretch = np.linalg.norm(b - a, axis=1) / np.linalg.norm(
        first.mesh.verts[first.mesh.faces[:, 1]] - first.mesh.verts[first.mesh.faces[:, 0]], axis=1
    )
    assert 0.5 < np.percentile(stretch, 1) < np.percentile(stretch, 99) < 2.5


def outward_share(data: MeshPairs) -> float:
    """The share of the triangles of the first mesh that face outward at their places on the second one."""
    first, second = data.test
    truth = data.truth(first, second)
    normals = trimesh.Trimesh(second.mesh.verts, second.mesh.faces, process=False).face_normals
    outward = normals[truth.points.faces][first.mesh.faces].sum(axis=1)  # type: ignore[union-attr]
    a, b, c = positions(second, truth.points)[first.mesh.faces].transpose(1, 0, 2)
    return float(((np.cross(b - a, c - a) * outward).sum(axis=1) > 0).mean())


def test_mirror_images(data: MeshPairs) -> None:
    check_mirror_images(data, 0.2)


def check_mirror_images(data: MeshPairs, distance: float) -> None:
    """They are on the other side of the body, and the mirror image of a mirror image is the point itself."""
    first, second = data.test
    own, mirrored = data.truth(first, second), data.mirrored_truth(first, second)
    size = np.sqrt(trimesh.Trimesh(second.mesh.verts, second.mesh.faces, process=False).area)
    apart = np.linalg.norm(positions(second, own.points) - positions(second, mirrored.points), axis=1) / size
    assert apart.mean() > distance
    places = positions(second, second.template)
    once = data.mirror.interpolate(data.template_faces, places)
    twice = data.mirror.interpolate(data.template_faces, once)
    assert np.linalg.norm(twice - places, axis=1).mean() / size < 0.003


@pytest.mark.slow
@pytest.mark.parametrize(("bodies", "numbers"), [("people", (0, 1)), ("animals", (1, 7))], ids=["people", "animals"])
def test_other_bodies(bodies: str, numbers: tuple[int, int]) -> None:
    """The second animal is of the rare build."""
    found = two(bodies, numbers)
    test_figures_are_closed_and_different(found)
    check_mirror_images(found, 0.2 if bodies == "people" else 0.15)  # animals are narrow
    assert outward_share(found) > 0.985
    names = {"people": {"person_test_000", "person_test_001"}, "animals": {"dog_test_001", "hippopotamus_test_007"}}
    assert {shape.name for shape in found.test} == names[bodies]


@pytest.mark.slow
def test_whole_sets(data: MeshPairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes make equal figures, a longer set begins with a shorter one, and files and cache give it back."""
    monkeypatch.setattr("diffnet.data.synthetic.pairs.TEST_PAIRS", 2)
    shorter = figure_pairs(train=2, test=2, jobs=1, cache_dir=tmp_path / "cache")
    longer = figure_pairs(train=2, test=3, jobs=1, cache_dir=tmp_path / "cache")
    for workers in (figure_pairs(train=2, test=2, jobs=2), longer):
        for one, other in zip(shorter.train + shorter.test, workers.train + workers.test, strict=False):
            same(one, other)
    for i, own in enumerate(data.test):
        same(own, longer.test[i])
    assert (len(shorter.test_pairs), len(longer.test_pairs)) == (1, 2)
    assert len({len(shape.mesh.verts) for shape in longer.train + longer.test}) == 5
    other = pair_figure(("figures", "test", 1), seed=1)
    assert not np.array_equal(other.mesh.verts, data.test[1].mesh.verts)
    save_pairs(longer, tmp_path / "files")
    again = load_pairs(tmp_path / "files")
    assert again.test_pairs == longer.test_pairs
    for one, two in zip(again.train + again.test, longer.train + longer.test, strict=True):
        same(one, two)
    monkeypatch.delattr("diffnet.data.synthetic.pairs.pair_figure")
    for one, two in zip(figure_pairs(2, 3, cache_dir=tmp_path / "cache").test, longer.test, strict=True):
        same(one, two)


def same(one: PairShape, other: PairShape) -> None:
    assert one.name == other.name
    np.testing.assert_array_equal(one.mesh.verts, other.mesh.verts)
    np.testing.assert_array_equal(one.mesh.faces, other.mesh.faces)
    np.testing.assert_array_equal(one.template.faces, other.template.faces)
    np.testing.assert_array_equal(one.template.weights, other.template.weights)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train": 1}, "train should be at least 2"),
        ({"seed": -1}, "seed"),
        ({"bodies": "fish"}, "people, animals, got 'fish'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        figure_pairs(**arguments)
