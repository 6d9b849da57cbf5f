"""Accuracy and time of `diffnet train classification`, from mesh files to the report.

`python -m diffnet.benchmarks.tasks.classification --out FOLDER` writes the generated set of 30 classes to FOLDER/data
and trains with each seed. Each run has a cache of its own, so its time includes the preprocessing. There is a row for
each seed in FOLDER/classification.csv. Other arguments are options of `diffnet train classification`.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trimesh

from diffnet.data import LabeledMesh, LabeledMeshes, shapes

COLUMNS = ("seed", "test_accuracy", "balanced_accuracy", "seconds", "preprocessing_seconds", "training_seconds")


def write_classes(data: LabeledMeshes, folder: Path) -> None:
    """Write a data set for classification as CLASS/train/NAME.obj and CLASS/test/NAME.obj."""
    for part, items in (("train", data.train), ("test", data.test)):
        for item in items:
            path = _class_folder(data, item, folder) / part / f"{item.name}.obj"
            path.parent.mkdir(parents=True, exist_ok=True)
            trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False).export(path)


def measure(data: Path, out: Path, seed: int, options: Sequence[str]) -> dict[str, float]:
    """Run the command in a process of its own. Returns a row of the table; `seconds` is the time of the process."""
    run = out / f"run-{seed}"
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "diffnet", "train", "classification", "--data", str(data), "--out", str(run)]
        started = time.perf_counter()
        subprocess.run([*command, "--seed", str(seed), "--cache", cache, *options], check=True)
        seconds = time.perf_counter() - started
    results = json.loads((run / "results.json").read_text("utf-8"))
    return {"seed": seed, "seconds": round(seconds, 1), **{name: results[name] for name in COLUMNS if name in results}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--classes", type=int, default=30, help="of the generated set")
    parser.add_argument("--train", type=int, default=16, help="training meshes of each class")
    parser.add_argument("--test", type=int, default=4, help="test meshes of each class")
    given, options = parser.parse_known_args(arguments)
    folder = given.out / "data"
    if not folder.exists():
        write_classes(shapes(given.classes, given.train, given.test), folder)
    with (given.out / "classification.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for seed in given.seeds:
            table.writerow(measure(folder, given.out, seed, options))
            file.flush()


def _class_folder(data: LabeledMeshes, item: LabeledMesh, folder: Path) -> Path:
    return folder / data.label_names[int(item.labels.flat[0])]


if __name__ == "__main__":
    main()
