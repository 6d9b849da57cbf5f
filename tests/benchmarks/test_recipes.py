"""The ablation of recipes."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trimesh

from diffnet.benchmarks.tasks import recipes
from diffnet.benchmarks.tasks.configurations import BASE, ORDER, SETS, options_of
from diffnet.benchmarks.tasks.recipes import main, split
from diffnet.benchmarks.tasks.recipes_page import PAGE, TABLE, summary, with_tables
from diffnet.data import LabeledMesh
from diffnet.geometry import make_mesh


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
    with (folder / "out" / "recipes.csv").open() as file:
        return list(csv.DictReader(file))


def test_an_ablation_continues_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = "epochs-1+k-64+width-64"
    main(command(tmp_path, first))
    before = rows(tmp_path)
    assert [(row["data"], row["configuration"], row["seed"]) for row in before] == [("balls", first, "0")]
    assert 0 < float(before[0]["held_out_accuracy"]) < 1
    main(command(tmp_path, first, "epochs-1+k-64+lr-3e-3"))
    assert rows(tmp_path)[:1] == before
    assert len(rows(tmp_path)) == 2
    assert "1 runs, 1 are in" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows(tmp_path: Path) -> None:
    arguments = command(tmp_path, "epochs-1+k-64", "epochs-100000+k-64")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "diffnet.benchmarks.tasks.recipes", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
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
    with pytest.raises(SystemExit):
        main(command(tmp_path, "cosine+momentum"))
    assert "unknown change 'momentum' in the configuration 'cosine+momentum'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--data should be NAME=DIR, figures or shapes, got 'rna'"):
        main(["--data", "rna", "--out", str(tmp_path)])


def test_every_configuration_can_be_trained() -> None:
    assert ORDER.keys() == SETS.keys()
    for name, configurations in ORDER.items():
        for configuration in configurations:
            options_of(name, configuration)
        assert configurations[0] == BASE
        assert len(set(configurations)) == len(configurations)


@pytest.mark.skipif(not TABLE.exists(), reason="no results of an ablation")
def test_the_command_runs_the_published_configurations() -> None:
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    for name, configurations in ORDER.items():
        assert set(configurations) == {row["configuration"] for row in rows if row["data"] == name}


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


def row(configuration: str, seed: int, accuracy: float, error: str = "") -> dict[str, str]:
    return {
        **{"data": "rna", "configuration": configuration, "seed": str(seed), "error": error},
        **{"held_out_accuracy": "" if error else str(accuracy), "training_seconds": "1"},
    }


def test_differences_are_paired_by_seed() -> None:
    """The seeds differ by 10 points, and the change adds 1 ± 0.1 to each."""
    found = [row("base", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    found += [row("cosine", seed, 0.51 + 0.1 * seed + 0.001 * (seed - 1)) for seed in range(3)]
    found += [row("lr-3e-3", 0, 0, "the loss became nan")]
    text = summary(found, "rna")
    assert "| `cosine` | 3 | 61.00 ± 5.83 % | +1.00 ± 0.06 | yes | 1.0 s |" in text
    assert "| `lr-3e-3` | 1 failed |" in text
    assert with_tables("a\n<!-- table rna -->\nold\n<!-- end of table -->\nb", found) == (
        f"a\n<!-- table rna -->\n{text}<!-- end of table -->\nb"
    )


@pytest.mark.skipif(not TABLE.exists(), reason="no results of an ablation")
def test_the_page_agrees_with_the_results() -> None:
    """`python -m diffnet.benchmarks.tasks.recipes_page` makes this pass."""
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, recipes.read_rows(TABLE)) == text
