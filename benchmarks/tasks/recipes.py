"""The ablation behind the default recipe: many training runs at once, each with other options.

    python -m diffnet.benchmarks.tasks.recipes --data rna=DIR --data figures --data shapes --data curvature
        --data volume --out FOLDER

All sets but RNA are generated. `curvature` and `volume` have the figures and targets of `regression`.

The networks are judged on a fifth of the training meshes, which is held out. The test meshes are not read. Each row of
FOLDER/recipes.csv is one run. The rows are written as they come. The same command skips the rows that are there, so an
ablation can be stopped at any time, also with Ctrl-C.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks.configurations import BASE, ORDER, differs_from_base, options_of, score_name
from diffnet.benchmarks.tasks.programs import argument_parser
from diffnet.benchmarks.tasks.recipes_table import summary
from diffnet.benchmarks.tasks.regression import TARGETS, target_set
from diffnet.data import (
    ArrayStatistics,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    Sample,
    figures,
    load_classes,
    load_dataset,
    make_sample,
    shapes,
    standardized_targets,
    target_statistics,
)
from diffnet.geometry.files import write_atomically
from diffnet.train.batches import keep_on_device
from diffnet.train.device import matmul_dtype, pick_device
from diffnet.train.loop import RunData, TrainingError, train
from diffnet.train.metrics import score_text
from diffnet.train.run import fill_cache_with_bar, surroundings
from diffnet.train.tasks.registry import task_named

HELD_OUT = 0.2  # share of the training meshes
FIGURES = 120  # training figures for regression
COLUMNS = ("data", "configuration", "seed", "held_out_score", "training_seconds", "error")


class Job(NamedTuple):
    """One training run."""

    data: str
    configuration: str
    seed: int


class _Worker:
    """The data sets, the folder of preprocessed meshes and the device of a worker process."""

    sets: dict[str, LabeledMeshes] = {}  # noqa: RUF012 - set once in each process
    cache: Path
    device: torch.device


def split(items: Sequence[LabeledMesh], by_class: bool, seed: int) -> tuple[list[int], list[int]]:
    """The positions of the meshes to train on, and of those to judge on. The latter are at least one.

    by_class: whether a fifth of each class is held out, for meshes with one label each
    """
    labels = [int(item.labels.flat[0]) if by_class else 0 for item in items]
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out: set[int] = set()
    for label in sorted(set(labels)):
        members = [i for i in order if labels[i] == label]
        held_out.update(members[: max(round(HELD_OUT * len(members)), 1)])
    return [i for i in range(len(items)) if i not in held_out], sorted(held_out)


def run_job(job: Job) -> dict[str, Any]:
    """Train and judge one network, in a worker. Returns a row of the table."""
    data, device = _Worker.sets[job.data], _Worker.device
    options = options_of(job.data, job.configuration, job.seed)
    samples = _samples(job.data, options.preprocessing, matmul_dtype(options.precision, device))
    fitted, held_out = split(data.train, options.task == "classification", job.seed)
    parts = LabeledMeshes(
        [data.train[i] for i in fitted], [data.train[i] for i in held_out], data.label_names, data.labels_at
    )
    targets = None
    task = task_named(options.task)
    if task.standardized:
        targets = target_statistics(parts.train, data.label_names)
        samples = with_standardized_targets(samples, data.train, targets)
    row: dict[str, Any] = {**job._asdict(), "held_out_score": "", "training_seconds": "", "error": ""}
    with tempfile.TemporaryDirectory() as out:
        try:
            train_samples, tests = ([samples[i] for i in part] for part in (fitted, held_out))
            run_data = RunData(task, parts, train_samples, tests, target_statistics=targets)
            run = train(run_data, options, Path(out), device=device)
        except TrainingError as e:
            return {**row, "error": str(e)}
    last = run["history"][-1]
    row["held_out_score"] = round(last[f"test_{score_name(job.data)}"], 6)
    row["training_seconds"] = round(sum(epoch["seconds"] for epoch in run["history"]), 2)
    return row


def with_standardized_targets(
    samples: Sequence[Sample], items: Sequence[LabeledMesh], statistics: ArrayStatistics
) -> list[Sample]:
    """The samples of these meshes with targets as `standardized_targets` gives them."""
    return [
        replace(sample, labels=torch.from_numpy(item.labels).to(sample.labels.device))
        for sample, item in zip(samples, standardized_targets(items, statistics), strict=True)
    ]


def run_ablation(
    sets: dict[str, LabeledMeshes],
    jobs: Sequence[Job],
    out: Path,
    cache: Path,
    *,
    processes: int,
    device: torch.device,
    console: Console,
) -> None:
    """Run all jobs that are not in the table yet, several at once, and add their rows."""
    table = out / "recipes.csv"
    done = {(row["data"], row["configuration"], int(row["seed"])) for row in read_rows(table)}
    pending = [job for job in jobs if tuple(job) not in done]
    console.print(f"{len(pending)} runs, {len(jobs) - len(pending)} are in {table}", soft_wrap=True)
    if not pending:
        return
    decisive = {(job.data, options_of(job.data, job.configuration).preprocessing): None for job in pending}
    for name, options in decisive:
        failed = fill_cache_with_bar([item.mesh for item in sets[name].train], options, cache, None, console, device)
        if failed:
            raise SystemExit(f"{name}: {len(failed)} meshes can't be used: {next(iter(failed.values()))}")
    if not table.exists():
        write_atomically(table, ",".join(COLUMNS) + "\n")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one thread
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    workers = min(processes, len(pending))
    with context.Pool(workers, _start_worker, (sets, cache, device)) as pool, table.open("a", newline="") as file:
        # On a GPU, the first run compiles the kernels and stores them for all others.
        alone = 1 if device.type == "cuda" else 0
        count = 0
        for part in (pending[:alone], pending[alone:]):
            for row in pool.imap_unordered(run_job, part):
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
                file.flush()
                count += 1
                result = row["error"]
                if not result:
                    score = score_text(score_name(row["data"]), row["held_out_score"])
                    result = f"{score} in {row['training_seconds']:.1f} s"
                console.print(
                    f"{count}/{len(pending)} after {time.perf_counter() - started:.0f} s: "
                    f"{row['data']} {row['configuration']} seed {row['seed']}: {result}",
                    highlight=False,
                    soft_wrap=True,
                )


def read_rows(table: Path) -> list[dict[str, str]]:
    """The rows of a table, none if there is no file."""
    return read_csv(table) if table.exists() else []


def load_set(text: str) -> tuple[str, LabeledMeshes]:
    """A data set from NAME=DIR, or a generated one from its name. "shapes=DIR" is a folder of classes."""
    name, _, folder = text.partition("=")
    if name in TARGETS:
        if folder:
            raise SystemExit(f"--data {name} is generated and takes no folder, got {text!r}")
        return name, target_set(name, FIGURES)
    if folder:
        return name, load_classes(folder) if name == "shapes" else load_dataset(folder)
    if name not in ("figures", "shapes"):
        raise SystemExit(f"--data should be NAME=DIR, figures, shapes, curvature or volume, got {text!r}")
    return name, figures() if name == "figures" else shapes()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ablation that the command line asks for."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--data", action="append", required=True, help="NAME=DIR, figures, shapes, curvature or volume; repeatable"
    )
    parser.add_argument("--configurations", nargs="+", help="changes joined by +, or base; by default those of ORDER")
    parser.add_argument("--processes", type=int, default=10, help="runs at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, help="folder of preprocessed meshes, OUT/cache by default")
    given = parser.parse_args(arguments)
    device = pick_device(given.device)
    for data, configuration in product(given.data, given.configurations or ()):
        try:
            options_of(data.partition("=")[0], configuration)
        except KeyError as e:
            parser.error(f"unknown change {e} in the configuration {configuration!r}")
        except ValueError as e:
            parser.error(f"the configuration {configuration!r} does not fit --data {data}: {e}")
    sets = dict(map(load_set, given.data))
    configurations = (given.configurations or ORDER.get(name, ORDER["rna"]) for name in sets)
    jobs = [
        Job(name, configuration, seed)
        for of_sets in zip_longest(*configurations)
        for name, configuration in zip(sets, of_sets, strict=True)
        for seed in given.seeds
        if configuration == BASE or (configuration is not None and differs_from_base(name, configuration))
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "diffnet.benchmarks.tasks.recipes", *(arguments or sys.argv[1:])]
    record = {"command": command, "processes": given.processes, **surroundings(device)}
    write_atomically(given.out / "run.json", json.dumps(record, indent=2) + "\n")
    console = Console()
    try:
        cache = given.cache or given.out / "cache"
        run_ablation(sets, jobs, given.out, cache, processes=given.processes, device=device, console=console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command runs what is missing.")
    for name in sets:
        console.print(summary(read_rows(given.out / "recipes.csv"), name), highlight=False, soft_wrap=True)


def _start_worker(sets: dict[str, LabeledMeshes], cache: Path, device: torch.device) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    torch.set_num_threads(1)
    _Worker.sets, _Worker.cache, _Worker.device = sets, cache, device


@lru_cache(maxsize=4)
def _samples(name: str, options: Preprocessing, basis_dtype: torch.dtype) -> list[Sample]:
    samples = [make_sample(item, options, _Worker.cache) for item in _Worker.sets[name].train]
    return keep_on_device(samples, _Worker.device, basis_dtype)


if __name__ == "__main__":
    main()
