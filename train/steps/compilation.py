"""Compiles the kernels of a training run while its meshes are preprocessed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
import trimesh

from diffnet.cuda_graphs.forward import graphed
from diffnet.cuda_graphs.recording import trial
from diffnet.cuda_graphs.sizes import size_of
from diffnet.data import LabeledMesh, LabeledMeshes, Sample, Statistics, TargetsAt, collate_samples
from diffnet.data.features import prepare
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.launcher import compile_ahead
from diffnet.train.batches import Batch, keep_on_device
from diffnet.train.checkpoint import build_model
from diffnet.train.device import matmul_dtype
from diffnet.train.evaluate import network_outputs
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep, make_optimizer
from diffnet.train.tasks.registry import task_named


@contextmanager
def compiled_meanwhile(
    data: LabeledMeshes,
    options: TrainOptions,
    device: torch.device,
    statistics: Statistics | None = None,
    capture: bool = True,
) -> Iterator[None]:
    """Compile the kernels of training steps and evaluations in a thread, until the block ends or all are compiled.

    Compiling takes about ten seconds once per machine, and kernels for a sphere serve meshes of all sizes. Nothing
    happens on the CPU and with `--backend torch`. Steps on pairs of meshes compile theirs when they start.

    The thread draws random numbers, so the block should draw none from PyTorch's generators.
    """
    if device.type != "cuda" or options.backend != "auto" or task_named(options.task).pairs is not None:
        yield
        return

    def work() -> None:
        # The first step itself says what is wrong, if anything.
        with suppress(NotCapturable, torch.OutOfMemoryError), trial():
            compile_step(data, options, device, statistics, capture)

    thread = threading.Thread(target=work, name="compile", daemon=True)
    thread.start()
    yield
    thread.join()


def compile_step(
    data: LabeledMeshes,
    options: TrainOptions,
    device: torch.device,
    statistics: Statistics | None = None,
    capture: bool = True,
) -> None:
    """Compile the kernels of training steps and evaluations, in several threads."""
    model = build_model(options, data.label_names, data.labels_at, statistics).to(device)
    step = TrainingStep(model, make_optimizer(model, options, device), options, device)
    sample = _sphere(data.train[0], data.labels_at, model.in_channels, options)
    (sample,) = keep_on_device([sample], device, matmul_dtype(options.precision, device))
    if capture:
        step.capture(data.labels_at, [sample.operators])
        graphed(model, first_visits=0)
    # Some kernels have a variant for single meshes.
    batch = sample if options.batch_meshes == 1 else collate_samples([sample, sample])
    step.compile(Batch(batch.features, batch.labels, batch.operators))
    evaluated = partial(network_outputs, model, sample, options, device)
    if capture:
        evaluated()  # compiles before it records
    else:
        compile_ahead(evaluated, model.parameters())


def _sphere(item: LabeledMesh, labels_at: TargetsAt, channels: int, options: TrainOptions) -> Sample:
    """A preprocessed sphere with labels like those of a mesh, and about as many vertices up to 10,242."""
    vertices = max(len(item.mesh.verts), options.k + 1)
    ball = trimesh.creation.icosphere(next((n for n in (3, 4) if 10 * 4**n >= vertices), 5))
    mesh, operators = prepare(ball, options.preprocessing)
    size, labels = size_of(operators, {labels_at} & {"faces", "edges"}), torch.as_tensor(item.labels)
    labels = labels.new_zeros(getattr(size, labels_at), *labels.shape[1:])
    return Sample(("sphere",), torch.zeros(len(mesh.verts), channels), labels, operators)
