"""Kernels of training steps are compiled on a small sphere, whatever the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from torch import Tensor

from diffnet.data import LabeledMesh, LabeledMeshes
from diffnet.geometry import load_mesh, mesh_edges
from diffnet.train.kernels_ahead import compile_step, kernels_compiled
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.registry import task_named


@pytest.mark.parametrize(
    ("task", "at"),
    [
        ("segmentation", "vertices"),
        ("segmentation", "faces"),
        ("segmentation", "edges"),
        ("classification", "meshes"),
        ("regression", "vertices"),
        ("regression", "meshes"),
    ],
)
def test_the_step_of_each_task(task: str, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is called as in training, and gives a finite loss."""
    losses: list[Tensor] = []

    def call(loss: Callable[[], Tensor], inputs: Iterable[Tensor]) -> None:
        losses.append(loss())
        assert all(x.requires_grad for x in inputs)

    monkeypatch.setattr("diffnet.train.steps.step.compile_ahead", call)
    mesh = load_mesh(trimesh.creation.icosphere(1))
    rows = {"vertices": [len(mesh.verts)], "faces": [len(mesh.faces)], "edges": [len(mesh_edges(mesh.faces))]}
    labels: Any = np.zeros(rows.get(at, []), np.int64)
    if task == "regression":
        labels = np.zeros([*rows.get(at, [1]), 3], np.float32)
    data = LabeledMeshes([LabeledMesh("a", mesh, labels)], [], ["a", "b", "c"], at)
    options = TrainOptions(task=task, k=16, width=8, blocks=1)
    compile_step(task_named(task), data, options, torch.device("cpu"))
    assert [loss.isfinite().item() for loss in losses] == [True]
    with kernels_compiled(task_named(task), data, options, torch.device("cpu")):
        pass
    assert len(losses) == 1  # without a GPU, nothing is compiled
