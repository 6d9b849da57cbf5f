"""A complete training run: preprocessing, training, evaluation and the report."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
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
    ArrayStatistics,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    Statistics,
    TargetsAt,
    array_statistics,
    available_cores,
    fill_cache,
    original_targets,
    standardized_targets,
    target_statistics,
)
from diffnet.data.arrays import array_states, check_arrays_of_all
from diffnet.data.counts import counted
from diffnet.data.derived import DerivedMeshes, derived, make_all_variants, make_decimated
from diffnet.data.on_demand import OnDemand
from diffnet.data.prepared import PreparedSamples, prepared_samples
from diffnet.data.stored import StoredMeshes, check_stored_options, joined
from diffnet.geometry import MeshLike
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder, remove_leftovers, write_atomically
from diffnet.geometry.folder_lock import check_unlocked, locked
from diffnet.geometry.phases import add_phases, take_phases
from diffnet.train.checkpoint import Checkpoint, CheckpointError, load_checkpoint, restore_model
from diffnet.train.evaluate import evaluate
from diffnet.train.loop import RunData, check_divided, check_same_options, train
from diffnet.train.metrics import SCORE_NAMES, percent, score_text
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import say_what_is_rotated
from diffnet.train.ranks import ALONE, Ranks, process_group
from diffnet.train.resident import MEMORY, on_device
from diffnet.train.run_folder.history import Row
from diffnet.train.run_folder.spool import Spool
from diffnet.train.tasks.registry import report_files, task_named
from diffnet.train.tasks.task import Task


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
    memory: float = MEMORY,
    checkpoint_every: int | None = None,
    ranks: Ranks = ALONE,
    console: Console,
) -> dict[str, Any]:
    """Preprocess, train, evaluate and report. All files are written to the folder `out`.

    Returns the content of results.json. Numbers in it are null if no test element is labeled.

    data: labeled meshes, or those of a correspondence, see `paired_meshes`
    memory: GiB of the host for samples, see `on_device`
    checkpoint_every: see `train`
    ranks: those that train together, see `connected`. Each calls this with the same data, and gets the results.

    The folder is locked until the run ends. See `locked` for what holds on network file systems.

    Raises OptionError, see `check_folder`, and for data that don't fit the task; DataError for a mesh that can't be
    used; and the errors of `train`.
    """
    where: dict[str, Any] = {"device": device, "cache_dir": cache_dir, "jobs": jobs, "console": console}
    ranks.shared(lambda: check_folder(out, resume))
    task = task_named(options.task)
    if data.labels_at not in task.targets_at:
        raise OptionError(f"{task.name} needs labels at {' or '.join(task.targets_at)}, got {data.labels_at}")
    check_stored_options((data.train, data.test), options.preprocessing)
    data, options = task.prepared(data, options)
    check_divided(options, ranks)
    if ranks.place.world_size * options.accumulate > 1:
        task.loss_weight(options)  # raises OptionError for a loss that can't be divided
    if not resume:
        task.check(data, options)
        say_what_is_rotated(data.train, options, console)
    with _written_by_one(out, resume, ranks):
        stored = load_checkpoint(out / "last.pt") if resume else None
        if stored is not None:
            check_same_options(stored, options, out)  # before preprocessing, which takes long
        score, _ = task.scoring(options)
        started = time.perf_counter()
        take_phases()  # of earlier runs of this process
        run = _run_data(task, data, options, stored, out, memory, ranks, **where)
        preprocessing_seconds = time.perf_counter() - started
        phases = {name: round(seconds, 2) for name, seconds in take_phases().items()}

        with progress_bar(console) as bar, process_group(ranks, device):
            shown = bar.add_task("training", total=options.epochs)

            def after_epoch(row: Row) -> None:
                bar.update(shown, completed=row["epoch"], description=f"training, loss {row['train_loss']:.3f}")
                if row[f"test_{score}"] is not None:
                    console.print(_line(row, score), highlight=False)

            spool = Spool(out)
            judged = train(
                run,
                options,
                out,
                device=device,
                resume=resume,
                capture=capture,
                checkpoint_every=checkpoint_every,
                ranks=ranks,
                after_epoch=after_epoch,
                after_step=lambda epochs: bar.update(shown, completed=epochs),
                predictions=spool,
            )
            bar.update(shown, completed=options.epochs)

        if not ranks.shared(lambda: len(spool)):
            network = restore_model(judged)[0].to(device)
            evaluate(task, network, run.test, options, device, spool, ranks)

        def report() -> dict[str, Any]:
            predictions = in_units(spool, run.target_statistics)
            scored = task.scored(data, predictions, run.test, options=options, **where)
            results = {
                "task": task.name,
                **task.results(scored),
                "judged_epoch": len(judged["history"]),
                "ranks": ranks.place.world_size,
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

        results: dict[str, Any] = ranks.shared(report)
        return results


@contextmanager
def _written_by_one(out: Path, resume: bool, ranks: Ranks) -> Iterator[None]:
    """Rank 0 makes and locks the folder of a run, before the others go on."""

    def begin() -> None:
        _check_content(out, resume)  # a run may have ended since
        remove_leftovers(out / name for name in _written())

    if ranks.is_first:
        make_folder(out)
    with locked(out) if ranks.is_first else nullcontext():
        ranks.shared(begin)
        yield


def _run_data(
    task: Task[Any, Any],
    data: LabeledMeshes,
    options: TrainOptions,
    stored: Checkpoint | None,
    out: Path,
    memory: float,
    ranks: Ranks,
    device: torch.device,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> RunData:
    """Standardize the targets, decimate the meshes, make their variants and preprocess all of them.

    stored: the checkpoint of a run in `out` that is resumed, or None
    """

    def read() -> tuple[Any, ...]:
        fitted, tested, targets = data.train, data.test, None
        if task.standardized:
            targets = target_statistics(data.train, data.label_names, jobs)
            targets = targets if stored is None else of_stored_run(stored, "target_statistics", targets, out)
            fitted, tested = (standardized_targets(part, targets) for part in (data.train, data.test))
        statistics = array_statistics(data.train, options.features, jobs)
        if stored is not None:
            statistics = of_stored_run(stored, "statistics", statistics, out)
        check_arrays_of_all(data.test, options.features, statistics, jobs)  # names what is missing at once
        train_items = with_max_faces(fitted, data.labels_at, options, cache_dir, jobs, console)
        test_items = with_max_faces(tested, data.labels_at, options, cache_dir, jobs, console, to_score=True)
        variants = _variants(train_items, data.labels_at, options, cache_dir, jobs, console)
        items = joined([train_items, test_items, variants])
        return statistics, targets, train_items, test_items, variants, items

    statistics, targets, train_items, test_items, variants, items = ranks.after_first(read)
    prepared = preprocess(
        items, options.preprocessing, statistics, data.labels_at, cache_dir, jobs, console, device, memory, ranks
    )
    memory /= ranks.place.local_world_size
    # Spectral networks on a GPU read gradients in the eigenbasis, so they differentiate no sparse product.
    prepared.backward = device.type != "cuda" or options.diffusion != "spectral" or options.attention_heads > 0
    samples = on_device(prepared, device, task.basis_dtype(options, device), memory)
    trained, tests = len(train_items), len(train_items) + len(test_items)
    origins = variants.origins if isinstance(variants, DerivedMeshes) else np.zeros(0, np.int64)
    bounds = np.searchsorted(origins, np.arange(trained + 1)) + tests
    return RunData(
        task,
        data,
        task.samples(data, "train", samples[:trained], options),
        task.samples(data, "test", samples[trained:tests], options),
        statistics,
        targets,
        [samples[a:b] for a, b in pairwise(bounds.tolist())] if len(origins) else [],
    )


def of_stored_run(stored: Checkpoint, name: str, found: Any, out: Path) -> Any:
    """The statistics of a stored run, by which its samples were computed. Sums of other versions may round differently.

    Raises CheckpointError if those of the data are others.
    """
    if not _is_close(stored[name], found):
        what = "own arrays" if name == "statistics" else "targets"
        raise CheckpointError(f"{out / 'last.pt'}: this run was started on a data set with other {what}")
    return stored[name]


def _is_close(first: Any, second: Any) -> bool:
    """Whether nested dictionaries of lists of numbers are equal except for rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_close(first[key], second[key]) for key in first)
    return len(first) == len(second) and np.allclose(first, second, rtol=1e-9, atol=1e-9 * np.abs(second).max())


def in_units(predictions: Sequence[torch.Tensor], statistics: ArrayStatistics | None) -> Sequence[torch.Tensor]:
    """Predictions in the units of the targets. statistics: of these, or None if they aren't standardized"""
    if statistics is None:
        return predictions
    return OnDemand(len(predictions), lambda i: original_targets(predictions[i], statistics))


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


def with_max_faces(
    items: Sequence[LabeledMesh],
    at: TargetsAt,
    options: TrainOptions,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
    to_score: bool = False,
) -> Sequence[LabeledMesh]:
    """The meshes, decimated if some have more than `max_faces` faces. Shows a progress bar then.

    to_score: decimate as `decimated_to_score` does, not as `decimated`
    """
    most = options.max_faces
    faces = items.face_counts if isinstance(items, StoredMeshes) else [len(item.mesh.faces) for item in items]
    if most is None or max(faces, default=0) <= most:
        return items
    make = partial(
        make_decimated, at=at, max_faces=most, features=options.features, cache_dir=cache_dir, to_score=to_score
    )
    about = ("decimated", at, most, options.features, to_score, array_states(items, options.features))
    with progress_bar(console) as bar:
        task = bar.add_task("decimation", total=len(items))
        return derived(items, make, *about, cache_dir=cache_dir, jobs=jobs, advance=lambda: bar.advance(task))


def _variants(
    items: Sequence[LabeledMesh],
    at: TargetsAt,
    options: TrainOptions,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> Sequence[LabeledMesh]:
    """The variants of all training meshes, those of the first mesh first. Shows a progress bar while they are made."""
    wanted = options.mesh_variants
    if not wanted.count:
        return []
    shares = {"cut": wanted.cut, "decimated": wanted.decimate}
    parts = [f"{how} by up to {percent(share, 0)}" for how, share in shares.items() if share]
    console.print(
        f"{counted(wanted.count, 'variant', 'variants')} of each training mesh, {' and '.join(parts)}", highlight=False
    )
    make = partial(make_all_variants, at=at, variants=wanted, features=options.features)
    about = ("variants", at, asdict(wanted), options.features, array_states(items, options.features))
    with progress_bar(console) as bar:
        task = bar.add_task("variants", total=len(items))
        # A cut takes less time than sending the mesh to a process, decimation takes more.
        return derived(
            items,
            make,
            *about,
            cache_dir=cache_dir,
            jobs=jobs,
            advance=lambda: bar.advance(task),
            is_long=wanted.decimate > 0,
        )


def preprocess(
    items: Sequence[LabeledMesh],
    options: Preprocessing,
    statistics: Statistics | None,
    at: TargetsAt,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
    device: torch.device,
    memory: float = MEMORY,
    ranks: Ranks = ALONE,
) -> PreparedSamples:
    """The samples in the cache, which is filled first, with a progress bar.

    device: the device that computes operators, see `fill_cache`
    memory: GiB, see `prepared_samples`

    Raises DataError for meshes that can't be used.
    """
    return prepared_samples(
        items,
        options,
        cache_dir,
        statistics,
        at,
        lambda sources, ready: fill_cache_with_bar(sources, options, cache_dir, jobs, console, device, ready, ranks),
        int(memory * 2**30 / ranks.place.local_world_size),
        ranks.shared,
        ranks.gathered,
    )


def fill_cache_with_bar(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None,
    console: Console,
    device: torch.device,
    ready: Callable[[int], Any] = lambda position: None,
    ranks: Ranks = ALONE,
) -> dict[int, str]:
    """`fill_cache` with a progress bar.

    ranks: those that divide the meshes among them. Each stores the meshes that it takes, and calls `ready` for these.
        All get the reasons of all ranks, and the seconds of their phases.
    """
    with progress_bar(console, disable=not ranks.is_first) as bar:
        task = bar.add_task("preprocessing", total=len(sources))
        if ranks.is_alone:
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
