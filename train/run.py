"""A complete training run: preprocessing, training, evaluation and the report."""

from __future__ import annotations

import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from diffnet import __version__
from diffnet.data import (
    DataError,
    Interpolation,
    LabeledMesh,
    LabeledMeshes,
    MeshPairs,
    Preprocessing,
    Sample,
    Statistics,
    TargetsAt,
    array_statistics,
    available_cores,
    computed_for_all,
    decimated,
    decimated_to_score,
    fill_cache,
    load_meanwhile,
    make_sample,
    make_variants,
    original_targets,
    own_arrays,
    standardized_targets,
    target_statistics,
)
from diffnet.data.counts import counted
from diffnet.data.decimation import Weights
from diffnet.data.pairs.meshes import paired_meshes
from diffnet.geometry import MeshLike
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder, remove_leftovers, write_atomically
from diffnet.geometry.folder_lock import check_unlocked, locked
from diffnet.geometry.phases import add_phases, take_phases
from diffnet.train.batches import keep_on_device
from diffnet.train.checkpoint import load_checkpoint, restore_model
from diffnet.train.evaluate import evaluate
from diffnet.train.loop import RunData, check_same_options, train
from diffnet.train.metrics import SCORE_NAMES, percent, score_text
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import say_what_is_rotated
from diffnet.train.ranks import Ranks
from diffnet.train.run_folder.history import Row
from diffnet.train.tasks.registry import report_files, task_named
from diffnet.train.tasks.task import Task

T = TypeVar("T")


def run_training(
    data: LabeledMeshes,
    options: TrainOptions,
    out: Path,
    *,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None = None,
    resume: bool = False,
    capture: bool = True,
    console: Console,
    pairs: MeshPairs | None = None,
) -> dict[str, Any]:
    """Preprocess, train, evaluate and report. All files are written to the folder `out`.

    Returns the content of results.json. Numbers in it are null if no test element is labeled.

    data: labeled meshes, or those of a correspondence, see `paired_meshes`
    pairs: deprecated, because `paired_meshes` holds them

    The folder is locked until the run ends. See `locked` for what holds on network file systems.

    Raises OptionError, see `check_folder`, and for data that don't fit the task; DataError for a mesh that can't be
    used; and the errors of `train`.
    """
    if pairs is not None:
        warnings.warn(
            "pairs is deprecated: diffnet.data.pairs.meshes.paired_meshes(pairs, channels) gives the data",
            FutureWarning,
            stacklevel=2,
        )
        data = paired_meshes(pairs, len(data.label_names))
    where: dict[str, Any] = {"device": device, "cache_dir": cache_dir, "jobs": jobs, "console": console}
    check_folder(out, resume)
    task = task_named(options.task)
    if data.labels_at not in task.targets_at:
        raise OptionError(f"{task.name} needs labels at {' or '.join(task.targets_at)}, got {data.labels_at}")
    data, options = task.prepared(data, options)
    if not resume:
        task.check(data, options)
        say_what_is_rotated([item.mesh for item in data.train], options, console)
    make_folder(out)
    with locked(out):
        _check_content(out, resume)  # a run may have ended since
        remove_leftovers(out / name for name in _written())
        if resume:
            check_same_options(load_checkpoint(out / "last.pt"), options, out)  # before preprocessing, which takes long
        score, _ = task.scoring(options)
        started = time.perf_counter()
        take_phases()  # of earlier runs of this process
        run = _run_data(task, data, options, **where)
        preprocessing_seconds = time.perf_counter() - started
        phases = {name: round(seconds, 2) for name, seconds in take_phases().items()}

        with progress_bar(console) as bar:
            shown = bar.add_task("training", total=options.epochs)

            def after_epoch(row: Row) -> None:
                bar.update(shown, completed=row["epoch"], description=f"training, loss {row['train_loss']:.3f}")
                if row[f"test_{score}"] is not None:
                    console.print(_line(row, score), highlight=False)

            predictions: list[torch.Tensor] = []
            judged = train(
                run,
                options,
                out,
                device=device,
                resume=resume,
                capture=capture,
                after_epoch=after_epoch,
                after_step=lambda epochs: bar.update(shown, completed=epochs),
                predictions=predictions,
            )
            bar.update(shown, completed=options.epochs)

        if not predictions:
            evaluate(task, restore_model(judged)[0].to(device), run.test, options, device, predictions)
        if run.target_statistics is not None:
            predictions = [original_targets(each, run.target_statistics) for each in predictions]
        scored = task.scored(data, predictions, run.test, options=options, **where)
        results = {
            "task": task.name,
            **task.results(scored),
            "judged_epoch": len(judged["history"]),
            "train_meshes": len(data.train),
            "test_meshes": len(data.test),
            "preprocessing_seconds": round(preprocessing_seconds, 2),
            "preprocessing_phases": phases,  # seconds, added up over threads and processes
            "training_seconds": round(sum(row["seconds"] for row in judged["history"]), 2),
            **surroundings(device),
            "options": options.as_dict(),
        }
        write_results(out, results)
        from diffnet.train.report.charts import curves_png  # Matplotlib takes half a second to import

        curves = curves_png(out / "metrics.csv", score)
        write_atomically(out / "curves.png", curves)
        summary = {
            "Meshes": f"{results['train_meshes']} to train, {results['test_meshes']} to test",
            "Epochs": str(results["judged_epoch"]),
            "Training": f"{results['training_seconds']:.0f} s on {results['device']}",
            "Date": results["date"][:10],
        }
        task.write_report(out, scored, results, summary, curves)
        return results


def _run_data(
    task: Task[Any, Any],
    data: LabeledMeshes,
    options: TrainOptions,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> RunData:
    """Standardize the targets, decimate the meshes, make their variants and preprocess all of them."""
    fitted, tested, targets = data.train, data.test, None
    if task.standardized:
        targets = target_statistics(data.train, data.label_names)
        fitted, tested = (standardized_targets(part, targets) for part in (data.train, data.test))
    statistics = array_statistics(data.train, options.features)
    for item in data.test:
        own_arrays(item.mesh, options.features, statistics, item.arrays)  # names what is missing at once
    train_items = decimated_items(decimated, fitted, data.labels_at, options, cache_dir, jobs, console)
    tests = decimated_items(decimated_to_score, tested, data.labels_at, options, cache_dir, jobs, console)
    variants = _variants(train_items, data.labels_at, options, jobs, console)
    items = [*train_items, *(item for item, _ in tests), *chain.from_iterable(variants)]
    backs = dict(enumerate((back for _, back in tests), len(train_items)))
    samples = preprocess(items, options, cache_dir, jobs, console, statistics, device)
    samples = [scored_on(sample, backs.get(i)) for i, sample in enumerate(samples)]
    samples = keep_on_device(samples, device, task.basis_dtype(options, device))
    rest = iter(samples)
    train_meshes, test_meshes, *variant_samples = (
        list(islice(rest, len(part))) for part in (data.train, data.test, *variants)
    )
    return RunData(
        task,
        data,
        task.samples(data, "train", train_meshes, options),
        task.samples(data, "test", test_meshes, options),
        statistics,
        targets,
        variant_samples,
    )


def surroundings(device: torch.device) -> dict[str, Any]:
    """The entries of results.json about the machine and the date."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cores": available_cores(),
        "versions": {"diffnet": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write_results(out: Path, results: dict[str, Any]) -> None:
    """Write results.json."""
    text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(out / "results.json", text + "\n")


def check_folder(out: Path, resume: bool) -> None:
    """Raises OptionError if `out` can't be a folder, is used by a run, holds another run, or none to resume."""
    check_folder_path(out)
    check_unlocked(out)
    _check_content(out, resume)


def _written() -> tuple[str, ...]:
    """The files that a run writes, except those of TensorBoard."""
    return "last.pt", "best.pt", "metrics.csv", "results.json", *report_files(), "curves.png", "predictions.html"


def _check_content(out: Path, resume: bool) -> None:
    present = [name for name in _written() if (out / name).exists()]
    if present and not resume:
        hint = "add --resume to continue it, or choose another folder" if "last.pt" in present else "choose another one"
        raise OptionError(f"{out}: this folder already holds a run ({present[0]}); {hint}")
    if resume and "last.pt" not in present:
        raise OptionError(f"{out}: there is no run in this folder to resume")


def decimated_items(
    work: Callable[..., T],
    items: Sequence[LabeledMesh],
    at: TargetsAt,
    options: TrainOptions,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> list[T]:
    """The results of `decimated` or `decimated_to_score` with these options, with a progress bar if some are large."""
    bound = partial(work, at=at, max_faces=options.max_faces, features=options.features, cache_dir=cache_dir)

    def is_large(item: LabeledMesh) -> bool:
        return options.max_faces is not None and len(item.mesh.faces) > options.max_faces

    if not any(map(is_large, items)):
        return [bound(item) for item in items]
    with progress_bar(console) as bar:
        task = bar.add_task("decimation", total=len(items))
        return computed_for_all(bound, items, is_large, jobs, lambda: bar.advance(task))


def scored_on(sample: Sample, back: Weights | None) -> Sample:
    """The sample of a decimated mesh, whose outputs are interpolated to the full mesh. None leaves it as it is."""
    return sample if back is None else replace(sample, interpolation=Interpolation.of(back))


def _variants(
    items: Sequence[LabeledMesh], at: TargetsAt, options: TrainOptions, jobs: int | None, console: Console
) -> list[list[LabeledMesh]]:
    """The variants of each training mesh, or an empty list. Shows a progress bar while they are made."""
    wanted = options.mesh_variants
    if not wanted.count:
        return []
    shares = {"cut": wanted.cut, "decimated": wanted.decimate}
    parts = [f"{how} by up to {percent(share, 0)}" for how, share in shares.items() if share]
    console.print(
        f"{counted(wanted.count, 'variant', 'variants')} of each training mesh, {' and '.join(parts)}", highlight=False
    )
    make = partial(make_variants, at=at, variants=wanted, features=options.features)
    with progress_bar(console) as bar:
        task = bar.add_task("variants", total=len(items))
        # A cut takes less time than sending the mesh to a process, decimation takes more.
        return computed_for_all(make, items, lambda _: wanted.decimate > 0, jobs, lambda: bar.advance(task))


def preprocess(
    items: Sequence[LabeledMesh],
    options: TrainOptions,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
    statistics: Statistics | None,
    device: torch.device,
) -> list[Sample]:
    """Samples on the CPU from the cache, filling it first, with a progress bar.

    device: the device that computes operators, see `fill_cache`

    Raises DataError for meshes that can't be used.
    """
    chosen, meshes = options.preprocessing, [item.mesh for item in items]
    failed, samples = load_meanwhile(
        lambda i: make_sample(items[i], chosen, cache_dir, statistics),
        lambda ready: fill_cache_with_bar(meshes, chosen, cache_dir, jobs, console, device, ready),
    )
    check_filled(items, failed)
    return [samples[i].result() for i in range(len(items))]


def check_filled(items: Sequence[LabeledMesh], failed: Mapping[int, str]) -> None:
    """Raises DataError for the result of `fill_cache` if there are meshes that can't be used."""
    if failed:
        lines = [f"{items[i].name}: {reason}" for i, reason in failed.items()]
        raise DataError(f"{len(failed)} of {len(items)} meshes can't be used: " + "; ".join(lines))


def fill_cache_with_bar(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None,
    console: Console,
    device: torch.device,
    ready: Callable[[int], Any] = lambda position: None,
    ranks: Ranks | None = None,
) -> dict[int, str]:
    """`fill_cache` with a progress bar.

    ranks: those that divide the meshes among them. Each stores the meshes that it takes, and calls `ready` for these.
        All get the reasons of all ranks, and the seconds of their phases.
    """
    with progress_bar(console, disable=ranks is not None and not ranks.is_first) as bar:
        task = bar.add_task("preprocessing", total=len(sources))
        if ranks is None or ranks.is_alone:
            return fill_cache(sources, options, cache_dir, jobs, lambda: bar.advance(task), device, ready)
        earlier, done, positions = take_phases(), ranks.counter(), ranks.handed_out(len(sources))

        def advance(more: int = 1) -> None:
            bar.update(task, completed=done(more))

        failed = fill_cache(sources, options, cache_dir, jobs, advance, device, ready, positions)
        found = ranks.gathered([list(failed.items()), take_phases()], meanwhile=partial(advance, 0))
        bar.update(task, completed=len(sources))
    for phases in (earlier, *(phases for _, phases in found)):
        add_phases(phases)
    return dict(sorted((i, reason) for reasons, _ in found for i, reason in reasons))


def progress_bar(console: Console, disable: bool = False) -> Progress:
    """A bar with the count, the elapsed time and the remaining time. `disable` shows none."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )


def _line(row: Row, score: str) -> str:
    values = {name: row[f"{name}_{score}"] for name in ("train", "validation", "test")}
    known = [f"{name} {score_text(score, v)}" for name, v in values.items() if v is not None and not math.isnan(v)]
    scores = f"{SCORE_NAMES.get(score, score)}: {', '.join(known)}" if known else ""
    return f"epoch {row['epoch']:>4}  loss {row['train_loss']:.4f}  {scores}".rstrip()
