"""The ablation behind the default recipe: many training runs at once, each with other options.

    python -m diffnet.benchmarks.tasks.recipes --data rna=DIR --data bodies=DIR --data shapes --out FOLDER

`shapes` is the generated set of classes, and `bodies` without a folder the built-in set.

The networks are judged on a fifth of the training meshes, which is held out. The test meshes are not read. Each row of
FOLDER/recipes.csv is one run. The rows are written as they come. The same command skips the rows that are there, so an
ablation can be stopped at any time, also with Ctrl-C. FOLDER/overview.md has the mean of each configuration on each set
and over all sets.

This compares candidates for the default in calls of ten minutes. Repeat it until 0 runs are left:

    timeout -s INT 570 python -m diffnet.benchmarks.tasks.recipes --data rna=DIR --data bodies=DIR --data shapes
        --out FOLDER --seeds 0 1 2 3 4 --configurations original default default+diffused default+epochs-24
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
from itertools import accumulate, chain, pairwise, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.tasks.configurations import BASE, ORDER, differs_from_base, options_of
from diffnet.benchmarks.tasks.programs import argument_parser
from diffnet.benchmarks.tasks.recipes_table import overview, summary
from diffnet.data import (
    BODIES,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    Sample,
    Variants,
    load_classes,
    load_dataset,
    make_sample,
    make_variants,
    shapes,
)
from diffnet.geometry import Mesh
from diffnet.geometry.files import write_atomically
from diffnet.train.checkpoint import restore_model
from diffnet.train.device import matmul_dtype, pick_device
from diffnet.train.epoch import TrainingError
from diffnet.train.evaluate import evaluate
from diffnet.train.loop import RunData, train
from diffnet.train.metrics import score_text
from diffnet.train.options import TrainOptions
from diffnet.train.preprocessing import fill_cache_with_bar
from diffnet.train.run import surroundings
from diffnet.train.tasks.task import task_named

HELD_OUT = 0.2  # share of the training meshes
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
    """Train and judge one network, in a worker. Returns its row of the table."""
    data, device = _Worker.sets[job.data], _Worker.device
    options = options_of(job.data, job.configuration, job.seed)
    basis = matmul_dtype(options.precision, device)
    samples = _samples(job.data, options.preprocessing, basis)
    variants = _variants(job.data, options.preprocessing, options.mesh_variants, basis)
    fitted, held_out = split(data.train, options.task == "classification", job.seed)
    parts = LabeledMeshes(
        [data.train[i] for i in fitted], [data.train[i] for i in held_out], data.label_names, data.labels_at
    )
    task = task_named(options.task)
    row: dict[str, Any] = {**job._asdict(), "held_out_score": "", "training_seconds": "", "error": ""}
    with tempfile.TemporaryDirectory() as out:
        try:
            train_samples, held_out_samples = ([samples[i] for i in part] for part in (fitted, held_out))
            ends = accumulate((len(variants[i]) for i in fitted if variants), initial=len(fitted))
            groups = [[i, *range(start, end)] for i, (start, end) in enumerate(pairwise(ends))]
            train_samples += [sample for i in fitted if variants for sample in variants[i]]
            run_data = RunData(task, parts, train_samples, held_out_samples, groups=groups)
            run = train(run_data, options, Path(out), device=device)
        except TrainingError as e:
            return {**row, "error": str(e)}
    row["training_seconds"] = round(sum(epoch["seconds"] for epoch in run["history"]), 2)
    model = restore_model(run)[0].to(device)
    score = task.score(evaluate(task, model, held_out_samples, options, device), options)
    return {**row, "held_out_score": round(score, 6)}


def meshes_of(data: LabeledMeshes, options: TrainOptions) -> list[Mesh]:
    """All meshes that a run needs."""
    return [item.mesh for item in chain(data.train, *variants_of(data, options))]


def variants_of(data: LabeledMeshes, options: TrainOptions) -> list[list[LabeledMesh]]:
    """The variants of each training mesh, or an empty list, see `make_variants`."""
    if not options.mesh_variants.count:
        return []
    at, wanted = data.labels_at, options.mesh_variants
    return [make_variants(item, at, wanted, options.features) for item in data.train]


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
    pending = [job for job in jobs if job not in done]
    console.print(f"{len(pending)} runs, {len(jobs) - len(pending)} are in {table}", soft_wrap=True)
    if not pending:
        return
    decisive: dict[tuple[str, Preprocessing, Variants], TrainOptions] = {}
    for job in pending:
        run = options_of(job.data, job.configuration)
        decisive.setdefault((job.data, run.preprocessing, run.mesh_variants), run)
    for (name, options, _), run in decisive.items():
        failed = fill_cache_with_bar(meshes_of(sets[name], run), options, cache, None, console, device)
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
                    result = f"{score_text('accuracy', row['held_out_score'])} in {row['training_seconds']:.1f} s"
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
    """A data set from NAME=DIR, or a set of diffnet from its name. "shapes=DIR" is a folder of classes."""
    name, _, folder = text.partition("=")
    if folder:
        return name, load_classes(folder) if name == "shapes" else load_dataset(folder)
    if name not in ("bodies", "shapes"):
        raise SystemExit(f"--data should be NAME=DIR, bodies or shapes, got {text!r}")
    return name, load_dataset(BODIES) if name == "bodies" else shapes()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ablation that the command line asks for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", action="append", required=True, help="a set, see above; repeatable")
    parser.add_argument("--configurations", nargs="+", help="changes joined by +, or base; by default those of ORDER")
    parser.add_argument("--processes", type=int, default=4, help="runs at once; more don't end sooner on one GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, help="folder of preprocessed meshes, OUT/cache by default")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    for data, configuration in product(options.data, options.configurations or ()):
        try:
            options_of(data.partition("=")[0], configuration)
        except KeyError as e:
            parser.error(f"unknown change {e} in the configuration {configuration!r}")
        except ValueError as e:
            parser.error(f"the configuration {configuration!r} does not fit --data {data}: {e}")
    sets = dict(map(load_set, options.data))
    configurations = (options.configurations or ORDER.get(name, ORDER["rna"]) for name in sets)
    jobs = [
        Job(name, configuration, seed)
        for of_sets in zip_longest(*configurations)
        for name, configuration in zip(sets, of_sets, strict=True)
        for seed in options.seeds
        if configuration == BASE or (configuration is not None and differs_from_base(name, configuration))
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "diffnet.benchmarks.tasks.recipes", *(arguments or sys.argv[1:])]
    record = {"command": command, "processes": options.processes, **surroundings(device)}
    write_atomically(options.out / "run.json", json.dumps(record, indent=2) + "\n")
    console = Console()
    try:
        cache = options.cache or options.out / "cache"
        run_ablation(sets, jobs, options.out, cache, processes=options.processes, device=device, console=console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command runs what is missing.")
    rows = read_rows(options.out / "recipes.csv")
    for name in sets:
        console.print(f"{name}\n\n{summary(rows, name)}", highlight=False, soft_wrap=True)
    text = overview(rows, list(sets))
    write_atomically(options.out / "overview.md", text)
    console.print(text, highlight=False, soft_wrap=True)


def _start_worker(sets: dict[str, LabeledMeshes], cache: Path, device: torch.device) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    torch.set_num_threads(1)
    _Worker.sets, _Worker.cache, _Worker.device = sets, cache, device


@lru_cache(maxsize=12)
def _samples(name: str, options: Preprocessing, basis: torch.dtype) -> list[Sample]:
    """The samples of the training meshes of a set."""
    return _in_memory(_Worker.sets[name].train, options, basis)


@lru_cache(maxsize=2)
def _variants(name: str, options: Preprocessing, wanted: Variants, basis: torch.dtype) -> list[list[Sample]]:
    if not wanted.count:
        return []
    data = _Worker.sets[name]
    variants = [make_variants(item, data.labels_at, wanted, options.features) for item in data.train]
    return [_in_memory(items, options, basis) for items in variants]


def _in_memory(items: Sequence[LabeledMesh], options: Preprocessing, basis: torch.dtype) -> list[Sample]:
    samples = [make_sample(item, options, _Worker.cache).to(_Worker.device) for item in items]
    if _Worker.device.type == "cpu":
        return samples
    return [replace(s, operators=s.operators.with_gradient_evecs().with_basis_dtype(basis)) for s in samples]


if __name__ == "__main__":
    main()
