"""Captured training steps. Without a GPU, graphs are emulated: a replay calls the recorded function again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from graph_emulator import EmulatedGraph
from runs import InMemory, ball
from shapes import spheres

from diffnet import DiffusionNet
from diffnet.cuda_graphs import lane
from diffnet.cuda_graphs.buffers import BatchBuffers
from diffnet.data import LabeledMesh, LabeledMeshes, LabelsAt, Sample, TargetsAt, collate_samples, make_sample
from diffnet.data.places import row_numbers, rows_at
from diffnet.geometry import element_areas, load_mesh, random_rotations
from diffnet.ops.common.cuda_graph import capturable_stream, record
from diffnet.train.checkpoint import build_model
from diffnet.train.device import matmul_dtype
from diffnet.train.loop import RunData, train
from diffnet.train.options import TrainOptions
from diffnet.train.resident import DeviceSamples
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.segmentation import TASK
from diffnet.train.tasks.task import task_named

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def prepared(data: LabeledMeshes, options: TrainOptions, device: torch.device = CPU) -> list[Sample]:
    samples = [make_sample(item, options.preprocessing) for item in data.train]
    if device == CPU:
        return [replace(s, operators=s.operators.with_gradient_evecs()) for s in samples]
    return DeviceSamples(InMemory(samples), device, matmul_dtype(options.precision, device))


def chosen(**given: Any) -> TrainOptions:
    return TrainOptions(
        **{"features": "xyz", "rotate": False, "k": 6, "width": 8, "blocks": 1, "dropout": 0.0, **given}
    )


def others(task: str, at: TargetsAt, vectors: int = 0) -> LabeledMeshes:
    """Meshes of two sizes with classes at whole meshes, or with vectors and two more targets, some of them missing."""
    items, names = [], [*(f"w_{i}" for i in range(3 * vectors)), "u", "v"]
    for i in range(7):
        mesh, labels = load_mesh(ball(i, 1 + i % 2)), np.array(i % 2)
        if task == "regression":
            count = len(row_numbers(mesh, at)) if at != "edges" else len(element_areas(mesh, at))
            labels = np.random.default_rng(i).normal(size=(count, len(names))).astype(np.float32)
            labels[::3, i % 2] = np.nan
            for place, rows in rows_at(labels, len(mesh.verts), at) if isinstance(at, tuple) else ():
                rows[:, [each != place for each in at]] = np.nan
        items.append(LabeledMesh(str(i), mesh, labels))
    return LabeledMeshes(items, items[:2], names, at)


def model_of(data: LabeledMeshes, options: TrainOptions) -> DiffusionNet:
    torch.manual_seed(0)
    return build_model(options, data.label_names, data.labels_at)


def step_of(data: LabeledMeshes, options: TrainOptions, device: torch.device = CPU) -> TrainingStep:
    return TrainingStep(task_named(options.task), model_of(data, options).to(device), options, device)


def losses(
    data: LabeledMeshes,
    options: TrainOptions,
    batches: list[Sample],
    capture: bool,
    rotate: bool = False,
    device: torch.device = CPU,
    meshes: list[Sample] | None = None,
) -> Any:
    """The losses of steps, and their tally. meshes: the samples of the batches, by default these."""
    step = step_of(data, options, device)
    if capture:
        recorder = {"recorder": EmulatedGraph} if device == CPU else {}
        step.capture([s.operators for s in meshes or batches], **recorder)
    found = [step(batch, random_rotations(len(batch.operators)) if rotate else None) for batch in batches]
    return torch.stack(found), step.tally


@pytest.mark.parametrize(
    ("features", "rotate"),
    [("xyz", False), ("xyz", True), ("xyz+normals+hks", True)],
    ids=["fixed", "rotated", "rotated-vectors"],
)
@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_captured_steps_train_as_others_do(at: LabelsAt, features: str, rotate: bool) -> None:
    data = spheres(at, (0, 1, 2, 1))
    options = chosen(features=features)
    batches = prepared(data, options) * 3
    before = EmulatedGraph.replays
    captured, matrix = losses(data, options, batches, True, rotate)
    assert EmulatedGraph.replays - before == len(batches) - 2  # 12 and 42 vertices share buffers of 128
    plain, expected = losses(data, options, batches, False, rotate)
    torch.testing.assert_close(captured, plain, rtol=1e-5, atol=1e-6)
    assert matrix.sum() == expected.sum()
    assert (matrix - expected).abs().sum() <= 4  # ties may fall the other way


def test_recording_steps_does_not_wait_for_pytorch_s_compiler() -> None:
    code = (
        "import sys; from test_captured_steps import *; data = spheres('vertices', (0, 1)); options = chosen(); "
        "losses(data, options, prepared(data, options), True); "
        "print(EmulatedGraph.replays, 'sympy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.split() == ["1", "False"]


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(
    ("task", "at", "given"),
    [
        ("segmentation", "vertices", {"label_loss": "focal"}),
        ("segmentation", "vertices", {"label_loss": "generalized-dice"}),
        ("segmentation", "vertices", {"class_weights": "1,0.25,4,2"}),
        ("segmentation", "faces", {"label_loss": "dice"}),
        ("segmentation", "edges", {"label_loss": "dice+cross-entropy"}),
        ("classification", "meshes", {}),
        ("classification", "meshes", {"label_smoothing": 0.2}),
        ("classification", "meshes", {"label_loss": "dice"}),
        *(
            ("regression", at, {"loss": loss})
            for at in ("vertices", "faces", "edges", "meshes")
            for loss in ("mse", "huber")
        ),
        ("regression", "vertices", {"targets": "vector:w+file:u+file:v", "target_weights": "1,1,1,2,0.5"}),
        ("regression", "faces", {"targets": "vector:w+file:u+file:v"}),
        ("regression", (*["vertices"] * 3, "faces", "meshes"), {"targets": "vector:w+file:u+table:v"}),
    ],
    ids=str,
)
def test_captured_steps_of_each_task(task: Any, at: Any, given: dict[str, Any], device: torch.device) -> None:
    """Elements that are added to a batch on buffers have no targets and change nothing. The steps learn."""
    options = chosen(task=task, batch_meshes=3, learning_rate=0.01, precision="fp32", **given)
    data = spheres(at, (1, 2, 1, 2, 1, 2)) if task == "segmentation" else others(task, at, options.vectors)
    samples = [make_sample(item, options.preprocessing).to(device) for item in data.train]
    batches = [collate_samples([samples[i] for i in batch]) for batch in ((0, 1, 2), (3, 4, 5), (1, 4, 0))]
    (plain, expected), (captured, tally) = (
        losses(data, options, batches * 4, capture, False, device, samples) for capture in (False, True)
    )
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-6)
    labels = torch.cat([batch.labels for batch in batches])
    if task == "regression":
        torch.testing.assert_close(tally, expected, rtol=1e-4, atol=1e-5)
        assert expected[:, 0].sum() == 4 * (~labels.isnan()).sum()
    else:
        assert (tally - expected).abs().sum() <= (12 if task == "segmentation" else 0)  # ties may fall the other way
        assert tally.sum() == expected.sum() == 4 * (labels >= 0).sum()
    assert plain[-3:].sum() < plain[:3].sum()


@pytest.mark.parametrize("sizes", [(3, 2, 1), (1, 2, 3)], ids=["largest first", "smallest first"])
def test_first_steps_of_later_sizes_leave_nothing_in_the_memory_of_the_graphs(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = spheres("vertices", sizes), chosen()
    batches = prepared(data, options)
    step = step_of(data, options)
    step.capture([s.operators for s in batches], EmulatedGraph)
    makes, rows_in_pool, is_open = BatchBuffers.rows, [], False

    call = DiffusionNet.forward

    def forward(self: DiffusionNet, features: torch.Tensor, operators: Any) -> torch.Tensor:
        if is_open:
            rows_in_pool.append(len(features))
        return call(self, features, operators)

    @contextmanager
    def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
        nonlocal is_open
        is_open = True
        yield
        is_open = False
        assert all(p.grad is None for p in step.model.parameters())

    def rows(*arguments: Any, **given: Any) -> torch.Tensor:
        assert not is_open, "a buffer is made in the memory of the graphs"
        return makes(*arguments, **given)

    monkeypatch.setattr(lane, "allocating_in", allocating_in)
    monkeypatch.setattr(BatchBuffers, "rows", rows)
    monkeypatch.setattr(DiffusionNet, "forward", forward)
    found = torch.stack([step(batch) for batch in batches * 2])
    # The first size has no graphs yet. If it is not the largest one, the memory of the largest one is taken next.
    assert rows_in_pool == ([704, 176, 704] if sizes[0] == 1 else [176, 128])
    torch.testing.assert_close(found, losses(data, options, batches * 2, False)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"diffusion": "implicit"}, "training runs without CUDA graphs: implicit diffusion"),
        ({}, "not permitted when stream is capturing"),
    ],
)
def test_steps_that_cannot_be_recorded_train_and_say_so(given: dict[str, Any], message: str) -> None:
    data, options = spheres("vertices", (0, 1)), chosen(**given)
    batches = prepared(data, options) * 3
    step = step_of(data, options)
    refusal = RuntimeError("operation not permitted when stream is capturing")
    step.capture([s.operators for s in batches], Mock(side_effect=refusal))
    with pytest.warns(RuntimeWarning, match=message) as caught:
        found = torch.stack([step(batch) for batch in batches])
    assert len(caught) == 1
    torch.testing.assert_close(found, losses(data, options, batches, False)[0])


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("given", [{}, {"accumulate": 2, "batch_meshes": 2}], ids=str)
def test_frozen_blocks_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, given: dict[str, Any]
) -> None:
    """Only the last layer is trained, and the blocks have no dropout."""
    data, options = spheres("vertices", (2, 3, 2, 3)), chosen(**given, dropout=0.5)
    torch.manual_seed(1)
    network = build_model(options, data.label_names, "vertices")
    options = replace(options, start="the network", freeze="blocks", epochs=3)
    samples = prepared(data, options, device)

    def captured(*arguments: Any) -> TrainingStep:
        step = TrainingStep(*arguments)
        step.capture([s.operators for s in samples], EmulatedGraph)
        return step

    runs = {}
    for capture in (False, True):
        if capture and device == CPU:
            monkeypatch.setattr("diffnet.train.loop.TrainingStep", captured)
        (tmp_path / str(capture)).mkdir()
        run_data, before = RunData(TASK, data, samples, samples[:2], start=network), EmulatedGraph.replays
        runs[capture] = train(run_data, options, tmp_path / str(capture), device=device, capture=capture)["model"]
        assert (EmulatedGraph.replays > before) == (capture and device == CPU)
    for name, weight in network.state_dict().items():
        torch.testing.assert_close(runs[True][name], runs[False][name], rtol=1e-5, atol=1e-6)
        assert torch.equal(runs[True][name].cpu(), weight) == (not name.startswith("last.")), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("task", "at", "given"),
    [
        *(
            ("segmentation", at, given)
            for at in ("vertices", "faces", "edges")
            for given in (
                *({}, {"rotate": True}, {"batch_meshes": 3}, {"batch_vertices": 900}, {"attention_heads": 2}),
                *({"mlp_norm": "rms"}, {"average_weights": 0.9}),
            )
        ),
        *(
            ("classification", "meshes", {"label_smoothing": smoothing, **given})
            for smoothing in (0.0, 0.2)
            for given in ({}, {"batch_meshes": 3}, {"batch_vertices": 400})
        ),
        *(
            ("regression", at, {"loss": "huber", **given})
            for at in ("vertices", "faces", "edges", "meshes")
            for given in ({}, {"batch_meshes": 3}, {"batch_vertices": 400})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_runs_equal_plain_ones(
    task: Any, at: Any, given: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    data = spheres(at, (2, 3, 2, 3, 4, 3, 2)) if task == "segmentation" else others(task, at)
    options = chosen(**{"task": task, "k": 16, "width": 32, "precision": precision, "epochs": 5, **given})
    samples = prepared(data, options, GPU)
    statistics = {"mean": [0.0, 0.0], "std": [1.0, 1.0]} if task == "regression" else None
    rows = []
    for capture in (False, True):
        out = tmp_path / str(capture)
        out.mkdir()
        run_data = RunData(task_named(task), data, samples, samples[:2], target_statistics=statistics)
        run = train(run_data, options, out, device=GPU, capture=capture)
        names = [name for name in run["history"][0] if name.startswith(("train_", "test_"))]
        rows.append([[row[name] or 0 for name in names] for row in run["history"]])
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(rows[1], rows[0], rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_a_resumed_run_equals_a_whole_one_whatever_sizes_it_meets_first(tmp_path: Path) -> None:
    data = spheres("vertices", (2, 3, 4, 2, 3, 1))
    samples = prepared(data, chosen(), GPU)
    found = []
    for name, stops in (("whole", [4]), ("resumed", [1, 3, 4])):
        out = tmp_path / name
        out.mkdir()
        for i, epochs in enumerate(stops):
            options = chosen(k=6, width=32, dropout=0.5, epochs=epochs, eval_every=1, schedule="step")
            run = train(RunData(TASK, data, samples, samples[:2]), options, out, device=GPU, resume=i > 0)
        found.append(([{**row, "seconds": None} for row in run["history"]], run["model"]))
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


@pytest.mark.gpu
def test_captured_steps_wait_for_nothing() -> None:
    data = spheres("vertices", (2, 3, 4))
    options = chosen(k=16, width=32, batch_meshes=2, dropout=0.5)
    samples = prepared(data, options, GPU)
    batches = [collate_samples([samples[i], samples[j]]) for i in range(3) for j in range(3)]
    step = step_of(data, options, GPU)
    step.capture([s.operators for s in samples])
    for batch in batches:
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_another_thread_may_use_the_gpu_during_a_recording() -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                torch.randn(1 << 20, pin_memory=True).to("cuda", non_blocking=True).sum().item()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        x = torch.ones(1 << 16, device="cuda")
        out = torch.zeros_like(x)

        def add() -> None:
            out.copy_(x * 2 + out)

        for _ in range(20):
            with capturable_stream():
                add()
                graph, _ = record(add)
            graph.replay()
        torch.cuda.synchronize()
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
