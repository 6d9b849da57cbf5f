"""The measurement of classification."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

from diffnet import __main__ as program
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks import classification
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


@pytest.mark.usefixtures("one_thread", "small_pictures")
def test_a_seed_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["diffnet", *map(str, words)])
        with contextlib.suppress(SystemExit):
            program.main()

    monkeypatch.setattr(classification, "run_diffnet", run)  # in this process
    small = ["--classes", "2", "--train", "2", "--test", "1", "--seeds", "3"]
    main(["--out", str(tmp_path), *small, "--epochs", "1", "--k", "16", "--width", "8", "--device", "cpu"])
    rows = read_csv(tmp_path / "classification.csv")
    assert [row["seed"] for row in rows] == ["3"]
    assert all(float(row[name]) >= 0 for row in rows for name in ("seconds", *COPIED))
