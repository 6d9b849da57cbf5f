"""The measurement of cut figures: its test sets, its commands and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks import cut_figures
from diffnet.data import figure, load_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sets_hold_the_figures_without_their_bottom(tmp_path: Path) -> None:
    whole = figure(cut_figures.FIRST)
    cut = cut_figures.without_bottom(whole)
    folder = cut_figures.write_set(tmp_path / "bottom", [cut])
    (read,) = load_dataset(folder, needs_train=False).test
    np.testing.assert_allclose(read.mesh.verts, cut.mesh.verts, rtol=1e-7)
    assert np.array_equal(read.mesh.faces, cut.mesh.faces)
    assert np.array_equal(read.labels, cut.labels)
    assert 0.6 < len(cut.mesh.verts) / len(whole.mesh.verts) < 0.71
    height = whole.mesh.verts[:, 2]
    assert cut.mesh.verts[:, 2].min() > np.quantile(height, cut_figures.SHARE)
    place = {tuple(x): label for x, label in zip(whole.mesh.verts, whole.labels, strict=True)}
    assert all(place[tuple(x)] == label for x, label in zip(cut.mesh.verts, cut.labels, strict=True))


def test_the_table_has_a_row_for_each_seed_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, ...]] = []

    def diffnet(command: str, *more: str, out: Path, **options: Any) -> None:
        out.mkdir()
        if command == "train segmentation":
            trained.append(more)
        accuracy = 0.9 if "with-cuts-1" in out.name else 0.5
        content = {"test_accuracy": accuracy, "preprocessing_seconds": 1.0, "training_seconds": 2.0}
        (out / "results.json").write_text(json.dumps(content))

    def write_figures(out: Path, seeds: list[int]) -> tuple[list[Path], dict[str, Path]]:
        return [out / str(seed) for seed in seeds], {
            name: out / name for name in ("whole", "bottom_cut_off", "random_side_cut_off")
        }

    monkeypatch.setattr(cut_figures, "diffnet", diffnet)
    monkeypatch.setattr(cut_figures, "write_figures", write_figures)
    cut_figures.main(["--out", str(tmp_path), "--seeds", "0", "1", "--epochs", "3"])
    rows = read_csv(tmp_path / "cut_figures.csv")
    assert [(row["seed"], row["recipe"]) for row in rows] == [
        (seed, recipe) for seed in ("0", "1") for recipe in ("without cuts", "with cuts")
    ]
    assert [row["bottom_cut_off"] for row in rows] == ["0.5", "0.5", "0.5", "0.9"]
    assert trained == [("--epochs", "3"), ("--cut", "0.5", "--epochs", "3")] * 2
