"""The benchmarks themselves, at tiny sizes."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from diffnet import DiffusionNet, collate
from diffnet.benchmarks import BENCHMARKS, Options
from diffnet.benchmarks.cases import preprocessing, shards
from diffnet.benchmarks.harness import run
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.loops import exported, inference, peers, train_step, training_loop, workload
from diffnet.benchmarks.original.network import original_meshes, original_network

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TINY = Options(CPU, vertices=(12,), widths=(5,), k=6, dtypes=("fp32",), seconds=0, compile=False)
KERNELS = [
    "to-spectral",
    "gradient-features",
    "direct-gradient-features",
    "mlp",
    "train-step",
    "inference",
    "training-loop",
]

no_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


SLOW = ["data-set"]  # starts processes several times
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in sorted(BENCHMARKS)
    if name != "command"
]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs_at_tiny_sizes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU, kernels run in Triton's interpreter."""
    gc.freeze()  # each measurement collects garbage, which takes 0.1 s with the objects of the imports
    monkeypatch.setattr(preprocessing, "MESHES", 2)
    monkeypatch.setattr(preprocessing, "TORUS", 40)
    monkeypatch.setattr(preprocessing, "SET", 16)
    monkeypatch.setattr(preprocessing, "SMALL", 2)
    monkeypatch.setattr(shards, "MESHES", 2)
    monkeypatch.setattr(training_loop, "MESHES", 2)
    monkeypatch.setattr(training_loop, "BATCH", 2)
    monkeypatch.setattr(training_loop, "PASSES", 2)
    monkeypatch.setattr(train_step, "STEPS", 1)
    monkeypatch.setattr(inference, "CALLS", 1)
    monkeypatch.setattr(exported, "CALLS", 1)
    monkeypatch.setattr(workload, "BLOCKS", 1)
    # Plots take longer than these benchmarks. test_command.py looks at one.
    monkeypatch.setattr(run, "plot", lambda *arguments: None)
    assert run.run_benchmarks([name], TINY, tmp_path, Console(quiet=True)) == []
    table = read_csv(tmp_path / f"{name}.csv")
    assert any(row["median_ms"] for row in table)
    if name in ("spmm", "sddmm"):
        assert all(row["median_ms"] for row in table if row["peer"] == "diffnet")
        assert "diffnet" in {row["peer"] for row in table}
    if name in KERNELS:
        assert {row["error"] for row in table} <= {"", "CUDA graphs need a GPU"}
        assert all(row["error"] == "" for row in table if row["peer"] in ("original", "plain", "diffnet"))


@no_compiler
@pytest.mark.slow
def test_compiled_peers(tmp_path: Path) -> None:
    options = replace(TINY, compile=True, peers="eager,compiled")
    assert run.run_benchmarks(["to-spectral"], options, tmp_path, Console(quiet=True)) == []
    table = read_csv(tmp_path / "to-spectral.csv")
    assert [(row["pass"], row["peer"], row["error"]) for row in table] == [
        (step, peer, "") for step in ("forward", "backward") for peer in ("eager", "compiled")
    ]


def test_the_original_form_computes_the_same_outputs_as_the_network() -> None:
    operators = collate([synthetic_operators(v, 6, CPU) for v in (30, 25)])
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=8, blocks=2, backend="torch").eval()
    for block in model.blocks:
        torch.nn.init.uniform_(block.diffusion.time, 0.01, 0.1)
    x = torch.randn(55, 3)
    expected = model(x, operators)
    out = original_network(model, x, original_meshes(operators), [30, 25])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotates", [False, True])
def test_loops_train_on_the_same_meshes(rotates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of three steps, with the same weights and rotations. Dropout draws other numbers."""
    monkeypatch.setattr(workload, "BLOCKS", 1)
    monkeypatch.setattr(workload, "DiffusionNet", partial(DiffusionNet, dropout=0.0))
    (size,) = sweep(replace(TINY, vertices=(60,)))
    work = workload.mixed_meshes(size, 6, 4, rotates=rotates)
    losses = []
    for make in (peers.original, partial(peers.loop, backend="torch")):
        torch.manual_seed(1)
        step = make(work)
        losses.append([step().item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_measured_on_the_gpu(bench: Callable[..., int], tmp_path: Path, name: str) -> None:
    sizes = ["--vertices", 300, "--widths", 32, "--k", 48, "--seconds", 0, "--no-compile"]
    assert bench(name, "--out", tmp_path, *sizes, device="cuda") == 0
    # Tiles for K = 128 may not fit the shared memory of a program at other sizes. A graph for each mesh serves no
    # batches. Everything else should run.
    errors = [row["error"] for row in read_csv(tmp_path / f"{name}.csv") if row["error"]]
    assert all("OutOfResources" in e or "batches of one mesh" in e for e in errors)


def test_preprocessing_finds_compressed_meshes(tmp_path: Path) -> None:
    mesh = preprocessing.bumpy_torus(60)
    off = f"OFF\n{len(mesh.verts)} {len(mesh.faces)} 0\n"
    off += "".join(f"{x} {y} {z}\n" for x, y, z in mesh.verts) + "".join(f"3 {a} {b} {c}\n" for a, b, c in mesh.faces)
    (tmp_path / "torus.off.gz").write_bytes(gzip.compress(off.encode()))
    (tmp_path / "notes.txt.gz").write_bytes(gzip.compress(b"not a mesh"))
    case = next(iter(preprocessing.precompute_cases(replace(TINY, meshes=tmp_path))))
    assert case.parameters["vertices"] == len(mesh.verts)
