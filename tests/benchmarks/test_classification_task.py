"""The measurement of classification."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks.classification import COPIED, main, write_classes
from diffnet.data import load_classes, shapes


def test_the_written_set_is_the_generated_one(tmp_path: Path) -> None:
    data = shapes(classes=3, train=2, test=1)
    write_classes(data, tmp_path)
    found = load_classes(tmp_path)
    for part, expected in ((found.train, data.train), (found.test, data.test)):
        labels = {item.name.split("/")[-1]: found.label_names[int(item.labels.flat[0])] for item in part}
        assert labels == {item.name: data.label_names[int(item.labels.flat[0])] for item in expected}
    by_name = {item.name.split("/")[-1]: item.mesh for item in found.train}
    for item in data.train:
        np.testing.assert_allclose(by_name[item.name].verts, item.mesh.verts, atol=1e-6)
        assert (by_name[item.name].faces == item.mesh.faces).all()


@pytest.mark.slow
def test_each_seed_has_a_row(tmp_path: Path) -> None:
    small = ["--classes", "2", "--train", "2", "--test", "1", "--seeds", "0", "1"]
    main(["--out", str(tmp_path), *small, "--epochs", "1", "--k", "16", "--width", "8", "--device", "cpu"])
    rows = read_csv(tmp_path / "classification.csv")
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert all(float(row[name]) >= 0 for row in rows for name in ("seconds", *COPIED))
