"""The kernels of a run on a GPU that is not present: those that another process compiles ahead, and those of the run.

Tensors lie on the CPU and say that they are on a GPU. Kernels are compiled, but not run. test_kernels_ahead.py runs
this in a process of its own, without the interpreter. The arguments are "compile", "collect" or "new", and options of
`TrainOptions` and `labels_at` as JSON, once or several times. A line is printed for each. With "compile", it is how
many kernels Triton's cache has after the process, and after the run. With "collect", nothing is compiled, and it is how
many kernels the process would compile, and which others the run needs. With "new", nothing is compiled, and it is how
many kernels no earlier run has needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import trimesh
from step_costs import pretend
from torch import Tensor
from triton.runtime.jit import JITFunction

from diffnet.cuda_graphs.forward import Settings, use_graphs
from diffnet.data import LabeledMesh, LabeledMeshes, Sample, TargetsAt, collate_samples, make_sample
from diffnet.geometry.mesh.mesh import make_mesh
from diffnet.ops.compilation import process
from diffnet.ops.compilation.process import compiled_meanwhile
from diffnet.train.checkpoint import build_model
from diffnet.train.device import matmul_dtype
from diffnet.train.evaluate import evaluate
from diffnet.train.options import TrainOptions
from diffnet.train.steps.kernels_ahead import launches_of_run
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.registry import task_named

CPU = torch.device("cpu")
triton_run, is_cuda = JITFunction.run, Tensor.is_cuda
variants: set[str] = set()


class Replay:
    """Stands in for a CUDA graph."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self.replay = function


def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    triton_run(kernel, *arguments, grid=grid, warmup=True, **options)


def note(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    _, specialization, launch_options = kernel.device_caches[0][-1](*arguments, **options, debug=False)
    variants.add(f"{kernel.__name__} {specialization} {launch_options}")


def on_gpu(sample: Sample, options: TrainOptions) -> Sample:
    """The sample as `keep_on_device` makes it."""
    dtype = matmul_dtype(options.precision, CPU)
    return replace(sample, operators=sample.operators.with_gradient_evecs().with_basis_dtype(dtype))


def in_cache() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def labeled_spheres(at: TargetsAt) -> LabeledMeshes:
    spheres = [trimesh.creation.icosphere(n) for n in (1, 2, 2)]
    of_each = {"vertices": "vertices", "faces": "faces", "edges": "edges_unique"}
    labels = [np.arange(len(getattr(s, of_each[at])) if at in of_each else 1) % 7 for s in spheres]
    meshes = [make_mesh(s.vertices, s.faces, name="sphere") for s in spheres]
    items = [LabeledMesh("sphere", *each) for each in zip(meshes, labels, strict=True)]
    return LabeledMeshes(items, items[:1], [str(i) for i in range(7)], at)


def stamps() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("diffnet-*")))


def new_kernels(options: TrainOptions, at: TargetsAt) -> int:
    data, before = labeled_spheres(at), stamps()
    pretend(note)
    launches = launches_of_run(task_named(options.task), data, options, None, CPU)
    with mock.patch.object(process, "FEWEST", 1000), compiled_meanwhile(launches, 90):
        pass  # no process starts
    Tensor.is_cuda = is_cuda  # type: ignore[assignment]
    return stamps() - before


def compare(compiles: bool, options: TrainOptions, at: TargetsAt) -> list[Any]:
    data = labeled_spheres(at)
    samples = [on_gpu(make_sample(item, options.preprocessing), options) for item in data.train]

    pretend(compile_only if compiles else note)
    launches = launches_of_run(task_named(options.task), data, options, None, CPU)
    if compiles:
        with compiled_meanwhile(launches, 90):
            pass
        ahead: Any = in_cache()
        with mock.patch("subprocess.Popen", side_effect=AssertionError), compiled_meanwhile(launches, 90):
            pass  # the same kernels need no other process
    else:
        variants.clear()
        for launch in launches:
            launch.compile()
        ahead = set(variants)

    model = build_model(options, data.label_names, data.labels_at)
    step = TrainingStep(task_named(options.task), model, options, CPU)
    step.capture(data.labels_at, [sample.operators for sample in samples], Replay)
    batch = options.batch_meshes or len(samples)
    for first in range(0, len(samples), batch):
        step(collate_samples(samples[first : first + batch]))
    use_graphs(model, Settings(model.outputs_at, 0, Replay))
    evaluate(task_named(options.task), model, samples[:1], options, CPU)
    Tensor.is_cuda = is_cuda  # type: ignore[assignment]
    return [ahead, in_cache()] if compiles else [len(ahead), sorted(variants - ahead)]


def main() -> None:
    torch.set_num_threads(1)
    for text in sys.argv[2:]:
        given = {"features": "xyz", "precision": "bf16", "rotate": False, **json.loads(text)}
        at = given.pop("labels_at", "vertices")
        options, mode = TrainOptions(**given), sys.argv[1]
        counts = new_kernels(options, at) if mode == "new" else compare(mode == "compile", options, at)
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
