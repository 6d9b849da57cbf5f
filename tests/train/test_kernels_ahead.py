"""Another process compiles exactly the kernels that a run on a GPU needs, and no end of a run leaves it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from conftest import ROOT
from rich.console import Console

from diffnet.data import LabeledMesh, LabeledMeshes
from diffnet.geometry.mesh.mesh import make_mesh
from diffnet.ops.compilation import process
from diffnet.ops.compilation.launches import Launch
from diffnet.ops.compilation.process import compiled_meanwhile
from diffnet.train.options import TrainOptions
from diffnet.train.recipes import recipe
from diffnet.train.run import run_training
from diffnet.train.steps import kernels_ahead
from diffnet.train.tasks.registry import task_named

pytest.importorskip("triton")

NARROW = {"width": 16, "k": 16, "blocks": 1}
RUNS = [
    {},
    {**NARROW, "batch_meshes": 2},
    {"width": 128, "dropout": 0.3, "label_smoothing": 0.1},
    {"width": 48, "k": 24, "mlp_norm": "layer", "precision": "fp32"},
    {"width": 32, "task": "classification", "labels_at": "meshes", "batch_meshes": None, "batch_vertices": 500},
    {**NARROW, "labels_at": "edges"},
    {**NARROW, "labels_at": "faces", "k": 9, "width": 20},
]

# Stand-ins for kernels.
MODULE = """
import os, pathlib, time

class Failing:
    def compile(self, arguments, options):
        raise ArithmeticError("no registers")

class Quick:
    def compile(self, arguments, options):
        pass

class Noting:
    def compile(self, arguments, options):
        pathlib.Path(arguments[0]).touch()

class Endless:
    def compile(self, arguments, options):
        pathlib.Path(arguments[0], str(os.getpid())).touch()
        time.sleep(1000)

failing, quick, noting, endless = Failing(), Quick(), Noting(), Endless()
"""


def run_without_gpu(cache: Path, *arguments: str) -> list[Any]:
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests", ROOT / "tests" / "ops"))
    env = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name("run_without_gpu.py")), *arguments]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("options", [NARROW, pytest.param({"width": 128}, marks=pytest.mark.slow)])
def test_the_run_compiles_nothing_more(tmp_path: Path, options: dict[str, Any]) -> None:
    """An empty cache holds all kernels after the process. Wide networks have kernels of their own for Hopper."""
    ((ahead, after),) = run_without_gpu(tmp_path, "compile", json.dumps(options))
    assert after == ahead > 20


def test_all_kernels_are_known_before_the_run(tmp_path: Path) -> None:
    for ahead, more in run_without_gpu(tmp_path, "collect", *map(json.dumps, RUNS)):
        assert ahead > 15
        assert more == []


def test_few_kernels_are_new_in_a_similar_run(tmp_path: Path) -> None:
    """No process is worth starting for them. Kernels of a run are known to later processes."""
    original = recipe("original", "segmentation")
    similar = [{}, {"batch_meshes": 2}, {"features": "xyz"}, {"dropout": 0.0}]
    runs = [json.dumps({**original, **changes}) for changes in [*similar, {"precision": "fp32"}]]
    first, again, *few, other = run_without_gpu(tmp_path, "new", runs[0], *runs)
    assert first > 20
    assert again == 0
    assert all(0 < new < process.FEWEST for new in few)
    assert other > process.FEWEST
    assert run_without_gpu(tmp_path, "new", *runs) == [0] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("meshes", [1, 2])
def test_a_run_on_a_gpu_compiles_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meshes: int) -> None:
    """Nothing but sparse kernels is compiled after the process."""
    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    items = []
    for size in (2, 3, 3, 2, 3)[: 3 + meshes]:
        sphere = trimesh.creation.icosphere(size)
        mesh = make_mesh(sphere.vertices, sphere.faces, name="sphere")
        items.append(LabeledMesh("sphere", mesh, np.arange(len(sphere.vertices)) % 7))
    data = LabeledMeshes(items, items, [str(i) for i in range(7)], "vertices")
    # No other test has this width, so nothing has been compiled in this process.
    options = TrainOptions(features="xyz", width=112, k=24, blocks=1, epochs=3, batch_meshes=meshes)
    quiet, device = Console(quiet=True), torch.device("cuda")
    run_training(data, options, tmp_path / "run", device=device, cache_dir=tmp_path, jobs=1, console=quiet)
    end = min(stamp.stat().st_mtime for stamp in cache.glob("diffnet-*"))
    dense = [file for file in cache.glob("*/*.cubin") if not file.name.startswith("spmm")]
    assert len(dense) > 15
    assert [file.name for file in dense if file.stat().st_mtime > end] == []


def test_a_run_goes_on_if_its_launches_are_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        collected.append(arguments)
        raise ValueError("no room")

    collected: list[Any] = []
    monkeypatch.setattr(kernels_ahead, "launches_of_run", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    data = LabeledMeshes([], [], [], "vertices")
    for options, device in (
        (TrainOptions(), "cuda"),
        (TrainOptions(), "cpu"),
        (TrainOptions(attention_heads=4), "cuda"),
        (TrainOptions(diffusion="implicit"), "cuda"),
        (TrainOptions(task="correspondence", map_k=8, k=8), "cuda"),
    ):
        with kernels_ahead.kernels_compiled_meanwhile(
            task_named(options.task), data, options, None, torch.device(device)
        ):
            assert len(collected) == 1  # the first time
    assert caplog.text.count("no room") == 1


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the module with stand-ins, which is also Triton's cache."""
    (tmp_path / "stand_ins.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(process, "FEWEST", 1)
    return tmp_path


def launch(name: str, *arguments: Any) -> Launch:
    return Launch("stand_ins", name, name, arguments, {})


def test_the_process_gets_unknown_kernels_only(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are known after a block without a process too, because the first launches compile them."""
    monkeypatch.setattr(process, "FEWEST", 2)
    files = [stand_ins / f"kernel{i}" for i in range(5)]
    for count, compiled in ((1, set()), (3, {1, 2}), (3, set()), (4, set()), (5, set())):
        launches = [Launch("stand_ins", "noting", str(i), (str(files[i]),), {}) for i in range(count)]
        with compiled_meanwhile(launches, 90):
            pass
        assert {i for i, file in enumerate(files) if file.exists()} == compiled
        for i in compiled:
            files[i].unlink()


def test_a_failure_is_reported(stand_ins: Path, caplog: pytest.LogCaptureFixture) -> None:
    with compiled_meanwhile([launch("quick"), launch("failing")], 90):
        pass
    assert [record.message for record in caplog.records if "ArithmeticError: no registers" in record.message]
    assert not list(stand_ins.glob("diffnet-*"))


def test_a_cache_that_cannot_be_written_is_reported(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(stand_ins / "stand_ins.py" / "cache"))
    monkeypatch.setattr(process, "FEWEST", 2)
    with compiled_meanwhile([launch("quick")], 90):
        pass
    assert "Not a directory" in caplog.text


def test_a_process_that_cannot_start_is_reported(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(stand_ins / "nothing"))
    ran = []
    with compiled_meanwhile([launch("quick")], 90):
        ran.append(True)
    assert ran
    assert "No such file" in caplog.text


def test_an_exception_stops_a_process_that_is_starting(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt), compiled_meanwhile([launch("endless", str(stand_ins))], 90):
        raise KeyboardInterrupt
    assert [each.returncode for each in started] == [-signal.SIGKILL]
    assert not list(stand_ins.glob("diffnet-*"))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_processes_end_with_the_run(stand_ins: Path, ending: signal.Signals) -> None:
    """They end with an interrupted, a terminated and a killed run, while they compile."""
    folder = stand_ins / "pids"
    folder.mkdir()
    code = f"""if True:
        import time
        from diffnet.ops.compilation.launches import Launch
        from diffnet.ops.compilation.process import compiled_meanwhile
        names = ["quick"] * 8 + ["endless"] * 4
        launches = [Launch("stand_ins", name, str(i), ({str(folder)!r},), {{}}) for i, name in enumerate(names)]
        with compiled_meanwhile(launches, 90):
            time.sleep(1000)
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(stand_ins), str(ROOT)])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    try:
        wanted = min(4, len(os.sched_getaffinity(0)))
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(file.name) for file in folder.iterdir()]
        assert len(pids) == wanted
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
        assert len(parents) == 1
        parent.send_signal(ending)
        parent.wait(timeout=30)
        deadline = time.monotonic() + 10
        while any(map(runs, [*pids, *parents])) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(runs, [*pids, *parents]))
    finally:
        parent.kill()
        parent.wait()
