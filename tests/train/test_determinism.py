"""With a seed, training gives the same weights in every run, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from diffnet.data import LabeledMesh, LabeledMeshes, LabelsAt, Sample, make_sample
from diffnet.geometry import make_mesh, mesh_edges
from diffnet.train.batches import keep_on_device
from diffnet.train.checkpoint import Checkpoint
from diffnet.train.device import matmul_dtype
from diffnet.train.loop import train
from diffnet.train.options import TrainOptions

OPTIONS = TrainOptions(features="xyz", k=8, width=32, blocks=1, epochs=3, eval_every=3, seed=4, dropout=0.3)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Sums that depend on the order of threads show only with several of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["vertices", "faces", "edges"])
def labeled(request: pytest.FixtureRequest) -> tuple[LabeledMeshes, list[Sample]]:
    """Two ellipsoids of 2562 vertices, large enough for two threads, and their samples."""
    at: LabelsAt = request.param
    items = []
    for i in range(2):
        ball = trimesh.creation.icosphere(4)
        verts = ball.vertices * np.random.default_rng(i).uniform(0.6, 1.4, 3)
        faces = np.asarray(ball.faces)
        corners = {"vertices": np.arange(len(verts))[:, None], "faces": faces, "edges": mesh_edges(faces)}[at]
        labels = (verts[corners, 2].mean(axis=1) > 0).astype(np.int64)
        items.append(LabeledMesh(f"ball {i}", make_mesh(verts, faces, name=f"ball {i}"), labels))
    data = LabeledMeshes(items, items[:1], ["low", "high"], at)
    return data, [make_sample(item, OPTIONS.preprocessing) for item in items]


def trained(labeled: tuple[LabeledMeshes, list[Sample]], out: Path, device: torch.device, **given: bool) -> Checkpoint:
    """The last checkpoint of a run, after unrelated random draws, which the seed must override."""
    data, samples = labeled
    torch.rand(len(list(out.parent.iterdir())))
    out.mkdir()
    kept = keep_on_device(samples, device, matmul_dtype(OPTIONS.precision, device))
    return train(data, kept, kept[:1], OPTIONS, out, device=device, **given)


def assert_equal(one: Checkpoint, other: Checkpoint) -> None:
    """The weights, the optimizer's state and the table of two runs are equal bit by bit."""
    for key in one["model"]:
        assert torch.equal(one["model"][key], other["model"][key]), key
    for i, state in one["optimizer"]["state"].items():
        assert all(torch.equal(state[key], other["optimizer"]["state"][i][key]) for key in state), i
    rows = [[{**row, "seconds": None} for row in run["history"]] for run in (one, other)]
    assert rows[0] == rows[1]


def test_runs_on_the_cpu_are_equal(labeled: tuple[LabeledMeshes, list[Sample]], tmp_path: Path) -> None:
    runs = [trained(labeled, tmp_path / str(i), torch.device("cpu")) for i in range(3)]
    assert len(runs[0]["history"]) == OPTIONS.epochs
    for run in runs[1:]:
        assert_equal(runs[0], run)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
def test_runs_on_a_gpu_are_equal(labeled: tuple[LabeledMeshes, list[Sample]], tmp_path: Path, capture: bool) -> None:
    runs = [trained(labeled, tmp_path / str(i), torch.device("cuda"), capture=capture) for i in range(4)]
    for run in runs[1:]:
        assert_equal(runs[0], run)


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_is_equal(labeled: tuple[LabeledMeshes, list[Sample]], tmp_path: Path) -> None:
    device = torch.device("cuda")
    whole = trained(labeled, tmp_path / "whole", device)
    data, samples = labeled
    kept = keep_on_device(samples, device, matmul_dtype(OPTIONS.precision, device))

    def stop(row: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "parted").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(data, kept, kept[:1], OPTIONS, tmp_path / "parted", device=device, after_epoch=stop)
    assert_equal(whole, train(data, kept, kept[:1], OPTIONS, tmp_path / "parted", device=device, resume=True))
