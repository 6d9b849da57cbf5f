"""The registry of benchmarks, their timing, and what `diffnet bench` writes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from diffnet import DiffusionNet, collate
from diffnet.__main__ import main
from diffnet.benchmarks import BENCHMARKS, Case, Options, Unavailable, benchmark
from diffnet.benchmarks.harness import timing
from diffnet.benchmarks.harness.arithmetic import arithmetic, floor_ms, matmul_precision
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.harness.timing import Failure, Measurement, measure
from diffnet.benchmarks.original.network import original_meshes, original_network

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
no_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A copy that a test may add to."""
    for module in ("registry", "run"):
        monkeypatch.setattr(f"diffnet.benchmarks.{module}.BENCHMARKS", BENCHMARKS.copy())
    mine: dict = {}
    monkeypatch.setattr("diffnet.benchmarks.harness.registry.BENCHMARKS", mine)
    monkeypatch.setattr("diffnet.benchmarks.harness.run.BENCHMARKS", mine)
    return mine


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `diffnet bench …`."""
    monkeypatch.setattr(sys, "argv", ["diffnet", "bench", *map(str, arguments), "--device", "cpu"])
    try:
        main()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_peers_take_turns() -> None:
    calls: list[str] = []
    found = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.2)
    rounds = len(found["a"].milliseconds)
    assert 5 <= rounds <= 200
    assert calls == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * rounds


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
    """The first call may have been compiling."""
    calls: list[str] = []

    def run(name: str, seconds: Sequence[float]) -> float:
        calls.append(name)
        return 1e3 * seconds[min(calls.count(name), len(seconds)) - 1]

    monkeypatch.setattr(timing, "_time_and_peak_mb", lambda peer, device: (peer(), 0.0))
    monkeypatch.setattr(timing, "_time", lambda peer, device, scratch: peer())
    monkeypatch.setattr(timing, "_release", lambda device: None)
    peers = {"slow": partial(run, "slow", [9, 8]), "compiled": partial(run, "compiled", [9, 0.25])}
    found = measure(peers, torch.device("cuda"), seconds=1, flush=False)
    assert found["slow"] == Measurement((8000,), 0)
    compiled = found["compiled"]
    assert isinstance(compiled, Measurement)
    assert set(compiled.milliseconds) == {250}
    assert calls == ["slow"] * 2 + ["compiled"] * (3 + len(compiled.milliseconds))


def test_what_cannot_run_says_so() -> None:
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
        seconds=0.2,
    )
    assert found["absent"] == Failure("needs a GPU", expected=True)
    assert found["large"] == Failure("out of memory", expected=True)
    assert found["broken"] == Failure("KeyError: 'x'", expected=False)
    assert found["later"] == Failure("StopIteration: ", expected=False)
    assert isinstance(found["fine"], Measurement)
    assert list(found) == ["absent", "large", "broken", "later", "fine"]


def test_two_benchmarks_of_one_name(registry: dict) -> None:
    benchmark("twice")(lambda options: iter(()))
    with pytest.raises(ValueError, match="'twice'"):
        benchmark("twice")(lambda options: iter(()))


def test_what_a_run_writes(registry: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[str] = []

    @benchmark("mine", metrics=("TFLOP/s",))
    def cases(options: Options) -> Iterator[Case]:
        """Something of mine.

        More about it.
        """
        for v in options.vertices or (10, 100):
            held.append("in")
            peers = {"sleep": lambda: time.sleep(0.001), "absent": lambda: _raise(Unavailable("no, really"))}
            yield Case({"vertices": v}, peers, flops=2e6, bytes=1e6, executed_flops={"sleep": 4e6})
            held.append("out")

    def _raise(error: Exception) -> None:
        raise error

    assert registry["mine"].summary == "Something of mine."
    assert bench(monkeypatch, "mine", "--out", tmp_path / "a" / "b", "--seconds", 0.2, "--vertices", "1_000,7") == 0
    assert held == ["in", "out"] * 2
    table = read_csv(tmp_path / "a" / "b" / "mine.csv")
    assert [(r["vertices"], r["peer"]) for r in table] == [
        ("1000", "sleep"),
        ("1000", "absent"),
        ("7", "sleep"),
        ("7", "absent"),
    ]
    ms = float(table[0]["median_ms"])
    assert float(table[0]["q1_ms"]) <= ms <= float(table[0]["q3_ms"])
    assert ms >= 1
    assert float(table[0]["tflops"]) == pytest.approx(2e6 / ms / 1e9, rel=1e-3)
    assert float(table[0]["executed_tflops"]) == pytest.approx(4e6 / ms / 1e9, rel=1e-3)
    assert float(table[0]["gbps"]) == pytest.approx(1e6 / ms / 1e6, rel=1e-3)
    assert 5 <= int(table[0]["runs"]) <= 200
    assert table[1]["error"] == "no, really"
    assert table[1]["median_ms"] == ""
    with Image.open(tmp_path / "a" / "b" / "mine.png") as picture:
        assert picture.width > 100
    run = json.loads((tmp_path / "a" / "b" / "run.json").read_text())
    assert run["benchmarks"] == ["mine"]
    assert run["command"][:3] == ["diffnet", "bench", "mine"]
    assert run["options"]["vertices"] == [1000, 7]
    assert run["versions"]["torch"] == torch.__version__


def test_peers_are_chosen_by_names_that_may_have_commas(
    registry: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("mine")
    def cases(options: Options) -> Iterator[Case]:
        yield Case({"vertices": 1}, dict.fromkeys(("one", "one, two", "two"), lambda: None))

    for asked, expected in (
        ("one, two", ["one, two"]),
        ("one,two", ["one", "two"]),
        ("two,one, two, one", ["two", "one, two", "one"]),
    ):
        assert bench(monkeypatch, "mine", "--out", tmp_path, "--seconds", 0, "--peers", asked) == 0
        assert [row["peer"] for row in read_csv(tmp_path / "mine.csv")] == expected
    for asked, unknown in (("one,three", "'three'"), ("one two", "'one two'"), ("", "''")):
        assert bench(monkeypatch, "mine", "--out", tmp_path, "--peers", asked) == 1
        assert unknown in capsys.readouterr().err


def test_a_broken_peer_fails_the_run_at_its_end(
    registry: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @benchmark("mine")
    def cases(options: Options) -> Iterator[Case]:
        yield Case({"vertices": 1}, {"broken": lambda: {}["x"], "fine": lambda: None})
        yield Case({"vertices": 2}, {"fine": lambda: None})

    assert bench(monkeypatch, "mine", "--out", tmp_path, "--seconds", 0) == 1
    assert "mine, vertices 1, broken: KeyError: 'x'" in capsys.readouterr().err
    assert [bool(r["error"]) for r in read_csv(tmp_path / "mine.csv")] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--out", "."], "'nothing'"),
        (["to-spectral"], "--out"),
        (["to-spectral", "--out", ".", "--vertices", "1e3"], "'1e3'"),
        (["to-spectral", "--out", ".", "--dtypes", "int8"], "'int8'"),
        (["to-spectral", "--out", ".", "--peers", "nobody"], "'nobody'"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(monkeypatch, *arguments) == 1
    assert message in capsys.readouterr().err


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(monkeypatch, "--list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_floor() -> None:
    """Of the direct form of gradient features at C = 256 and 2¹⁹ vertices: bound by arithmetic, not by memory."""
    kind = arithmetic("bf16")
    assert floor_ms(12 * 128 * 256 * 2**19, 0, kind) == pytest.approx(0.303, rel=0.01)
    assert floor_ms(0, 4.27e9, kind) == pytest.approx(1)


def test_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with matmul_precision(True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


KERNELS = ["to-spectral", "gradient-features", "direct-gradient-features", "mlp", "train-step", "inference"]
KERNELS += [name for name in BENCHMARKS if name.startswith("tune-")]
TINY = ["--vertices", "40", "--widths", "5", "--k", "6", "--dtypes", "fp32", "--seconds", "0", "--no-compile"]


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_runs_at_tiny_sizes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels too, in Triton's interpreter where there is no GPU."""
    peers = ["--peers", "table"] if name.startswith("tune-") else []
    assert bench(monkeypatch, name, "--out", tmp_path, *TINY, *peers) == 0
    table = read_csv(tmp_path / f"{name}.csv")
    assert any(row["median_ms"] for row in table)
    if name in KERNELS:
        assert {row["error"] for row in table} <= {"", "CUDA graphs need a GPU"}


@no_compiler
def test_compiled_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--compile", "--peers", "eager,compiled"]
    assert bench(monkeypatch, "to-spectral", "--out", tmp_path, *TINY, *options) == 0
    table = read_csv(tmp_path / "to-spectral.csv")
    assert [(row["pass"], row["peer"], row["error"]) for row in table] == [
        (step, peer, "") for step in ("forward", "backward") for peer in ("eager", "compiled")
    ]


def test_the_original_form_computes_what_the_network_does() -> None:
    operators = collate([synthetic_operators(v, 6, CPU) for v in (30, 25)])
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=8, blocks=2).eval()
    for block in model.blocks:
        torch.nn.init.uniform_(block.diffusion.time, 0.01, 0.1)
    x = torch.randn(55, 3)
    expected = model(x, operators)
    out = original_network(model, x, original_meshes(operators), [30, 25])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_kernels_are_measured_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = ["--vertices", "300", "--widths", "32", "--k", "48", "--seconds", "0", "--no-compile", "--device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["diffnet", "bench", *KERNELS, "--out", str(tmp_path), *sizes])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    for name in KERNELS:
        table = read_csv(tmp_path / f"{name}.csv")
        # Tiles for K = 128 may not fit a program's shared memory at other sizes; anything else should run.
        assert all(not row["error"] or "OutOfResources" in row["error"] for row in table), name
