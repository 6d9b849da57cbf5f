"""Steps of `diffnet train` over samples that stay on the device, and over samples that are read for each step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import trimesh
from rich.console import Console
from torch import Tensor

from diffnet.benchmarks.harness.registry import Case, Options, Run, Unavailable, benchmark
from diffnet.data import LabeledMesh, LabeledMeshes, MeshBatches, Sample, index_dataset
from diffnet.data.prepared import PreparedSamples
from diffnet.geometry import load_mesh
from diffnet.train.batches import packed
from diffnet.train.checkpoint import build_model
from diffnet.train.device import matmul_dtype
from diffnet.train.options import TrainOptions
from diffnet.train.preprocessing import preprocess
from diffnet.train.resident import MEMORY, DeviceSamples
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.segmentation import TASK

MESHES = 24
LARGEST = 20_000  # vertices of generated meshes; the smallest has a tenth
WARM_UP = 3  # passes, in which graphs are recorded
DETAILS = ("steps_per_second", "gb_per_second")


@benchmark("streaming", x="batch")
def streaming(options: Options) -> Iterator[Case]:
    """Steps of `diffnet train segmentation` with everything resident, and with every sample read from the cache.

    The meshes are the training meshes of the folder --data, or 24 generated ones of up to 20,000 vertices. Each peer
    trains for whole passes over the meshes, at least --seconds. `gb_per_second` counts the bytes of the samples that
    pass to the device. The files of "streamed" are in the page cache of the system, and those of "cold" are dropped
    from it before each pass.
    """
    with TemporaryDirectory() as folder:
        cache = Path(folder)
        chosen = TrainOptions(k=options.k or 128, width=(options.widths or (256,))[0])
        if options.data is None:
            generated = _generated((options.vertices or (LARGEST,))[0])
            data = LabeledMeshes(generated, [], ["a", "b"], "vertices")
        else:
            data = index_dataset(options.data, cache)
        quiet = Console(quiet=True)
        samples = preprocess(data.train, chosen.preprocessing, {}, data.labels_at, cache, None, quiet, options.device)
        samples.backward = False
        os.sync()  # otherwise, the system writes the cache to the disk while the first peers run, and slows them
        for batch in (1, 4):
            run = partial(_train, samples, chosen, batch, data, options)
            peers: dict[str, Run] = {
                "resident": partial(run, resident=True),
                "streamed": run,
                "cold": partial(run, folder=cache),
            }
            yield Case({"meshes": len(samples), "batch": batch}, peers, details=DETAILS)


def _generated(largest: int) -> list[LabeledMesh]:
    items = []
    for i, size in enumerate(np.linspace(largest / 10, largest, MESHES)):
        sections = max(round((size / 2) ** 0.5), 3)
        mesh = load_mesh(trimesh.creation.torus(1.0, 0.4, major_sections=2 * sections, minor_sections=sections))
        mesh.verts[:] *= np.random.default_rng(i).uniform(0.8, 1.2, 3)
        items.append(LabeledMesh(f"torus {i}", mesh, (mesh.verts[:, 0] > 0).astype(np.int64)))
    return items


def _train(
    samples: PreparedSamples,
    chosen: TrainOptions,
    batch: int,
    data: LabeledMeshes,
    options: Options,
    resident: bool = False,
    folder: Path | None = None,
) -> dict[str, float]:
    """Train for some passes. folder: the cache whose files are dropped from the page cache before each pass"""
    device = options.device
    memory = 2**10 if resident else MEMORY if device.type == "cuda" else 1e-9
    share = 0.9 if resident else 0.0
    placed = DeviceSamples(samples, device, matmul_dtype(chosen.precision, device), memory, share)
    if resident:
        _ = [placed[i] for i in range(len(placed))]
        if not placed.is_resident:
            raise Unavailable("the samples don't fit on the device")
    torch.manual_seed(0)
    network = build_model(chosen, data.label_names, data.labels_at).to(device).train()
    step = TrainingStep(TASK, network, chosen, device)
    if device.type == "cuda":
        step.capture(placed.sizes())
    batches = MeshBatches(placed.vertex_counts, meshes=batch, shuffle=True)
    steps, seconds = 0, 0.0
    for number in range(10_000):
        if folder is not None:
            _drop_pages(folder)
        started = time.perf_counter()
        for sample in packed(placed, batches, device):
            step(sample)
            steps += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number < WARM_UP and device.type == "cuda":
            steps = 0
            continue
        seconds += time.perf_counter() - started
        if seconds >= options.seconds:
            break
    per_pass = 0.0 if resident else sum(map(_bytes, samples))
    passes = steps * batch / len(samples)
    return {"steps_per_second": steps / seconds, "gb_per_second": 1e-9 * per_pass * passes / seconds}


def _bytes(sample: Sample) -> int:
    """The bytes of all tensors of a sample, each once."""
    found = {id(x): x.nbytes for x in (sample.features, sample.labels)}

    def noted(x: Tensor) -> Tensor:
        found[id(x)] = x.nbytes
        return x

    sample.operators.map_tensors(noted)
    return sum(found.values())


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
