"""The tables of wall-clock times on the pages, made from results."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diffnet.benchmarks import tables
from diffnet.benchmarks.harness.results import COLUMNS, read_csv, write_csv
from diffnet.benchmarks.markdown import BLOCK, updated
from diffnet.benchmarks.tasks.configurations import ORDER
from diffnet.train.inference.mesh_changes import CHANGES

RUN = {
    "device": "a GPU",
    "date": "2026-12-01T10:00:00+00:00",
    "versions": {"torch": "9.9"},
    "command": ["diffnet", "bench", "x", "--out", "/tmp/a", "--data", "/tmp/b"],
}


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
    measured_sets = {row["data"] for row in read_csv(tables.RESULTS / "recipes-h200" / "recipes.csv")}
    assert set(found[tables.of_recipes]) == measured_sets <= set(ORDER)
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
