"""With a seed, training gives the same weights in every run, bit by bit.

Run as a script, this file trains on the CPU with several threads and prints a hash of each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from runs import InMemory
from shapes import spheres

from diffnet.data import LabeledMeshes, LabelsAt, Sample, make_sample
from diffnet.train.checkpoint import Checkpoint
from diffnet.train.device import matmul_dtype
from diffnet.train.loop import RunData, train
from diffnet.train.options import TrainOptions
from diffnet.train.resident import DeviceSamples
from diffnet.train.tasks.segmentation import TASK

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPTIONS = TrainOptions(features="xyz", k=8, width=16, blocks=1, epochs=2, eval_every=2, seed=4, dropout=0.3)
CLASSES = 16
RUNS = 3
PLACES: tuple[LabelsAt, ...] = get_args(LabelsAt)

Labeled = tuple[LabeledMeshes, list[Sample]]


def ellipsoids(at: LabelsAt) -> Labeled:
    """Two meshes and their samples. Their sizes are large enough for PyTorch to use threads."""
    data = spheres(at, (4, 4), CLASSES, unlabeled=None)
    data = replace(data, test=data.train[:1])
    return data, [make_sample(item, OPTIONS.preprocessing) for item in data.train]


def train_once(labeled: Labeled, out: Path, device: torch.device, **given: Any) -> Checkpoint:
    data, samples = labeled
    kept = DeviceSamples(InMemory(samples), device, matmul_dtype(OPTIONS.precision, device))
    return train(RunData(TASK, data, kept, kept[:1]), OPTIONS, out, device=device, **given)


def digest(run: Checkpoint) -> str:
    """A hash of the weights, the optimizer's state, and the table of a run except its times."""
    found = hashlib.sha256()
    states = [run["model"], *run["optimizer"]["state"].values()]
    for state in states:
        for name, tensor in state.items():
            found.update(name.encode() + torch.as_tensor(tensor).cpu().numpy().tobytes())
    found.update(json.dumps([{**row, "seconds": None} for row in run["history"]]).encode())
    return found.hexdigest()


def digests(labeled: Labeled, device: torch.device, runs: int, **given: bool) -> list[str]:
    found = []
    for i in range(runs):
        with tempfile.TemporaryDirectory() as out:
            torch.rand(i)  # unrelated draws, which the seed must override
            found.append(digest(train_once(labeled, Path(out), device, **given)))
    return found


def main() -> None:
    print(json.dumps({at: digests(ellipsoids(at), CPU, RUNS) for at in PLACES}))


@pytest.fixture(scope="module")
def cpu_digests() -> dict[str, list[str]]:
    """Hashes of runs with four threads, by place of the labels.

    The runs have a process of their own, because threads that wait for a busy core should sleep: OpenMP reads its
    waiting policy once, at its start.
    """
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run(
        [sys.executable, __file__], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("at", PLACES)
def test_runs_on_the_cpu_are_equal(cpu_digests: dict[str, list[str]], at: LabelsAt) -> None:
    assert len(cpu_digests[at]) == RUNS
    assert len(set(cpu_digests[at])) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("at", PLACES)
def test_runs_on_a_gpu_are_equal(at: LabelsAt, capture: bool) -> None:
    assert len(set(digests(ellipsoids(at), GPU, RUNS, capture=capture))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("at", PLACES)
def test_a_resumed_run_on_a_gpu_is_equal(at: LabelsAt, tmp_path: Path) -> None:
    labeled = ellipsoids(at)
    (whole,) = digests(labeled, GPU, 1)
    with pytest.raises(KeyboardInterrupt):
        train_once(labeled, tmp_path, GPU, after_epoch=Mock(side_effect=KeyboardInterrupt))
    assert digest(train_once(labeled, tmp_path, GPU, resume=True)) == whole


if __name__ == "__main__":
    main()
