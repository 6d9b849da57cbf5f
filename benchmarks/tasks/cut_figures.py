"""Accuracy on unseen figures with the bottom 30 % cut off, trained with and without cuts.

    python -m diffnet.benchmarks.tasks.cut_figures --out FOLDER [--seeds 0 1 2] [options of `diffnet train`]

It trains with `diffnet train` on the generated figures, and scores with `diffnet evaluate`. FOLDER gets
cut_figures.csv, with one row for each seed and recipe, and all runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser, results, run_diffnet
from diffnet.data import LabeledMesh, LabeledMeshes, available_cores, figure, figures
from diffnet.data.synthetic.shape import PARTS
from diffnet.train.inference.mesh_changes import LOST, cut, rotated

FIRST, COUNT = 1000, 64  # seeds of the unseen figures
SHARE = 0.3  # of the vertices are cut off
CUTS = ("--cut", "0.5")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    given, options = parser.parse_known_args(arguments)
    out: Path = given.out
    started = time.perf_counter()
    folders, sets = write_figures(out / "figures", given.seeds)
    rows: list[dict[str, Any]] = []
    for seed, data in zip(given.seeds, folders, strict=True):
        for recipe, cuts in (("without cuts", ()), ("with cuts", CUTS)):
            run = out / f"{recipe.replace(' ', '-')}-{seed}"
            diffnet("train segmentation", *cuts, *options, data=data, seed=seed, out=run, cache=out / "cache")
            found = results(run)
            row: dict[str, Any] = {"seed": seed, "recipe": recipe}
            row |= {name: found[name] for name in ("preprocessing_seconds", "training_seconds")}
            with ThreadPoolExecutor() as threads:  # most of the time of this command is its start
                shares = threads.map(partial(accuracy, run, cache=out / "cache"), sets.values())
                row |= zip(sets, shares, strict=True)
            rows.append(row)
    write_csv(out / "cut_figures.csv", rows)
    for recipe in ("without cuts", "with cuts"):
        means = {name: np.mean([row[name] for row in rows if row["recipe"] == recipe]) for name in sets}
        print(recipe, ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in means.items()))
    print(f"{time.perf_counter() - started:.0f} s; wrote {out / 'cut_figures.csv'}")


def without_bottom(item: LabeledMesh) -> LabeledMesh:
    """A figure without the vertices of smallest z."""
    mesh, stand_ins = cut(item.mesh, SHARE)
    labels = np.empty(len(mesh.verts), np.int64)
    labels[stand_ins[stand_ins != LOST]] = item.labels[stand_ins != LOST]
    return LabeledMesh(item.name, mesh, labels)


def write_figures(out: Path, seeds: Sequence[int]) -> tuple[list[Path], dict[str, Path]]:
    """Write the data sets. Returns the folder of each seed, and those of the unseen figures by column."""
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        data = pool.map(training_figures, seeds)
        upright = list(pool.map(figure, range(FIRST, FIRST + COUNT)))
        folders = [write_set(out / f"seed-{s}", d.test, d.train) for s, d in zip(seeds, data, strict=True)]
    turned = [replace(x, mesh=rotated(x.mesh, np.random.default_rng(i))[0]) for i, x in enumerate(upright)]
    return folders, {
        "whole": write_set(out / "whole", turned),
        "bottom_cut_off": write_set(out / "bottom", [without_bottom(item) for item in upright]),
        "random_side_cut_off": write_set(out / "side", [without_bottom(item) for item in turned]),
    }


def training_figures(seed: int) -> LabeledMeshes:
    """The training figures of `--data figures` with this seed, and two of its test figures, which training asks for."""
    return figures(test=2, seed=seed)


def write_set(folder: Path, test: Sequence[LabeledMesh], train: Sequence[LabeledMesh] = ()) -> Path:
    """Write meshes and their labels as a data set. Returns the folder."""
    for name, items in (("test", test), ("train", train)):
        if items:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for item in items:
            mesh = item.mesh
            with (folder / name / f"{item.name}.off").open("w") as file:
                file.write(f"OFF\n{len(mesh.verts)} {len(mesh.faces)} 0\n")
                np.savetxt(file, mesh.verts, fmt="%.9g")
                np.savetxt(file, np.insert(mesh.faces, 0, 3, axis=1), fmt="%d")
            np.savetxt(folder / name / f"{item.name}.txt", item.labels, fmt="%d")
    (folder / "label_names.txt").write_text("\n".join(PARTS) + "\n")
    return folder


def diffnet(command: str, *more: str, **options: object) -> None:
    """Run a command of `diffnet` with these options. Raises CalledProcessError if it fails."""
    named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    run_diffnet(*command.split(), *named, *more)


def accuracy(run: Path, data: Path, cache: Path) -> float:
    """The accuracy of a trained network on a data set."""
    scored = run.with_name(f"{run.name}-{data.name}")
    diffnet("evaluate", checkpoint=run / "last.pt", data=data, out=scored, cache=cache)
    return float(results(scored)["test_accuracy"])


if __name__ == "__main__":
    main()
