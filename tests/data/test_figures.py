"""The generated figures: labels, topology, orientation, poses and repeatability."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import trimesh

from diffnet.data.labeled import LabeledMesh, LabeledMeshes
from diffnet.data.synthetic.classes import shapes
from diffnet.data.synthetic.dataset import figure, figures
from diffnet.data.synthetic.shape import sample_body
from diffnet.data.synthetic.shift import BUILDS, MESHERS
from diffnet.geometry.errors import OptionError

NAMES = ["head", "torso", "upper arm", "forearm", "hand", "thigh", "shin", "foot"]


@pytest.fixture(scope="module")
def data() -> LabeledMeshes:
    """Figures of seven kinds, twice in the test part."""
    return figures(7, 14)


def of_kind(items: list[LabeledMesh], kind: str) -> list[LabeledMesh]:
    """The closed meshes, the meshes with holes, or the clouds among items."""
    kinds = ["cloud" if i.mesh.is_point_cloud else "mesh" if (edge_uses(i)[1] == 2).all() else "holes" for i in items]
    return [item for item, own in zip(items, kinds, strict=True) if own == kind]


def surface_of(item: LabeledMesh) -> trimesh.Trimesh:
    return trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False)


def edge_uses(item: LabeledMesh) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(surface_of(item).edges_sorted, axis=0, return_counts=True)


def components(edges: np.ndarray, vertices: np.ndarray) -> int:
    return len(trimesh.graph.connected_components(edges, nodes=vertices, min_len=1))


def same(one: LabeledMesh, other: LabeledMesh) -> bool:
    return (
        one.name == other.name
        and np.array_equal(one.mesh.verts, other.mesh.verts)
        and np.array_equal(one.mesh.faces, other.mesh.faces)
        and np.array_equal(one.labels, other.labels)
    )


def height_over_feet(item: LabeledMesh) -> float:
    """The height of the head above the feet along z, as a share of their distance."""
    head, feet = (item.mesh.verts[item.labels == NAMES.index(n)].mean(axis=0) for n in ("head", "foot"))
    return float((head - feet)[2] / np.linalg.norm(head - feet))


def test_set_has_its_splits_names_and_labels(data: LabeledMeshes) -> None:
    assert data.label_names == NAMES
    assert data.labels_at == "vertices"
    assert [i.name for i in data.train] == [f"figure_train_{n:03d}" for n in range(7)]
    assert [i.name for i in data.test] == [f"figure_test_{n:03d}" for n in range(14)]
    for item in data.train + data.test:
        assert item.labels.dtype == np.int64
        assert item.labels.shape == (len(item.mesh.verts),)
        counts = np.bincount(item.labels, minlength=8)
        assert len(counts) == 8, item.name
        assert counts.min() >= 8, item.name
        assert 650 <= len(item.mesh.verts) <= 2900, item.name
    for items in (data.train, data.test):
        shares = {kind: len(of_kind(items, kind)) / len(items) for kind in ("mesh", "holes", "cloud")}
        assert 0.6 < shares["mesh"] < 0.8
        assert 0.1 < shares["holes"] < 0.2
        assert 0.1 < shares["cloud"] < 0.2


def test_meshes_are_closed_connected_manifold_oriented_and_of_genus_zero(data: LabeledMeshes) -> None:
    for item in of_kind(data.train + data.test, "mesh"):
        surface, vertices = surface_of(item), np.arange(len(item.mesh.verts))
        assert surface.is_watertight, item.name
        assert surface.euler_number == 2, item.name
        assert components(surface.edges, vertices) == 1, item.name
        assert surface.is_winding_consistent, item.name
        assert 0.02 < surface.volume < 0.2, item.name  # cubic meters
        # At a manifold vertex, the opposite edges of its triangles form one ring.
        for vertex in vertices[:: len(vertices) // 20]:
            around = item.mesh.faces[(item.mesh.faces == vertex).any(axis=1)]
            ring = around[around != vertex].reshape(-1, 2)
            assert components(ring, np.unique(ring)) == 1, item.name


def test_no_triangle_is_degenerate(data: LabeledMeshes) -> None:
    for item in (i for i in data.train + data.test if not i.mesh.is_point_cloud):
        corners = item.mesh.verts[item.mesh.faces]
        longest = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max(axis=1)
        assert (surface_of(item).area_faces / longest**2).min() > 1e-3, item.name


def test_holes_are_one_or_two_separate_rings(data: LabeledMeshes) -> None:
    rings = []
    for item in [*of_kind(data.train + data.test, "holes"), figure(2, kind="holes")]:
        edges, uses = edge_uses(item)
        assert uses.max() == 2, item.name
        border, times = np.unique(edges[uses == 1], return_counts=True)
        assert (times == 2).all(), item.name
        rings.append(components(edges[uses == 1], border))
        vertices = np.arange(len(item.mesh.verts))
        assert components(edges, vertices) == 1, item.name
        assert len(vertices) - len(edges) + len(item.mesh.faces) == 2 - rings[-1], item.name
    assert set(rings) == {1, 2}


def test_clouds_have_no_faces_and_no_repeated_points(data: LabeledMeshes) -> None:
    clouds = of_kind(data.train + data.test, "cloud")
    assert clouds
    for item in clouds:
        assert item.mesh.faces.shape == (0, 3)
        assert len(np.unique(item.mesh.verts, axis=0)) == len(item.mesh.verts), item.name


def test_train_is_upright_and_test_is_rotated(data: LabeledMeshes) -> None:
    assert min(height_over_feet(i) for i in data.train) > 0.8
    turned = np.array([height_over_feet(i) for i in data.test])
    # The z component of a uniformly random direction is uniform on [-1, 1].
    assert turned.min() < -0.5
    assert turned.max() > 0.5
    assert abs(turned.mean()) < 0.5


def test_equal_seeds_give_equal_arrays_and_a_longer_set_begins_with_the_shorter_one(data: LabeledMeshes) -> None:
    short = figures(2, 1)
    assert all(map(same, short.train + short.test, data.train[:2] + data.test[:1]))
    assert same(figure(5, kind="cloud"), figure(5, kind="cloud"))


def test_no_figure_occurs_twice_in_a_set_or_under_another_seed(data: LabeledMeshes) -> None:
    other = figures(1, 1, seed=1)
    items = data.train + data.test + other.train + other.test
    # A rotation keeps the distances from the center.
    marks = {tuple(np.sort(np.linalg.norm(i.mesh.verts, axis=1))[[0, 100, -1]].round(6)) for i in items}
    assert len(marks) == len(items)


def test_figure_has_the_requested_kind() -> None:
    upright = figure(3)
    assert (edge_uses(upright)[1] == 2).all()
    assert height_over_feet(upright) > 0.8
    turned = figure(3, kind="holes", upright=False)
    assert (edge_uses(turned)[1] == 1).any()
    assert height_over_feet(turned) < 0.8
    assert figure(3, kind="cloud").mesh.is_point_cloud


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: figures(0, 1), "train .* got 0"),
        (ValueError, lambda: figures(1, -2), "test .* got -2"),
        (ValueError, lambda: figures(1, 1, seed=-1), "got -1"),
        (ValueError, lambda: figure(-1), "got -1"),
        (ValueError, lambda: figure(0, kind="points"), "'points'"),
        (
            OptionError,
            lambda: figures(1, 1, shift="x"),
            r"of builds, mesher, boundaries, missing, joined by \+, got 'x'",
        ),
        (OptionError, lambda: shapes(2, 1, 1, shift="boundaries"), "one or several of builds, mesher, missing, joined"),
    ],
)
def test_wrong_arguments(error: type[Exception], call: Callable[[], object], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_default_size_of_the_set() -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(figures).parameters.items()}
    assert defaults == {"train": 48, "test": 16, "seed": 0, "shift": None}


@pytest.fixture(scope="module")
def closed() -> LabeledMesh:
    """The first training figure of every set with a shift."""
    return figures(1, 1, shift="boundaries").train[0]


@pytest.mark.parametrize(
    ("shift", "count"), [("builds", len(BUILDS)), ("mesher", len(MESHERS)), ("boundaries", 1), ("missing", 5)]
)
def test_a_shift_changes_the_test_figures_alone(
    data: LabeledMeshes, closed: LabeledMesh, shift: str, count: int
) -> None:
    shifted = figures(1, count, shift=shift)
    assert (edge_uses(shifted.train[0])[1] == 2).all()
    assert same(shifted.train[0], closed)
    assert not any(map(same, shifted.test, data.test))
    if shift == "mesher":
        adaptive, decimated, subdivided, scan = shifted.test
        assert (edge_uses(adaptive)[1] == 2).all()
        assert 745 < len(decimated.mesh.verts) < 756
        assert len(subdivided.mesh.faces) % 4 == 0
        assert (edge_uses(scan)[1] == 1).any()
    whole = [len(np.unique(item.labels)) == 8 for item in shifted.test]
    assert all(whole) == (shift != "missing")
    for item in shifted.test:
        assert components(edge_uses(item)[0], np.arange(len(item.mesh.verts))) == 1


def test_a_body_without_some_parts() -> None:
    body = sample_body(np.random.default_rng(0))
    whole, rest = (
        np.bincount(shape.parts, minlength=8) for shape in (body.shape(), body.shape({("shin", 1), ("head", 0)}))
    )
    assert {NAMES[i]: int(n) for i, n in enumerate(whole - rest) if n} == {"head": 2, "shin": 1}
