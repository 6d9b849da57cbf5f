"""Compiling the kernels of training steps while the meshes of a run are preprocessed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import trimesh

from diffnet.data import LabeledMesh, LabeledMeshes, make_sample
from diffnet.data.feature_names import array_names
from diffnet.geometry import load_mesh, mesh_edges
from diffnet.train.checkpoint import build_model
from diffnet.train.options import TrainOptions
from diffnet.train.resident import on_device
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.task import Task


@contextmanager
def kernels_compiled(
    task: Task[Any, Any], data: LabeledMeshes, options: TrainOptions, device: torch.device
) -> Iterator[None]:
    """Compile the kernels of training steps in a thread while the block runs. It ends when both are done.

    With an empty cache of Triton this takes many seconds, in which preprocessing leaves most cores idle. Networks on
    own arrays compile their kernels later, because only the meshes tell how many channels these have.

    The block must not rely on PyTorch's global random numbers: the thread draws some.
    """
    known = task.captured and not array_names(options.features)
    if device.type != "cuda" or options.backend != "auto" or not known:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile_step, task, data, options, device)
        yield
        compiled.result()


def compile_step(task: Task[Any, Any], data: LabeledMeshes, options: TrainOptions, device: torch.device) -> None:
    """Compile the kernels of a step on a small sphere, which serve meshes of any size."""
    mesh = load_mesh(trimesh.creation.icosphere(3 if options.k < 300 else 4))
    rows = {"vertices": [len(mesh.verts)], "faces": [len(mesh.faces)], "edges": [len(mesh_edges(mesh.faces))]}
    like = np.asarray(data.train[0].labels)
    labels = np.zeros([*rows.get(data.labels_at, []), *like.shape[data.labels_at in rows :]], like.dtype)
    sample = make_sample(LabeledMesh("sphere", mesh, labels), options.preprocessing)
    (sample,) = on_device([sample], device, task.basis_dtype(options, device))
    model = build_model(options, data.label_names, data.labels_at).to(device).train()
    TrainingStep(task, model, options, device).compile(sample)
