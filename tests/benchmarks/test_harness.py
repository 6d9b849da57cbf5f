"""The command of the benchmarks and its files; timing, arithmetics, sweeps and peers; the benchmarks at tiny sizes."""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from rich.console import Console

from diffnet import DiffusionNet, collate
from diffnet.benchmarks import BENCHMARKS, Benchmark, Case, Options, Unavailable, benchmark
from diffnet.benchmarks.__main__ import main
from diffnet.benchmarks.cases import preprocessing, shards
from diffnet.benchmarks.cases.mlp import moved_columns
from diffnet.benchmarks.catalog import PEERS, catalog
from diffnet.benchmarks.harness import registry as registry_module, run, timing
from diffnet.benchmarks.harness.arithmetic import arithmetic, floor_ms
from diffnet.benchmarks.harness.peers import both_passes, first_made, where_implemented
from diffnet.benchmarks.harness.results import read_csv, rows
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.harness.timing import Failure, Measurement, measure
from diffnet.benchmarks.loops import command, exported, inference, peers, train_step, training_loop, workload
from diffnet.benchmarks.original.network import original_meshes, original_network
from diffnet.ops.common.backend import HAS_TRITON

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `python -m diffnet.benchmarks` with the given arguments on a device, and returns its exit code."""

    def called(*arguments: object, device: str = "cpu") -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments), "--device", device])
        try:
            main()
        except SystemExit as e:
            return int(e.code or 0)
        return 0

    return called


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Benchmark]:
    """An empty registry in place of the real one."""
    mine: dict[str, Benchmark] = {}
    # The command imports BENCHMARKS from the package to resolve "all", which no test with this fixture uses.
    monkeypatch.setattr(registry_module, "BENCHMARKS", mine)
    monkeypatch.setattr(run, "BENCHMARKS", mine)
    return mine


def test_peers_take_turns() -> None:
    calls: list[str] = []
    found = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.1)
    rounds = len(found["a"].milliseconds)
    assert 5 <= rounds <= 200
    assert calls == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * rounds


class Clock:
    """A clock that moves in `sleep` only, so that a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which peers are measured."""
    mine = Clock()
    monkeypatch.setattr(timing, "time", mine)
    return mine


def test_the_measured_runs(clock: Clock) -> None:
    calls: list[int] = []
    found = measure({"loop": lambda: (calls.append(1), clock.sleep(0.001))}, CPU, seconds=0.01, warm_up=7)["loop"]
    assert len(calls) == 7 + len(found.milliseconds)
    found = measure({"short": lambda: clock.sleep(0.002), "long": lambda: clock.sleep(0.02)}, CPU, seconds=0.05)
    for name, milliseconds in (("short", 2), ("long", 20)):
        assert found[name].milliseconds == pytest.approx([milliseconds] * 5)
    calls.clear()
    found = measure({"slow": lambda: (calls.append(1), clock.sleep(0.05))}, CPU, seconds=0.01)
    assert len(calls) == 1  # a slow peer runs once
    assert found["slow"].milliseconds == pytest.approx([50])


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
    assert set(found["compiled"].milliseconds) == {250}
    assert calls == ["slow"] * 2 + ["compiled"] * (3 + len(found["compiled"].milliseconds))


def test_calls_of_a_loop_are_averaged(clock: Clock) -> None:
    calls: list[int] = []

    def sleep() -> None:
        calls.append(1)
        clock.sleep(0.004 if len(calls) % 2 else 0.008)

    found = measure({"loop": sleep}, CPU, seconds=0.01, wall_clock=True, calls=2)["loop"]
    assert len(calls) == 2 * (3 + len(found.milliseconds))
    assert found.milliseconds == pytest.approx([6] * 5)
    assert found.gpu_ms is None


def raising(error: Exception) -> Callable[[], None]:
    """A peer that fails."""
    return Mock(side_effect=error)


def test_failures_say_why() -> None:
    later = iter(range(5))
    errors = {"absent": Unavailable("needs a GPU"), "large": MemoryError(), "broken": KeyError("x")}
    peers = {name: raising(error) for name, error in errors.items()}
    found = measure({**peers, "later": lambda: next(later), "fine": lambda: None}, CPU, seconds=0.1)
    assert found["absent"] == Failure("needs a GPU", expected=True)
    assert found["large"] == Failure("out of memory", expected=True)
    assert found["broken"] == Failure("KeyError: 'x'", expected=False)
    assert found["later"] == Failure("StopIteration: ", expected=False)
    assert isinstance(found["fine"], Measurement)
    assert list(found) == ["absent", "large", "broken", "later", "fine"]


def test_two_benchmarks_of_one_name(registry: dict[str, Benchmark]) -> None:
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


def test_share_of_the_design() -> None:
    """A peer that moves twice the fewest bytes in as long as a copy of these takes is at the limit of its design."""
    kind, peers = arithmetic("bf16"), dict.fromkeys(("ours", "other", "busy"), lambda: None)
    executed, moved = {"busy": 4 * 680e9}, {"ours": 2 * 4.27e9, "busy": 4.27e9}
    case = Case({}, peers, flops=1e6, bytes=4.27e9, kind=kind, executed_flops=executed, design_bytes=moved)
    found = {peer: Measurement((ms,), None) for peer, ms in {"ours": 2.5, "other": 4.0, "busy": 8.0}.items()}
    assert [row["floor_share"] for row in rows(case, found)] == [0.4, 0.25, 0.125]
    assert [row["design_share"] for row in rows(case, found)] == [0.8, None, 0.5]
    assert rows(replace(case, kind=None), found)[0]["design_share"] is None


@pytest.mark.skipif(not HAS_TRITON, reason="the sizes of tiles are Triton's")
def test_columns_that_an_mlp_moves() -> None:
    """Up to 128 channels, one kernel computes all layers, so hidden layers are written and not read again."""
    for c, forward, backward in ((128, 6, 16), (256, 9, 19)):
        inputs, weights = [torch.empty(9, c).half()] * 3, [torch.empty(c, n).half() for n in (3 * c, c, c)]
        assert moved_columns("forward", inputs, weights) == forward
        assert moved_columns("backward", inputs, weights) == backward


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
    with pytest.raises(Unavailable, match=r"not implemented for 'Half'$"):
        where_implemented(raising(NotImplementedError("'addmm' not implemented for 'Half'\nmore")))()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        where_implemented(raising(RuntimeError("shapes do not fit")))()


# ---- the benchmarks themselves, at tiny sizes ----


TINY = Options(CPU, vertices=(12,), widths=(5,), k=6, dtypes=("fp32",), seconds=0, compile=False)
KERNELS = ["to-spectral", "gradient-features", "direct-gradient-features", "mlp", "train-step"]
KERNELS += ["inference", "training-loop"]

NAMES = sorted(BENCHMARKS.keys() - {"command", "data-set"})
SLOW = pytest.param("data-set", marks=pytest.mark.slow)  # starts processes several times


@pytest.mark.parametrize("name", [*NAMES, SLOW])
def test_every_benchmark_runs_at_tiny_sizes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU, kernels run in Triton's interpreter."""
    gc.freeze()  # each measurement collects garbage, which takes 0.1 s with the objects of the imports
    for module, sizes in (
        (preprocessing, {"MESHES": 2, "TORUS": 40, "SET": 16, "SMALL": 2}),
        (shards, {"MESHES": 2}),
        (training_loop, {"MESHES": 2, "BATCH": 2, "PASSES": 2}),
        (train_step, {"STEPS": 1}),
        (inference, {"CALLS": 1}),
        (exported, {"CALLS": 1}),
        (workload, {"BLOCKS": 1}),
    ):
        for size, value in sizes.items():
            monkeypatch.setattr(module, size, value)
    # Plots take longer than these benchmarks. `test_files_of_a_run` looks at one.
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


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
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


# ---- the command: its options, and the files it writes ----


def test_files_of_a_run(registry: dict, bench: Callable[..., int], tmp_path: Path) -> None:
    held: list[str] = []
    absent = raising(Unavailable("no, really"))

    @benchmark("mine", metrics=("TFLOP/s",))
    def cases(options: Options) -> Iterator[Case]:
        """Something of mine.

        More about it.
        """
        for v in options.vertices or (10, 100):
            held.append("in")
            peers = {"sleep": lambda: time.sleep(0.001), "absent": absent}
            yield Case({"vertices": v}, peers, flops=2e6, bytes=1e6, executed_flops={"sleep": 4e6})
            held.append("out")

    out = tmp_path / "a" / "b"
    assert registry["mine"].summary == "Something of mine."
    assert bench("mine", "--out", out, "--seconds", 0.1, "--vertices", "1_000,7") == 0
    assert held == ["in", "out"] * 2
    table = read_csv(out / "mine.csv")
    assert [(r["vertices"], r["peer"]) for r in table] == [*product(("1000", "7"), ("sleep", "absent"))]
    ms = float(table[0]["median_ms"])
    assert float(table[0]["q1_ms"]) <= ms <= float(table[0]["q3_ms"])
    assert ms >= 1
    for rate, expected in {"tflops": 2e-3, "executed_tflops": 4e-3, "gbps": 1}.items():
        assert float(table[0][rate]) == pytest.approx(expected / ms, rel=1e-3)
    assert 5 <= int(table[0]["runs"]) <= 200
    assert table[1]["error"] == "no, really"
    assert table[1]["median_ms"] == ""
    with Image.open(out / "mine.png") as picture:
        assert picture.width > 100
    run = json.loads((out / "run.json").read_text())
    assert run["benchmarks"] == ["mine"]
    assert run["command"][:4] == ["python", "-m", "diffnet.benchmarks", "mine"]
    assert run["options"]["vertices"] == [1000, 7]
    assert run["versions"]["torch"] == torch.__version__


@pytest.fixture
def commas(registry: dict[str, Benchmark]) -> None:
    """A benchmark "mine" with a comma in the name of a peer."""

    @benchmark("mine")
    def cases(options: Options) -> Iterator[Case]:
        yield Case({"vertices": 1}, dict.fromkeys(("one", "one, two", "two"), lambda: None))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("one, two", ["one, two"]), ("one,two", ["one", "two"]), ("two,one, two, one", ["two", "one, two", "one"])],
)
def test_names_of_peers_may_contain_commas(
    asked: str, expected: list[str], commas: None, bench: Callable[..., int], tmp_path: Path
) -> None:
    assert bench("mine", "--out", tmp_path, "--seconds", 0, "--peers", asked) == 0
    assert [row["peer"] for row in read_csv(tmp_path / "mine.csv")] == expected


@pytest.mark.usefixtures("commas")
def test_unknown_peers(bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, unknown in (("one,three", "'three'"), ("one two", "'one two'"), ("", "''")):
        assert bench("mine", "--out", tmp_path, "--peers", asked) == 1
        assert f"no peer is called {unknown}" in capsys.readouterr().err


def test_a_broken_peer_fails_the_run_at_its_end(
    registry: dict, bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("mine")
    def cases(options: Options) -> Iterator[Case]:
        yield Case({"vertices": 1}, {"broken": lambda: {}["x"], "fine": lambda: None})
        yield Case({"vertices": 2}, {"fine": lambda: None})

    assert bench("mine", "--out", tmp_path, "--seconds", 0) == 1
    assert "mine, vertices 1, broken: KeyError: 'x'" in capsys.readouterr().err
    assert [bool(r["error"]) for r in read_csv(tmp_path / "mine.csv")] == [True, False, False]


def test_bad_arguments(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ("nothing", "'nothing'"),
        ("to-spectral", "--out"),
        ("to-spectral --out . --vertices 1e3", "'1e3'"),
        ("to-spectral --out . --dtypes int8", "'int8'"),
        ("to-spectral --out . --vertices 9 --peers nobody", "'nobody'"),
        ("command --out .", "needs --data"),
    ):
        assert bench(*arguments.split()) == 1
        assert message in capsys.readouterr().err


def test_the_catalog_agrees_with_the_registry() -> None:
    expected = {name: (b.summary, b.metrics) for name, b in BENCHMARKS.items()}
    assert {name: (entry.summary, entry.metrics) for name, entry in catalog().items()} == expected


def test_the_list_loads_no_pytorch() -> None:
    code = "from diffnet.benchmarks.__main__ import main, sys\ntry: main()\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    ran = subprocess.run([sys.executable, "-c", code, "--list"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0
    assert all(name in ran.stdout for name in (*BENCHMARKS, *PEERS))
    assert ran.stdout.endswith("False\n")


def test_whole_commands(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of a recipe share their caches, and each writes its own folder. A failed run says why."""
    started = []

    def run(command: list[str], env: dict[str, str], **options: object) -> SimpleNamespace:
        given = dict(zip(command[5::2], command[6::2], strict=False))
        started.append((given["--out"], given["--cache"], env["TRITON_CACHE_DIR"]))
        if "xyz" in command:
            return SimpleNamespace(returncode=1, stderr="diffnet: no such folder")
        Path(given["--out"]).mkdir(parents=True)
        results = {"preprocessing_seconds": 1.5, "training_seconds": 2.5, "test_accuracy": 0.75, "more": 1}
        (Path(given["--out"]) / "results.json").write_text(json.dumps(results))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    assert bench("command", "--out", tmp_path, "--data", tmp_path) == 1
    assert "exit code 1: diffnet: no such folder" in capsys.readouterr().err
    table = read_csv(tmp_path / "command.csv")
    assert [(r["options"], r["peer"], r["training_seconds"], r["test_accuracy"]) for r in table] == [
        ("--recipe original", "cold caches", "2.5", "0.75"),
        ("--recipe original", "warm caches", "2.5", "0.75"),
        ("--recipe original --batch-meshes 4", "warm caches", "2.5", "0.75"),
        ("--recipe original --features xyz", "warm caches", "", ""),
        ("none", "cold caches", "2.5", "0.75"),
        ("none", "warm caches", "2.5", "0.75"),
    ]
    outs, caches, triton = (set(values) for values in zip(*started, strict=True))
    assert (len(outs), len(caches), len(triton)) == (6, 2, 2)
