"""The command `diffnet bench`: its options, and the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from diffnet.benchmarks import BENCHMARKS, Case, Options, Unavailable, benchmark
from diffnet.benchmarks.catalog import PEERS, catalog
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.loops import command
from diffnet.train.commands.console import console


def test_files_of_a_run(registry: dict, bench: Callable[..., int], tmp_path: Path) -> None:
    held: list[str] = []

    def absent() -> None:
        raise Unavailable("no, really")

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
    with Image.open(out / "mine.png") as picture:
        assert picture.width > 100
    run = json.loads((out / "run.json").read_text())
    assert run["benchmarks"] == ["mine"]
    assert run["command"][:3] == ["diffnet", "bench", "mine"]
    assert run["options"]["vertices"] == [1000, 7]
    assert run["versions"]["torch"] == torch.__version__


@pytest.fixture
def commas(registry: dict) -> None:
    """A benchmark "mine" with a comma in the name of a peer."""

    @benchmark("mine")
    def cases(options: Options) -> Iterator[Case]:
        yield Case({"vertices": 1}, dict.fromkeys(("one", "one, two", "two"), lambda: None))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("one, two", ["one, two"]),
        ("one,two", ["one", "two"]),
        ("two,one, two, one", ["two", "one, two", "one"]),
    ],
)
def test_names_of_peers_may_contain_commas(
    asked: str, expected: list[str], commas: None, bench: Callable[..., int], tmp_path: Path
) -> None:
    assert bench("mine", "--out", tmp_path, "--seconds", 0, "--peers", asked) == 0
    assert [row["peer"] for row in read_csv(tmp_path / "mine.csv")] == expected


@pytest.mark.parametrize(("asked", "unknown"), [("one,three", "'three'"), ("one two", "'one two'"), ("", "''")])
def test_unknown_peers(
    asked: str,
    unknown: str,
    commas: None,
    bench: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["nothing"], "'nothing'", id="benchmark"),
        pytest.param(["to-spectral"], "--out", id="out"),
        pytest.param(["to-spectral", "--out", ".", "--vertices", "1e3"], "'1e3'", id="vertices"),
        pytest.param(["to-spectral", "--out", ".", "--dtypes", "int8"], "'int8'", id="dtypes"),
        pytest.param(["to-spectral", "--out", ".", "--vertices", "9", "--peers", "nobody"], "'nobody'", id="peers"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


def test_list(bench: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)
    assert bench("--list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*BENCHMARKS, *PEERS))


def test_the_catalog_agrees_with_the_registry() -> None:
    expected = {name: (b.summary, b.metrics) for name, b in BENCHMARKS.items()}
    assert {name: (entry.summary, entry.metrics) for name, entry in catalog().items()} == expected


def test_the_list_loads_no_pytorch() -> None:
    code = "import sys; from diffnet.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code, "bench", "--list"], env=environment, capture_output=True, text=True
    )
    assert "train-step" in ran.stdout
    assert ran.stdout.endswith("False\n")


def test_the_command_needs_data(bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("command", "--out", tmp_path) == 1
    assert "needs --data" in capsys.readouterr().err


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
