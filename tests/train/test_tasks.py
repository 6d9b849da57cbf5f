"""A new task, with its own options, command and score, needs no change outside `train/tasks/` and `train/options/`."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from copies import ends_of_copies, forget
from refusals import refused
from rich.console import Console
from rooms import ROOT
from runs import ball, results_of, table_of, write_ball

from diffnet import DiffusionNet
from diffnet.data import UNLABELED, LabeledMesh, LabeledMeshes, MeshPairs, PairedMeshes, PairShape, paired_meshes
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.errors import OptionError
from diffnet.train import TrainOptions, run_evaluation, run_training
from diffnet.train.options.shared import TaskName

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
SMALL: dict[str, Any] = {"k": 8, "width": 8, "blocks": 1, "epochs": 2, "eval_every": 1}


def body(seed: int) -> Mesh:
    return load_mesh(ball(seed))


def regression() -> LabeledMeshes:
    items = [LabeledMesh(f"m{i}", body(i), 100 + body(i).verts[:, :1]) for i in range(4)]
    return LabeledMeshes(items[:3], items[3:], ["x"], "vertices")


def correspondence() -> PairedMeshes:
    shapes = [PairShape(f"m{i}", body(i), np.arange(42)) for i in range(4)]
    return paired_meshes(MeshPairs(shapes[:2], shapes[2:], [(0, 1)], [(0, 1)]), 10)


@pytest.mark.parametrize(("task", "data_set"), [("segmentation", correspondence), ("correspondence", regression)])
def test_a_task_refuses_data_of_the_other_kind(
    task: TaskName, data_set: Callable[[], LabeledMeshes], tmp_path: Path
) -> None:
    message = "correspondence needs pairs of meshes|segmentation does not take pairs of meshes"
    where: dict[str, Any] = {"device": CPU, "cache_dir": tmp_path / "cache", "console": QUIET}
    refused(OptionError, f"^({message})$", run_training, data_set(), TrainOptions(task=task), tmp_path / "run", **where)
    at = "the network is for segmentation; pairs need one|computes features for correspondence; `diffnet match` uses"
    network = DiffusionNet(16, 3, width=8, blocks=1)
    network.metadata = {"task": task, "features": "hks", "k": 30, "normalize": True}
    refused(ValueError, at, run_evaluation, data_set(), network, tmp_path / "scores", **where)


def test_meshes_in_pairs_have_no_labels() -> None:
    whole, points = np.arange(42), np.array([3, 5])
    shapes = [PairShape("a", body(0), whole), PairShape("b", body(1), points), PairShape("c", body(2))]
    data = paired_meshes(MeshPairs(shapes, shapes[2:], [(0, 1), (0, 2), (1, 0)], []), 4)
    assert data.label_names == ["0", "1", "2", "3"]
    for item in data.train + data.test:
        assert item.labels.shape == (42,)
        assert (item.labels == UNLABELED).all()


# A task that predicts heights, where errors up to a tolerance don't count.
OPTIONS = """
from dataclasses import dataclass

from diffnet.options import option
from diffnet.train.options.shared import SharedOptions
from diffnet.train.options.task_options import TaskOptions


@dataclass(frozen=True)
class HeightOptions(SharedOptions):
    tolerance: float = option(0.0, "Errors up to this don't count.", least=0)
    remarks: tuple[str, ...] = option((), "What to remember.", flag="--remark")


OPTIONS = TaskOptions(
    help="Train a network that predicts heights.",
    data="Folder of meshes.",
    own=HeightOptions,
    prediction=("tolerance",),
    recipe={"tolerance": 0.25, "epochs": 2},
)
"""
TASK = """
import torch

from diffnet.data import load_targets
from diffnet.train.tasks.regression import Regression


class Heights(Regression):
    name = "heights"

    def loss(self, outputs, targets, options):
        return ((outputs - targets).abs() - options.tolerance).clamp(min=0).mean()

    def load(self, data, how, options):
        print("a set for tolerance", options.tolerance, how.needs_train)
        return load_targets(data[0], "file:height", seed=how.seed, cache_dir=how.cache, needs_train=how.needs_train)

    def new_tally(self, columns, device, options):
        return torch.zeros(2, dtype=torch.int64, device=device)

    def tally(self, predictions, targets, columns, options):
        near = (predictions - targets).abs() < 0.5
        return torch.stack([near.sum(), torch.tensor(near.numel())])

    def score(self, counts, options):
        return float(counts[0] / counts[1])

    def score_name(self, options):
        return "near"


TASK = Heights()
"""


def run_with_new_task(room: Path, commands: list[list[object]]) -> None:
    """With the room "train" of another folder."""
    forget("diffnet.train")
    forget("command")
    sys.modules["diffnet"].__path__.insert(0, str(room.parent))
    command = importlib.import_module("command")
    for arguments in commands:
        print(command.output(*arguments))
    options = importlib.import_module("diffnet.train").TrainOptions
    refused(ValueError, "tolerance is for heights, and the task is segmentation", options, tolerance=0.5)


def test_a_new_task_is_files_in_the_folder_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files are added to a copy of the room, and the name of the task and its options to the list of tasks."""
    monkeypatch.setenv("COLUMNS", "120")
    room = shutil.copytree(ROOT / "train", tmp_path / "copy" / "train")
    for name, text in {"options/heights.py": OPTIONS, "tasks/heights.py": TASK}.items():
        (room / name).write_text(text)
    for file, old, new in (
        ("__init__", "import correspondence, labels", "import correspondence, heights, labels"),
        ("__init__", "class TrainOptions(", "class TrainOptions(heights.HeightOptions, "),
        ("__init__", "TaskOptions] = {", 'TaskOptions] = {"heights": heights.OPTIONS, '),
        ("shared", "TaskName: TypeAlias = Literal[", 'TaskName: TypeAlias = Literal["heights", '),
    ):
        listed = (room / "options" / f"{file}.py").read_text()
        assert listed.count(old) == 1
        (room / "options" / f"{file}.py").write_text(listed.replace(old, new))
    data, run = tmp_path / "data", tmp_path / "run"
    for i in range(4):
        write_ball(data / f"m{i}.ply", i)
        np.save(data / f"m{i}.height.npy", ball(i).vertices[:, 2])
    where = ["--data", data, "--cache", tmp_path / "cache", "--jobs", 1, "--device", "cpu"]
    small = ["--features", "xyz", "--k", 8, "--width", 8, "--blocks", 1, "--schedule", "step"]
    train = ["train", "heights", *where, *small, "--out", run, "--remark", "a"]
    checkpoint = ["--checkpoint", run / "last.pt"]
    commands = [
        ["train", "heights", "--help"],
        train,
        [*train, "--resume", "--epochs", 3],
        ["evaluate", *checkpoint, *where, "--out", tmp_path / "scores"],
        ["predict", data / "m0.ply", *checkpoint, "--out", tmp_path / "m0.npy", "--device", "cpu"],
    ]
    assert ends_of_copies(run_with_new_task, [(room, commands)]) == [0]
    printed = capfd.readouterr().out
    assert "Errors up to this don't count." in printed
    assert "a set for tolerance 0.25 False" in printed
    results = results_of(run)
    assert (results["task"], results["judged_epoch"]) == ("heights", 3)
    assert (results["options"]["tolerance"], results["options"]["remarks"]) == (0.25, ["a"])
    assert results_of(tmp_path / "scores")["task"] == "heights"
    scores = [float(row["test_near"]) for row in table_of(run / "metrics.csv") if row["test_near"]]
    assert scores
    assert all(0 <= score <= 1 for score in scores)
    assert np.load(tmp_path / "m0.npy").shape == (42, 1)
