"""Timing, arithmetics, sweeps and peers, and the benchmarks themselves at tiny sizes."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from diffnet import DiffusionNet, collate
from diffnet.benchmarks import BENCHMARKS, Case, Options, Unavailable, benchmark
from diffnet.benchmarks.cases import preprocessing, shards
from diffnet.benchmarks.harness import run, timing
from diffnet.benchmarks.harness.arithmetic import arithmetic, floor_ms
from diffnet.benchmarks.harness.peers import both_passes, first_made, where_implemented
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.harness.timing import Failure, Measurement, measure
from diffnet.benchmarks.loops import exported, inference, peers, train_step, training_loop, workload
from diffnet.benchmarks.original.network import original_meshes, original_network

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def test_peers_take_turns() -> None:
    calls: list[str] = []
    found = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.1)
    rounds = len(found["a"].milliseconds)
    assert 5 <= rounds <= 200
    assert calls == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * rounds


def test_more_runs_before_the_first_measured_one() -> None:
    calls: list[int] = []
    found = measure({"loop": lambda: calls.append(1)}, CPU, seconds=0.01, warm_up=7)["loop"]
    assert isinstance(found, Measurement)
    assert len(calls) == 7 + len(found.milliseconds)


def test_times_are_those_of_the_work() -> None:
    found = measure({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, CPU, seconds=0.05)
    short, long = (sorted(found[name].milliseconds)[2] for name in ("short", "long"))
    assert 2 <= short < 10 <= 20 <= long < 60


def test_a_slow_peer_runs_once() -> None:
    calls: list[int] = []
    found = measure({"slow": lambda: (calls.append(1), time.sleep(0.05))}, CPU, seconds=0.01)
    assert len(calls) == 1
    assert found["slow"].milliseconds[0] >= 50


def test_a_slow_peer_on_a_gpu_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may compile."""
    calls: list[str] = []

    def run(name: str, seconds: Sequence[float]) -> float:
        calls.append(name)
        return 1e3 * seconds[min(calls.count(name), len(seconds)) - 1]

    # These three functions are the only ones that touch the device, so replacing them simulates a GPU.
    monkeypatch.setattr(timing.Timer, "time_and_peak_mb", lambda timer, peer: (peer(), 0.0))
    monkeypatch.setattr(timing.Timer, "time", lambda timer, peer: peer())  # returns milliseconds of `run` above
    monkeypatch.setattr(timing, "_release", lambda device: None)  # would empty the memory pool of a GPU
    peers = {"slow": partial(run, "slow", [9, 8]), "compiled": partial(run, "compiled", [9, 0.25])}
    found = measure(peers, torch.device("cuda"), seconds=1, flush=False)
    assert found["slow"] == Measurement((8000,), 0)
    compiled = found["compiled"]
    assert isinstance(compiled, Measurement)
    assert set(compiled.milliseconds) == {250}
    assert calls == ["slow"] * 2 + ["compiled"] * (3 + len(compiled.milliseconds))


def test_calls_of_a_loop_are_averaged() -> None:
    calls: list[int] = []

    def sleep() -> None:
        calls.append(1)
        time.sleep(0.004 if len(calls) % 2 else 0.008)

    found = measure({"loop": sleep}, CPU, seconds=0.01, wall_clock=True, calls=2)["loop"]
    assert isinstance(found, Measurement)
    assert len(calls) == 2 * (3 + len(found.milliseconds))
    assert all(6 <= ms < 30 for ms in found.milliseconds)
    assert found.gpu_ms is None


def test_failures_say_why() -> None:
    def absent() -> None:
        raise Unavailable("needs a GPU")

    def too_large() -> None:
        raise MemoryError

    def broken() -> None:
        raise KeyError("x")

    later = iter(range(5))
    found = measure(
        {"absent": absent, "large": too_large, "broken": broken, "later": lambda: next(later), "fine": lambda: None},
        CPU,
        seconds=0.1,
    )
    assert found["absent"] == Failure("needs a GPU", expected=True)
    assert found["large"] == Failure("out of memory", expected=True)
    assert found["broken"] == Failure("KeyError: 'x'", expected=False)
    assert found["later"] == Failure("StopIteration: ", expected=False)
    assert isinstance(found["fine"], Measurement)
    assert list(found) == ["absent", "large", "broken", "later", "fine"]


def test_two_benchmarks_of_one_name(registry: dict) -> None:
    def cases(options: Options) -> Iterator[Case]:
        yield from ()

    benchmark("twice")(cases)
    with pytest.raises(ValueError, match="'twice' is already registered"):
        benchmark("twice")(cases)
    assert list(registry) == ["twice"]


def test_floor() -> None:
    """Gradient features in the direct form, at C = 256 and 2¹⁹ vertices, are bound by arithmetic, not by memory."""
    kind = arithmetic("bf16")
    assert floor_ms(12 * 128 * 256 * 2**19, 0, kind) == pytest.approx(0.303, rel=0.01)
    assert floor_ms(0, 4.27e9, kind) == pytest.approx(1)


def test_sweep_takes_options_before_defaults_and_sets_the_precision() -> None:
    before = torch.get_float32_matmul_precision()
    found = []
    for size in sweep(Options(CPU, widths=(3, 4)), dtypes=("tf32", "bf16"), widths=(8,), vertices=(10,)):
        found.append((size.parameters(k=2), torch.get_float32_matmul_precision()))
    assert found == [
        ({"dtype": dtype, "k": 2, "width": width, "vertices": 10}, precision)
        for dtype, precision in (("tf32", "high"), ("bf16", "highest"))
        for width in (3, 4)
    ]
    assert torch.get_float32_matmul_precision() == before


def test_both_passes_compute_the_outputs_and_the_gradients() -> None:
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 5.0], requires_grad=True)
    (forward, outputs), (backward, gradients) = both_passes(CPU, {"product": lambda: x * y}, [x, y], kernels=())
    assert (forward, backward) == ("forward", "backward")
    assert outputs["product"]().tolist() == [3.0, 10.0]
    x_grad, y_grad = gradients["product"]()  # y ∘ g and x ∘ g, for a random g
    assert (x_grad != 0).all()
    torch.testing.assert_close(x_grad * x, y_grad * y)
    torch.testing.assert_close(gradients["product"](), (x_grad, y_grad))  # the graph is kept


def test_kernels_are_unavailable_on_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for _, found in both_passes(CPU, {"triton": lambda: torch.ones(1)}, []):
        with pytest.raises(Unavailable, match=r"need a GPU|isn't installed"):
            found["triton"]()


def test_a_peer_is_made_once_and_only_if_it_is_called() -> None:
    made: list[int] = []
    peer = first_made(lambda: made.append(1) or (lambda: "done"))
    assert made == []
    assert [peer(), peer()] == ["done", "done"]
    assert made == [1]


def test_only_missing_implementations_are_unavailable() -> None:
    def missing() -> None:
        raise NotImplementedError("'addmm' not implemented for 'Half'\nmore")

    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(Unavailable, match=r"not implemented for 'Half'$"):
        where_implemented(missing)()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        where_implemented(broken)()


# ---- the benchmarks themselves, at tiny sizes ----


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
