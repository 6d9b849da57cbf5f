"""The sets that come with diffnet: what they hold, and the program that packs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffnet.benchmarks.bodies import pack
from diffnet.data import BODIES, BODY_MAPS, load_dataset, load_pairs
from diffnet.geometry.discretize.coincident import open_edges

MAX_BYTES = 1e6  # of all files, which are compressed


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_labeled_bodies() -> None:
    data = load_dataset(BODIES)
    parts = ["head", "torso", "upper_arm", "lower_arm", "hand", "upper_leg", "lower_leg", "foot"]
    assert (data.label_names, data.labels_at) == (parts, "faces")
    assert (len(data.train), len(data.test)) == (24, 8)
    for item in [*data.train, *data.test]:
        assert 500 < len(item.mesh.verts) < 1600
        assert np.unique(item.labels).tolist() == list(range(8))
    vertices = load_dataset(BODIES, labels_at="vertices", needs_train=False)
    assert [len(item.labels) for item in vertices.test] == [len(item.mesh.verts) for item in data.test]


def test_bodies_in_pairs() -> None:
    data = load_pairs(BODY_MAPS)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.is_supervised
    for shape in data.train + data.test:
        assert 1500 < len(shape.mesh.verts) < 2500
        assert not len(open_edges(shape.mesh.faces, len(shape.mesh.verts)))
        assert len(np.unique(shape.template)) > 1000


def test_packed_sets_can_be_packed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack.main([str(BODIES), str(BODY_MAPS), "--out", str(tmp_path)])
    assert files(tmp_path) | {"README.md": b""} == files(BODIES.parent) | {"README.md": b""}
    assert "MB" in capsys.readouterr().out


def test_they_are_small_and_free() -> None:
    content = files(BODIES.parent)
    assert sum(map(len, content.values())) < MAX_BYTES
    assert b"CC0 1.0" in content["README.md"]
