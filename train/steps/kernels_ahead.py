"""Compiles the kernels of a training run while its meshes are preprocessed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffnet.cuda_graphs.sizes import BatchSize, largest_batch
from diffnet.data import LabeledMeshes, Sample, Statistics
from diffnet.geometry.operators import blank
from diffnet.ops.common.launcher import without_running
from diffnet.ops.compilation.launches import Launch, collected_launches
from diffnet.ops.compilation.process import compiled_meanwhile
from diffnet.train.checkpoint import build_model
from diffnet.train.device import matmul_dtype
from diffnet.train.evaluate import network_outputs
from diffnet.train.loop import set_aside
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.task import Task

_LOG = logging.getLogger("diffnet")
MAX_VERTICES = 2**16  # of a stand-in; larger batches take the same kernels


@contextmanager
def kernels_compiled_meanwhile(
    task: Task[Any, Any],
    data: LabeledMeshes,
    options: TrainOptions,
    statistics: Statistics | None,
    device: torch.device,
) -> Iterator[None]:
    """On a GPU, compile the kernels of a run in another process while the block runs, see `compiled_meanwhile`.

    Kernels that are still missing are compiled before the first step. These are all kernels for tasks on pairs of
    meshes, implicit diffusion and attention.

    statistics: of the own arrays among the features
    """
    is_dense = options.diffusion == "spectral" and options.attention_heads == 0
    if device.type != "cuda" or not task.captured or not is_dense:
        yield
        return
    launches: list[Launch] = []
    try:
        launches = launches_of_run(task, data, options, statistics, device)
    except Exception as error:  # if it is not the fault of the stand-ins, the first step raises it again
        _LOG.warning("GPU kernels are compiled before the first step, because they are not known earlier: %s", error)
    torch.cuda.empty_cache()  # samples stay on the GPU if enough of its memory is free
    major, minor = torch.cuda.get_device_capability(device)
    with compiled_meanwhile(launches, 10 * major + minor):
        yield


def launches_of_run(
    task: Task[Any, Any],
    data: LabeledMeshes,
    options: TrainOptions,
    statistics: Statistics | None,
    device: torch.device,
) -> list[Launch]:
    """The launches of a training step and of an evaluation, one for each kernel, on batches whose values are 0."""
    fitted, _ = set_aside(data.train, options)
    sizes = [BatchSize(1, len(item.mesh.verts)) for item in fitted]
    largest = largest_batch(sizes, options.batch_meshes, options.batch_vertices)
    ends_with_one = largest.meshes > 1 and (options.batch_meshes is None or len(fitted) % options.batch_meshes == 1)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = build_model(options, data.label_names, data.labels_at, statistics).to(device)
        step = TrainingStep(task, model, options, device)
        batch, single = (_stand_in(size, data, model.in_channels, options, device) for size in (largest, sizes[0]))
        with collected_launches() as found:
            step.launch(batch)
            if ends_with_one:  # one mesh takes other kernels than several
                step.launch(single)
            without_running(lambda: network_outputs(model, single, options, device), [single.features])
    return list(found.values())


def _stand_in(
    size: BatchSize, data: LabeledMeshes, channels: int, options: TrainOptions, device: torch.device
) -> Sample:
    """A batch of a size on the device. All values are 0, and the first mesh has all vertices."""
    meshes, vertices = min(size.meshes, 2), min(size.rounded().vertices, MAX_VERTICES)
    faces = torch.arange(6 * vertices, device=device).reshape(-1, 3) % vertices
    features = torch.zeros(vertices, channels, device=device)
    basis = features.new_zeros(3, vertices, options.k, dtype=matmul_dtype(options.precision, device))
    operators = blank(vertices, options.k, device, meshes, faces=faces, evecs=basis[0], gradient_evecs=basis[1:])
    counts = {"meshes": meshes, "vertices": vertices, "faces": len(faces)}
    labeled = len(operators.edges) if data.labels_at == "edges" else counts[data.labels_at]
    example = torch.as_tensor(data.train[0].labels)
    labels = torch.zeros(labeled, *example.shape[1:], dtype=example.dtype, device=device)
    return Sample(("stand-in",), features, labels, operators)
