"""The measurements of tasks and of several ranks: their sets, their commands and their tables."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from shapes import ellipsoid

from diffnet import __main__ as program
from diffnet.benchmarks import Options
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.loops.conditioned_step import conditioned_step
from diffnet.benchmarks.loops.pair_step import pair_step
from diffnet.benchmarks.tasks import classification, correspondence, scaling
from diffnet.benchmarks.tasks.classification import COPIED, write_classes
from diffnet.benchmarks.tasks.curvature_stability import FEATURES, compare
from diffnet.benchmarks.tasks.scaling import WARM, Host, training_row, with_shares
from diffnet.benchmarks.tasks.timed_rank import Times
from diffnet.data import load_classes, shapes
from diffnet.geometry import make_mesh

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- correspondence ----


def test_peers_of_a_step_have_the_same_loss() -> None:
    (case,) = pair_step(Options(torch.device("cpu"), vertices=(60,), widths=(8,), k=6, dtypes=("fp32",)))
    losses = []
    for name in ("diffnet", "diffnet-eager", "published"):
        torch.manual_seed(0)  # a peer makes its network in its first call
        run = case.peers[name]
        losses.append([float(run().detach()) for _ in range(3)])  # type: ignore[arg-type]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-2)


def test_conditions_change_a_step_once_they_are_learned() -> None:
    (case,) = conditioned_step(Options(torch.device("cpu"), vertices=(60,), widths=(8,), k=6, dtypes=("fp32",)))
    losses = []
    for name in ("neither", "conditions"):
        torch.manual_seed(0)
        run = case.peers[name]
        losses.append([float(run().detach()) for _ in range(3)])  # type: ignore[arg-type]
    assert losses[0][0] == losses[1][0]
    assert losses[0][2] != losses[1][2]


def test_the_table_has_a_line_for_each_row_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], check: bool) -> None:
        assert check
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        content = {"mean_error_x100": 1.5, "unflipped_mean_error": 0.01, "flipped_pairs": 2, "auc": 0.9}
        content |= {"test_pairs": 1, "train_pairs": 1, "preprocessing_seconds": 1.0, "training_seconds": 2.0}
        (out / "results.json").write_text(json.dumps({**content, "options": {"epochs": 3}}))

    monkeypatch.setattr("subprocess.run", run)
    correspondence.main(["--out", str(tmp_path), "--seeds", "0", "1", "--epochs", "3"])
    rows = read_csv(tmp_path / "correspondence.csv")
    assert [(row["row"], row["seed"]) for row in rows] == [*itertools.product(correspondence.METHODS, "01")]
    assert all(row["unflipped_x100"] == "1.0" and row["zoomout_x100"] == "1.5" and row["epochs"] == "3" for row in rows)
    assert all(command[command.index("--data") + 1] == "bodies" for command in commands)
    for trained, evaluated in zip(commands[0::2], commands[1::2], strict=True):
        assert trained[3:5] == ["train", "correspondence"]
        assert trained[-2:] == ["--epochs", "3"]
        assert evaluated[3] == "evaluate"
        assert evaluated[-1] == "--zoomout"


# ---- classification ----


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
    small = "--classes 2 --train 2 --test 1 --seeds 3 --epochs 1 --k 16 --width 8 --device cpu"
    classification.main(["--out", str(tmp_path), *small.split()])
    rows = read_csv(tmp_path / "classification.csv")
    assert [row["seed"] for row in rows] == ["3"]
    assert all(float(row[name]) >= 0 for row in rows for name in ("seconds", *COPIED))


# ---- features of curvature ----


def test_rows_of_a_surface() -> None:
    ball = trimesh.creation.icosphere(4)
    rows = list(compare(make_mesh(ball.vertices * [1, 1.3, 1.7], ball.faces, name="ball"), (1500, 600)))
    assert {(row["surface"], row["mesh"]) for row in rows} == {("ball", "600"), ("ball", "noise")}
    coarse = [row for row in rows if row["mesh"] == "600"]
    found = {name: np.mean([row["r2"] for row in coarse if row["feature"] == name]) for name in FEATURES}
    assert found["diffused-curvature"] > max(0.9, found["curvature"])


# ---- several ranks ----


def test_times_of_steps_and_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock shows 0, 1, 2, … The time between two epochs does not count."""
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    times = Times(torch.device("cpu"))
    for epochs in (0.5, 1.0, 1.5, 2.0):
        times.exchange(torch.zeros(3), lambda sums: time.perf_counter())
        times.after_step(epochs)
        if epochs == 1:
            times.exchange(torch.zeros(9, 9), lambda sums: None)  # of the tally of an epoch
    assert times.epochs() == [{"steps": [4.0], "exchanges": [2.0, 2.0]}] * 2
    assert times.sent == 12


def test_a_row_of_two_ranks(tmp_path: Path) -> None:
    """Steps of 0.1 s. Rank 1 arrives 0.03 s after rank 0, and then the sum takes 0.01 s."""
    (tmp_path / "metrics.csv").write_text("epoch,seconds\n" + "1,0.4\n" * (2 * WARM + 3))
    slow = [{"steps": [9.0], "exchanges": [9.0, 9.0]}] * 2 * WARM  # first epochs don't count
    found: list[dict[str, Any]] = [
        {"epochs": slow + [{"steps": [0.1], "exchanges": [own, own]}] * 3, "sent": 40, "seconds": 5.0}
        for own in (0.04, 0.01)
    ]
    host = Host(2, "cpu", 8, 4, tmp_path, tmp_path, train_meshes=8, vertices=800, options=[])
    row = training_row(host, 4, tmp_path, found)
    assert row == {
        "steps_per_second": 10.0,
        "vertices_per_second": 4000.0,
        "epoch_steps_per_second": 5.0,
        "waiting": 0.15,
        "exchange": 0.1,
        "exchanged_bytes": 40,
        "steps_measured": 3,
        "command_seconds": 5.0,
    }


def test_shares_of_linear_scaling() -> None:
    measured = [(1, "plain", 4, 100.0), (1, "plain", 8, 160.0), (2, "torchrun", 8, 180.0), (2, "torchrun", 6, None)]
    names = ("ranks", "launcher", "batch", "vertices_per_second")
    rows = with_shares([dict(zip(names, row, strict=True)) for row in measured])
    assert [(row["weak"], row["strong"]) for row in rows] == [(1.0, 1.0), (None, 1.0), (0.9, 0.5625), (None, None)]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_program(tmp_path: Path) -> None:
    """Two gloo ranks on small meshes."""
    for seed in range(6):
        mesh = ellipsoid(seed, 1 + seed % 2)
        folder = tmp_path / "set" / ("train" if seed < 5 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(folder / f"{seed}.ply")
        np.savetxt(folder / f"{seed}.txt", mesh.verts[:, 0] > 0, fmt="%d")
    out = tmp_path / "out"
    small = "--ranks 1 2 --batches 4 --copies 3 --steps 4 --k 6 --device cpu --width 8 --blocks 1"
    scaling.main(["--data", str(tmp_path / "set"), "--out", str(out), *small.split()])
    rows = {(row["ranks"], row["launcher"], row["batch"]): row for row in read_csv(out / "scaling.csv")}
    assert list(rows) == [("1", "plain", "4"), ("1", "torchrun", "4"), ("2", "torchrun", "4"), ("2", "torchrun", "8")]
    assert [row["error"] for row in rows.values()] == [""] * 4
    assert rows["2", "torchrun", "8"]["exchanged_bytes"] == rows["2", "torchrun", "4"]["exchanged_bytes"] != "0"
    assert 0 < float(rows["2", "torchrun", "8"]["waiting"]) < 1
    preprocessed = read_csv(out / "preprocessing.csv")
    assert [(row["ranks"], row["meshes"], row["error"]) for row in preprocessed] == [("2", "18", ""), ("1", "18", "")]
    assert all(float(row[phase]) > 0 for row in preprocessed for phase in ("read", "solve", "write"))
    whole, killed, resumed = read_csv(out / "resume.csv")
    assert int(killed["epochs"]) < int(whole["epochs"]) == int(resumed["epochs"])
    assert (whole["error"], resumed["error"]) == ("", "")
    assert "missing" in killed["error"]
    np.testing.assert_allclose(float(resumed["train_loss"]), float(whole["train_loss"]), rtol=1e-4)
    assert (out / "scaling.png").stat().st_size > 0
    assert json.loads((out / "run.json").read_text())["seconds"].keys() >= {"training", "preprocessing", "resume"}
