"""Accuracy and time of `diffnet train classification`, from mesh files to the report.

`python -m diffnet.benchmarks.tasks.classification --out FOLDER` writes the generated set of 30 classes to FOLDER/data
and trains with each seed. Each run has a cache of its own, so its time includes the preprocessing. There is a row for
each seed in FOLDER/classification.csv. Other arguments are options of `diffnet train classification`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trimesh

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser, results, run_diffnet
from diffnet.data import LabeledMeshes, shapes

COPIED = ("test_accuracy", "balanced_accuracy", "preprocessing_seconds", "training_seconds")  # from results.json


def write_classes(data: LabeledMeshes, folder: Path) -> None:
    """Write a data set for classification as CLASS/train/NAME.obj and CLASS/test/NAME.obj."""
    for part, items in (("train", data.train), ("test", data.test)):
        for item in items:
            path = folder / data.label_names[int(item.labels.flat[0])] / part / f"{item.name}.obj"
            path.parent.mkdir(parents=True, exist_ok=True)
            trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False).export(path)


def measure(data: Path, out: Path, seed: int, options: Sequence[str]) -> dict[str, float]:
    """Run the command in a process of its own. Returns a row of the table; `seconds` is the time of the process."""
    run = out / f"run-{seed}"
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        same = ["--data", data, "--out", run, "--seed", seed, "--cache", cache]
        run_diffnet("train", "classification", *same, *options)
        seconds = time.perf_counter() - started
    found = results(run)
    return {"seed": seed, "seconds": round(seconds, 1), **{name: found[name] for name in COPIED}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--classes", type=int, default=30, help="of the generated set")
    parser.add_argument("--train", type=int, default=16, help="training meshes of each class")
    parser.add_argument("--test", type=int, default=4, help="test meshes of each class")
    given, options = parser.parse_known_args(arguments)
    folder = given.out / "data"
    if not folder.exists():
        write_classes(shapes(given.classes, given.train, given.test), folder)
    rows = []
    for seed in given.seeds:
        rows.append(measure(folder, given.out, seed, options))
        write_csv(given.out / "classification.csv", rows)  # after every run, so that an interruption keeps the rows


if __name__ == "__main__":
    main()
