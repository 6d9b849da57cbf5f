"""The ablation of recipes, and the tables on the pages, made from results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import trimesh

from diffnet.benchmarks import tables
from diffnet.benchmarks.harness.results import COLUMNS, read_csv, write_csv
from diffnet.benchmarks.markdown import BLOCK, updated
from diffnet.benchmarks.tables import RESULTS
from diffnet.benchmarks.tasks import recipes
from diffnet.benchmarks.tasks.configurations import BASE, ORDER, SETS, differs_from_base, options_of
from diffnet.benchmarks.tasks.recipes import main, split
from diffnet.benchmarks.tasks.recipes_table import summary
from diffnet.data import LabeledMesh, fill_cache
from diffnet.geometry import make_mesh
from diffnet.train.inference.mesh_changes import CHANGES
from diffnet.train.options import TrainOptions, recipe
from diffnet.train.options.task_options import RecipeName

pytestmark = pytest.mark.usefixtures("one_thread")


def command(folder: Path, *configurations: str) -> list[str]:
    """The arguments of an ablation on six stretched spheres. Labels are the lower and the upper half."""
    data = folder / "data"
    for i in range(6):
        ball = trimesh.creation.icosphere(1)
        ball.vertices *= np.random.default_rng(i).uniform(0.6, 1.4, 3)
        mesh = data / ("test" if i == 0 else "train") / f"m{i}.ply"
        mesh.parent.mkdir(parents=True, exist_ok=True)
        ball.export(mesh)
        np.savetxt(mesh.with_suffix(".txt"), ball.vertices[:, 2] > 0, fmt="%d")
    options = ["--processes", "1", "--device", "cpu", "--seeds", "0", "--out", str(folder / "out")]
    return ["--data", f"balls={data}", *options, "--configurations", *configurations]


def rows(folder: Path) -> list[dict[str, str]]:
    return read_csv(folder / "out" / "recipes.csv")


@pytest.mark.usefixtures("threads")
def test_an_ablation_continues_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = "epochs-1+k-64+width-64"
    main(command(tmp_path, first))
    before = rows(tmp_path)
    assert [(row["data"], row["configuration"], row["seed"]) for row in before] == [("balls", first, "0")]
    assert 0 < float(before[0]["held_out_score"]) < 1
    main(command(tmp_path, first, "epochs-1+k-64+lr-3e-3"))
    assert rows(tmp_path)[:1] == before
    assert len(rows(tmp_path)) == 2
    assert "1 runs, 1 are in" in capsys.readouterr().out


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is done in threads, because processes load PyTorch first. `test_ctrl_c_keeps_the_rows` starts processes."""
    context = SimpleNamespace(Pool=ThreadPool)
    in_process = lambda meshes, options, cache, *_: fill_cache(meshes, options, cache, 1)  # noqa: E731
    monkeypatch.setattr(recipes, "fill_cache_with_bar", in_process)
    monkeypatch.setattr(recipes, "multiprocessing", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setattr(recipes, "signal", Mock())  # only the main thread may set handlers


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows(tmp_path: Path) -> None:
    arguments = command(tmp_path, "epochs-1+k-64", "epochs-100000+k-64")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "diffnet.benchmarks.tasks.recipes", *arguments]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    table, deadline = tmp_path / "out" / "recipes.csv", time.monotonic() + 300
    while not (table.exists() and len(rows(tmp_path)) == 1):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Stopped." in out
    assert len(rows(tmp_path)) == 1


def test_an_unknown_change_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (command(tmp_path, "cosine+momentum"), "unknown change 'momentum' in the configuration 'cosine+momentum'"),
        (command(tmp_path, "width-0.5"), "the configuration 'width-0.5' does not fit --data balls="),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--data should be NAME=DIR, bodies or shapes, got 'rna'"):
        main(["--data", "rna", "--out", str(tmp_path)])


def test_every_configuration_can_be_trained() -> None:
    assert ORDER.keys() == SETS.keys()
    for name, configurations in ORDER.items():
        assert all(differs_from_base(name, configuration) for configuration in configurations[1:])
        assert configurations[0] == BASE
        assert len(set(configurations)) == len(configurations)
    published = read_csv(RESULTS / "recipes-h200" / "recipes.csv")
    for name, before in (("rna", "rna"), ("bodies", "figures"), ("shapes", "shapes")):
        assert set(ORDER[name]) == {row["configuration"] for row in published if row["data"] == before}


@pytest.mark.parametrize("name", ["default", "original"])
def test_a_configuration_begins_with_a_recipe(name: RecipeName) -> None:
    for data, task in (("rna", "segmentation"), ("shapes", "classification")):
        expected = TrainOptions(**{"task": task, **recipe(name, task)})  # type: ignore[arg-type]
        found = options_of(data, name)
        assert replace(found, eval_every=expected.eval_every) == expected
        assert replace(options_of(data, f"{name}+k-32"), k=expected.k) == found


def test_a_fifth_is_held_out() -> None:
    tetrahedron = trimesh.creation.icosahedron()
    mesh = make_mesh(tetrahedron.vertices, tetrahedron.faces)
    items = [LabeledMesh(f"{i}", mesh, np.array(i % 4)) for i in range(40)]
    for by_class in (False, True):
        fitted, held_out = split(items, by_class, 0)
        assert sorted(fitted + held_out) == list(range(40))
        assert len(held_out) == 8
        assert split(items, by_class, 0) == (fitted, held_out)
        assert split(items, by_class, 1) != (fitted, held_out)
    assert sorted(i % 4 for i in held_out) == [0, 0, 1, 1, 2, 2, 3, 3]


def row(configuration: str, seed: int, score: float, error: str = "", data: str = "rna") -> dict[str, str]:
    return {
        **{"data": data, "configuration": configuration, "seed": str(seed), "error": error},
        **{"held_out_score": "" if error else str(score), "training_seconds": "1"},
    }


def test_differences_are_paired_by_seed() -> None:
    """The seeds differ by 10 points, and the change adds 1 ± 0.1 to each."""
    found = [row("base", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    found += [row("cosine", seed, 0.51 + 0.1 * seed + 0.001 * (seed - 1)) for seed in range(3)]
    found += [row("lr-3e-3", 0, 0, "the loss became nan")]
    text = summary(found, "rna")
    assert "| `cosine` | 3 | 61.00 ± 5.83 % | +1.00 ± 0.06 | yes | 1.0 s |" in text
    assert "| `lr-3e-3` | 1 failed |" in text


# ---- tables of wall-clock times on the pages ----


RUN = {"device": "a GPU", "date": "2026-12-01T10:00:00+00:00", "versions": {"torch": "9.9"}}
RUN |= {"command": ["diffnet", "bench", "x", "--out", "/tmp/a", "--data", "/tmp/b"]}


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_agree_with_the_results(page: str) -> None:
    """`python -m diffnet.benchmarks.tables` makes this pass."""
    text = (tables.CHECKOUT / page).read_text(encoding="utf-8")
    assert updated(text, tables.PAGES[page]) == text


def test_every_table_is_on_a_page() -> None:
    found: dict[object, list[str]] = {}
    for page, make in tables.PAGES.items():
        text = (tables.CHECKOUT / page).read_text(encoding="utf-8")
        found.setdefault(make, []).extend(match[2] for match in BLOCK.finditer(text))
    assert sorted(found[tables.measured]) == sorted(tables.TABLES)
    results = sorted(tables.RESULTS.glob("robustness-*/results.json"))
    assert sorted(found[tables.of_robustness]) == [f"../{file.relative_to(tables.CHECKOUT)}" for file in results]
    for file in results:
        assert [row["change"] for row in json.loads(file.read_text())["rows"]] == list(CHANGES)


def test_tables_on_a_page(tmp_path: Path) -> None:
    """A table without results stays, and an unknown one is an error."""
    page = "a\n<!-- table short -->\nold\n<!-- end of table -->\nb\n"
    assert updated(page, partial(tables.measured, results=tmp_path)) == page
    assert updated(page, lambda name: f"{name}, new\n") == page.replace("old", "short, new")
    with pytest.raises(KeyError, match="shrot"):
        updated(page.replace("short", "shrot"), tables.measured)


def write(folder: Path, name: str, rows: list[dict[str, Any]], more: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    empty = dict.fromkeys((*COLUMNS, *more), "")
    parameters = [key for key in rows[0] if key not in empty]
    write_csv(folder / f"{name}.csv", [{**{key: row[key] for key in parameters}, **empty, **row} for row in rows])
    (folder / "run.json").write_text(json.dumps(RUN))


def test_steps(tmp_path: Path) -> None:
    times = {"original": 77.46, "plain": 16, "diffnet": 8, "diffnet-graphed": 4.123, "diffnet-command": 0.5}
    case = {"dtype": "bf16", "vertices": 200_000}
    rows = [{**case, "peer": peer, "median_ms": ms, "gpu_ms": 0.25, "peak_mb": 512} for peer, ms in times.items()]
    write(tmp_path / "steps", "train-step", [*rows, {**case, "peer": "broken", "error": "no"}])
    out = tables.short(tmp_path)
    assert "| 200,000 | 77.5 ms | 16.0 ms | 8.00 ms | 4.12 ms | 0.50 ms |\n" in out
    step = {**case, "peer": "diffnet-step", "median_ms": 0.5}
    write(tmp_path / "more" / "steps", "train-step", [*rows, step])
    assert "| 4.12 ms | 0.50 ms | 0.50 ms |\n" in tables.short(tmp_path / "more")
    full = tables.TABLES["training-step"](tmp_path)
    assert "| `diffnet-graphed` |" in full
    assert "| 77.5 ms (0.25) |" in full
    assert "| not measured |" in full
    assert "a GPU, PyTorch 9.9, 2026-12-01." in full
    assert "`python -m diffnet.benchmarks x --out DIR --data DIR`" in full
    write(tmp_path / "fp32", "train-step", rows)
    assert "| `original` | 77.5 ms, 0.50 GiB |" in tables.float32(tmp_path)


def test_training_loop(tmp_path: Path) -> None:
    times = {"original": 20, "diffnet": 10, "diffnet-graphed": 2, "diffnet-captured": 1, "diffnet, largest batch": 11}
    rows = []
    for loop, size, factor in (("one mesh", 100, 1), ("four meshes", 400, 2), ("xyz", 100, 1.5)):
        case = {"loop": loop, "vertices_per_step": size}
        memory = {peer: 3072 if peer == "diffnet-graphed" else 2048 for peer in times}
        rows += [{**case, "peer": p, "median_ms": factor * ms, "peak_mb": memory[p]} for p, ms in times.items()]
    write(tmp_path / "loop", "training-loop", rows)
    text = tables.training_loop(tmp_path)
    assert "| `diffnet-graphed` | 2.00 ms, 3.00 GiB | 4.00 ms, 3.00 GiB | 3.00 ms, 3.00 GiB |" in text


def test_whole_commands(tmp_path: Path) -> None:
    details = {"preprocessing_seconds": 6.25, "training_seconds": 12, "test_accuracy": 0.7991}
    row = {"options": "--batch-meshes 4", "epochs": 100, "peer": "warm caches", "median_ms": 24_000, **details}
    write(tmp_path / "command", "command", [row], tuple(details))
    expected = "| `--batch-meshes 4` | warm caches | 24.0 s | 6.2 s | 12.0 s | 79.9 % |"
    assert expected in tables.command(tmp_path)
    step = {"dtype": "bf16", "vertices": 10, "peer": "original", "median_ms": 1}
    write(tmp_path / "steps", "train-step", [step])
    rows = [
        {**row, "options": "--recipe original", "peer": p, "median_ms": ms}
        for p, ms in (("cold caches", 40_000), ("warm caches", 24_000))
    ]
    write(tmp_path / "command", "command", rows, tuple(details))
    text = tables.short(tmp_path)
    assert "takes 24.0 s with warm caches and 40.0 s with empty ones" in text
    assert "The test accuracy is 79.9 %." in text


def test_tasks_without_results_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tables.tasks(tmp_path / "loops")
    folder = tmp_path / "tasks-h200"
    folder.mkdir()
    (folder / "classification.csv").write_text("seed,test_accuracy,seconds,training_seconds\n3,0.9912,61.26,40\n")
    text = tables.tasks(tmp_path / "loops")
    assert "| 3 | 99.1 % | 61.3 | 40 |" in text
    assert "regression" not in text
