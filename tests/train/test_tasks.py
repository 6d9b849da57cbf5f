"""A new task needs no change outside `train/tasks/`: a copy of a task under another name behaves as the task does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
import trimesh
from rich.console import Console

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, MeshPairs, PairShape
from diffnet.geometry import Mesh, make_mesh
from diffnet.train import TrainOptions, predict_values, run_evaluation, run_training
from diffnet.train.correspondence.scoring import as_labeled
from diffnet.train.tasks import registry
from diffnet.train.tasks.correspondence import CORRESPONDENCE
from diffnet.train.tasks.registry import task_named
from diffnet.train.tasks.regression import REGRESSION
from diffnet.train.tasks.task_options import TASK_OPTIONS, TaskName

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
SMALL: dict[str, Any] = {"k": 8, "width": 8, "blocks": 1, "epochs": 2, "eval_every": 1}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a copy of a task under the name "other", and returns the name."""

    def register(name: TaskName) -> str:
        copy = replace(task_named(name), name="other")  # type: ignore[arg-type]
        monkeypatch.setitem(registry._TASKS, "other", copy)  # there is no public way to add a task while running
        monkeypatch.setitem(TASK_OPTIONS, "other", TASK_OPTIONS[name])
        monkeypatch.setattr("diffnet.train.options.TaskName", Literal[(*get_args(TaskName), "other")])
        return "other"

    return register


def body(seed: int) -> Mesh:
    ball = trimesh.creation.icosphere(1)
    return make_mesh(ball.vertices * np.random.default_rng(seed).uniform(0.5, 1.5, 3), ball.faces)


def regression() -> tuple[LabeledMeshes, None]:
    items = [LabeledMesh(f"m{i}", body(i), 100 + body(i).verts[:, :1]) for i in range(4)]
    return LabeledMeshes(items[:3], items[3:], ["x"], "vertices"), None


def correspondence() -> tuple[LabeledMeshes, MeshPairs]:
    shapes = [PairShape(f"m{i}", body(i), np.arange(42)) for i in range(4)]
    pairs = MeshPairs(shapes[:2], shapes[2:], [(0, 1)], [(0, 1)])
    return as_labeled(pairs, 10), pairs


@pytest.mark.parametrize(("original", "data_set"), [(REGRESSION, regression), (CORRESPONDENCE, correspondence)])
def test_a_copy_of_a_task_behaves_as_the_task(other, tmp_path, original, data_set):
    data, pairs = data_set()
    own = {"map_k": 6} if pairs else {"targets": "file:x", "loss": "l1"}
    found = []
    for name in (original.name, other(original.name)):
        out = tmp_path / name
        where = {"device": CPU, "cache_dir": tmp_path / "cache", "jobs": 1, "console": QUIET}
        trained = run_training(data, TrainOptions(task=name, **SMALL, **own), out, pairs=pairs, **where)
        network = DiffusionNet.load(out / "last.pt")
        scored = run_evaluation(pairs or data, network, out / "scores", **where)
        assert (trained["task"], scored["task"]) == (name, name)
        values = None if pairs else predict_values([data.test[0].mesh], network, CPU)[0][1].tolist()
        files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if "tensorboard" not in path.parts)
        found.append((compared(trained), compared(scored), values, files))
    assert found[0] == found[1]


def compared(results: dict[str, Any]) -> dict[str, Any]:
    """The entries of results.json that depend neither on the time nor on the name of the task."""
    varying = ("task", "date", "preprocessing_seconds", "training_seconds")
    kept = {name: value for name, value in results.items() if name not in varying}
    return {**kept, "options": {**kept.get("options", {}), "task": None}}
