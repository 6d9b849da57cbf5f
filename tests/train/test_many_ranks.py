"""`diffnet train`, `evaluate` and `predict` under torchrun give what one process gives."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import trimesh
from command import diffnet
from two_ranks import commands_of_two_ranks

from diffnet import DiffusionNet

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("one_thread", "small_pictures"),
]


def files_of(folder: Path) -> dict[str, object]:
    """The content of all files. Rows of a report are without times."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith("report.csv"):
            with path.open(newline="") as file:
                found[path.name] = [(row["file"], row["status"], row["reason"]) for row in csv.DictReader(file)]
        else:
            found[path.name] = path.read_bytes()
    return found


def test_predictions(tmp_path: Path) -> None:
    labels, classes, meshes = tmp_path / "labels.safetensors", tmp_path / "classes.safetensors", tmp_path / "meshes"
    metadata = {"features": "xyz", "k": 8, "normalize": True, "label_names": list("abc")}
    DiffusionNet(3, 3, width=8, blocks=1).save(labels, **metadata)
    DiffusionNet(3, 3, width=8, blocks=1, outputs_at="global_mean").save(classes, **metadata)
    meshes.mkdir()
    for i in range(5):
        ball = trimesh.creation.icosphere(1)
        ball.vertices *= np.random.default_rng(i).uniform(0.6, 1.4, 3)
        ball.export(meshes / f"{i}.off")
    (meshes / "bad.off").write_text("OFF\n1 1 0\n0 0 0\n3 0 1 2\n")

    def commands(out: Path) -> list[list[object]]:
        files = ["predict", meshes, "--checkpoint", labels, "--format", "npy", "--out", out / "files"]
        return [
            [*files, "--cache", out / "cache"],
            [*files, "--resume"],
            ["predict", meshes, "--checkpoint", classes, "--out", out / "table" / "t.csv"],
            ["predict", meshes, "--checkpoint", labels, "--out", out / "pages", "--probabilities", out / "pages/p.npz"],
            ["predict", meshes, "--checkpoint", labels, "--format", "txt", "--out", out / "none", "--instances"],
        ]

    one = [diffnet(*command) for command in commands(tmp_path / "one")]
    first, second = commands_of_two_ranks(tmp_path, commands(tmp_path / "two"))
    assert [code for code, _, _ in first] == [code for code, _, _ in second] == [1] * 5
    for found, expected in zip(first[:-1], one[:-1], strict=True):
        assert found[2] == expected[2]
        assert sorted(found[1].replace(f"{tmp_path / 'two'}", f"{tmp_path / 'one'}").splitlines()[1:]) == sorted(
            expected[1].splitlines()[1:]
        )
    assert [out + err for _, out, err in second[:-1]] == [""] * 4
    assert first[-1] == second[-1] == one[-1]
    for folder in ("files", "table", "pages"):
        assert files_of(tmp_path / "two" / folder) == files_of(tmp_path / "one" / folder)
    assert not (tmp_path / "two" / "none").exists()
