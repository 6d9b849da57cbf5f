"""The measurement of several ranks."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from shapes import ellipsoid

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks.scaling import WARM, Host, main, training_row, with_shares
from diffnet.benchmarks.tasks.timed_rank import Times


def host(work: Path) -> Host:
    return Host(2, "cpu", 8, 4, work, work, train_meshes=8, vertices=800, options=[])


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
    row = training_row(host(tmp_path), 4, tmp_path, found)
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
    rows = with_shares(
        [
            {"ranks": ranks, "launcher": launcher, "batch": batch, "vertices_per_second": rate}
            for ranks, launcher, batch, rate in measured
        ]
    )
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
    small = ["--ranks", "1", "2", "--batches", "4", "--copies", "3", "--steps", "4", "--k", "6", "--device", "cpu"]
    main(["--data", str(tmp_path / "set"), "--out", str(out), *small, "--width", "8", "--blocks", "1"])
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
