"""Labels and arrays whose order does not fit the mesh: beside STL files, and shuffled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaws import jaw, write_jaws

from diffnet.data import LabelsAt, figure, labels_at, load_dataset, load_pairs, load_targets, own_arrays
from diffnet.data.folders.agreement import agreement
from diffnet.data.labeled import DataError
from diffnet.geometry import Mesh, load_mesh, make_mesh


def own_feature(root: Path) -> Any:
    return own_arrays(load_mesh(root / "jaw0.stl"), "file:t")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("jaw{}.json", load_dataset),
        ("jaw{}.txt", load_dataset),
        ("jaw{}.t.npy", lambda root: load_targets(root, "file:t")),
        ("jaw{}.t.npy", own_feature),
        ("jaw{}.vts", lambda root: load_pairs(root, base="0")),
        ("jaw{}_jaw0.txt", lambda root: load_pairs(root, base="0")),
    ],
)
def test_values_at_vertices_beside_stl_are_refused(name: str, load: Callable[[Path], Any], tmp_path: Path) -> None:
    for seed in range(4):
        jaw(seed).write(tmp_path / f"jaw{seed}.stl")
        mesh = load_mesh(tmp_path / f"jaw{seed}.stl")
        values, file = np.arange(len(mesh.verts)) % 5, tmp_path / name.format(seed)
        if file.suffix == ".npy":
            np.save(file, values)
        else:
            file.write_text(
                f'{{"labels": {values.tolist()}}}' if file.suffix == ".json" else "\n".join(map(str, values))
            )
    with pytest.raises(
        DataError, match=r"the order of the vertices of .*\.stl, but an STL file has no order of vertices"
    ):
        load(tmp_path)


def test_labels_at_faces_beside_stl_are_read(tmp_path: Path) -> None:
    write_jaws(tmp_path, 3, ".stl", "faces")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_dataset(tmp_path)
    assert (data.labels_at, len(data.label_names)) == ("faces", 15)
    one = jaw(0)
    expected = labels_at(one.labels, one.faces, source="vertices", target="faces")
    found = next(item for item in [*data.train, *data.test] if item.name == "jaw0")
    assert [data.label_names[label] for label in found.labels] == list(map(str, expected))


@pytest.mark.parametrize("at", ["vertices", "faces"])
@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_shuffled_labels_are_named_once(at: LabelsAt, suffix: str, tmp_path: Path) -> None:
    write_jaws(tmp_path, 4, suffix, at, shuffled=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset(tmp_path)
    (message,) = [str(each.message) for each in caught]
    assert "the labels of 4 of 4 meshes look shuffled. In " in message
    assert f"neighboring {at} have the same label, and " in message
    assert Path(str(caught[0].filename)).name == Path(__file__).name


@pytest.fixture(scope="module")
def good() -> list[tuple[Mesh, np.ndarray]]:
    """A figure and two jaws, with labels at vertices."""
    jaws = [(make_mesh(one.verts, one.faces), one.labels) for one in (jaw(0), jaw(1, lower=True))]
    whole = figure(0)
    return [(whole.mesh, whole.labels), *jaws]


@pytest.mark.parametrize("at", ["vertices", "edges", "faces"])
def test_agreement_of_good_and_of_shuffled_labels(at: LabelsAt, good: list[tuple[Mesh, np.ndarray]]) -> None:
    rng = np.random.default_rng(0)
    for mesh, labels in good:
        own = labels_at(labels, mesh.faces, source="vertices", target=at)
        fine, broken = agreement(mesh, own, at), agreement(mesh, rng.permutation(own), at)
        assert not fine.is_chance
        assert broken.is_chance
        assert (fine.share - fine.chance) / (1 - fine.chance) > 0.4
        assert broken.share == pytest.approx(broken.chance, abs=0.05)
        assert not agreement(mesh, np.zeros_like(own), at).is_chance  # a single class
        assert agreement(mesh, np.full_like(own, -1), at).pairs == 0


def test_agreement_by_hand() -> None:
    """Two faces with a common side. The sides 0-1 … of each face count, and so the common one counts twice."""
    mesh = make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], [[0, 1, 2], [2, 1, 3]])
    found = agreement(mesh, np.array([0, 0, 1, -1]), "vertices")  # the sides 01, 12, 20 and 21
    assert (found.pairs, found.share) == (4, 0.25)
    assert found.chance == pytest.approx((5 / 8) ** 2 + (3 / 8) ** 2)
    assert agreement(mesh, np.array([4, 7]), "faces") == (2, 0.0, 0.5)
