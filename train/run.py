"""A complete training run: preprocessing, training, evaluation and the report."""

from __future__ import annotations

import copy
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diffnet import DiffusionNet, __version__
from diffnet.data import LabeledMeshes, available_cores
from diffnet.data.stored import check_stored_options
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, check_folder_path, csv_text, make_folder, remove_leftovers, write_atomically
from diffnet.geometry.folder_lock import check_unlocked, locked
from diffnet.geometry.processes import take_phases
from diffnet.train.checkpoint import load_checkpoint, restore_model
from diffnet.train.console import progress_bar
from diffnet.train.evaluate import evaluate
from diffnet.train.fine_tuning import start_network
from diffnet.train.loop import train
from diffnet.train.metrics import SCORE_NAMES, score_text
from diffnet.train.options import TASK_OPTIONS, TrainOptions
from diffnet.train.orientation import check_own_arrays, upright_axes, warn_of_rotations, warn_of_tilted_items
from diffnet.train.preprocessing import in_units, run_data
from diffnet.train.ranks import ALONE, Ranks, process_group
from diffnet.train.resident import MEMORY
from diffnet.train.run_checks import check_same_options
from diffnet.train.run_folder import Row, Spool
from diffnet.train.set_parts import meshes_text, part_names, set_summary, with_held_out
from diffnet.train.tasks.task import ReportParts, Task, task_named

_FIRST_FOLD = "fold_1/last.pt"  # in the folder of several runs, see `begin_folds`


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
    start: DiffusionNet | None = None,
    term: Callable[[Tensor, Tensor], Tensor] | None = None,
    console: Console,
) -> dict[str, Any]:
    """Preprocess, train, evaluate and report. All files are written to the folder `out`.

    Returns the content of results.json. Numbers in it are null if no test element is labeled.

    data: labeled meshes, or those of a correspondence, see `paired_meshes`
    memory: GiB of the host for samples, see `DeviceSamples`
    checkpoint_every: see `train`
    ranks: those that train together, see `connected`. Each calls this with the same data, and gets the results.
    start: the network of `options.start`, if rank 0 has read it already
    term: (outputs, targets) to a further term () of the loss, as `Task.loss` gets them: functional maps (P, M, K, K) of
        a correspondence, see `pair_maps`. A resumed run needs it again.

    The folder is locked until the run ends, see `locked`.

    Raises OptionError, see `check_folder`, and for data that don't fit the task; DataError for a mesh that can't be
    used; and the errors of `train`.
    """
    where: dict[str, Any] = {"device": device, "cache_dir": cache_dir, "jobs": jobs, "console": console}
    ranks.shared(lambda: check_folder(out, resume))
    task = copy.copy(task_named(options.task))
    task.term = term
    if not task.allows(data.labels_at):
        raise OptionError(f"{task.name} needs labels at {' or '.join(task.targets_at)}, got {data.labels_at}")
    check_stored_options((data.train, data.validation, data.test), options.preprocessing)
    data, options = task.prepared(data, options)
    if ranks.place.world_size * options.accumulate > 1:
        task.loss_weight(options)  # raises OptionError for a loss that can't be divided
    data, held_out = with_held_out(data, options)
    if not resume:
        task.check(data, options)
        check_own_arrays(data.train, options)
        warn_of_rotations(data.train, options)
        if ranks.is_first:
            start = start_network(options, start)
    parts = part_names(data, held_out)
    for line in ranks.shared(lambda: set_summary(task, data, parts, options, jobs, start)):
        console.print(line, soft_wrap=True)
    console.print(f"cache: {cache_dir}", soft_wrap=True)
    with _written_by_one(out, resume, ranks):
        stored = load_checkpoint(out / "last.pt") if resume else None
        if stored is not None:
            options = replace(options, upright=stored["options"]["upright"])  # what the data have decided
            check_same_options(stored, options, out)  # before preprocessing, which takes long
        score = task.score_name(options)
        started = time.perf_counter()
        take_phases()  # of earlier runs of this process
        run = run_data(task, data, options, stored, out, memory, ranks, **where)
        run = replace(run, held_out=held_out, start=start)
        if stored is None and not options.upright:
            options = replace(options, upright=ranks.shared(lambda: upright_axes(data.train, options)))
        if ranks.is_first:
            warn_of_tilted_items(data.test, options, jobs)
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
            predictions = in_units(spool, run.target_statistics, data.test, options)
            scored = task.scored(data, predictions, run.test, options=options, **where)
            seconds = round(sum(row["seconds"] for row in judged["history"]), 2)
            facts = {
                "judged_epoch": len(judged["history"]),
                "ranks": ranks.place.world_size,
                **{f"{part}_meshes": len(names) for part, names in parts.items()},
                "divided": data.source,
                "left_out": list(map(as_text, data.left_out)),
                "preprocessing_seconds": round(preprocessing_seconds, 2),
                "preprocessing_phases": phases,  # seconds, added up over threads and processes
                "training_seconds": seconds,
                "options": options.as_dict(),
                "meshes": parts,
            }
            from diffnet.train.report.charts import curves_png  # Matplotlib takes half a second to import

            curves = curves_png(out / "metrics.csv", score)
            write_atomically(out / "curves.png", curves)
            summary = {
                "Meshes": meshes_text(parts),
                "Epochs": str(len(judged["history"])),
                "Training": f"{seconds:.0f} s on {surroundings(device)['device']}",
            }
            return write_scores(task, scored, out, facts, summary, device, curves)

        return ranks.shared(report)


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


def write_scores(
    task: Task[Any, Any],
    scored: Any,
    out: Path,
    facts: Mapping[str, Any],
    summary: Mapping[str, str],
    device: torch.device,
    curves: bytes | None = None,
) -> dict[str, Any]:
    """Write the files of scored predictions into a folder. → the content of results.json

    facts: further entries of results.json, `left_out` among them. summary: entries at the top of the page. curves: see
        `ReportParts`
    """
    results = {"task": task.name, **task.results(scored), **facts, **surroundings(device)}
    rows = task.per_mesh(scored, results)
    write_results(out, results, rows)
    entries = {**summary, "Left out": "; ".join(results["left_out"]), "Date": results["date"][:10]}
    task.write_report(scored, results, ReportParts(out, rows, entries, curves))
    return results


def surroundings(device: torch.device) -> dict[str, Any]:
    """The entries of results.json about the machine and the date."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cores": available_cores(),
        "versions": {"diffnet": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write_results(out: Path, results: dict[str, Any], per_mesh: Sequence[Sequence[Any]]) -> None:
    """Write results.json and per_mesh.csv, see `Task.per_mesh`."""
    write_atomically(out / "per_mesh.csv", csv_text(per_mesh))
    text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(out / "results.json", text + "\n")


def check_folder(out: Path, resume: bool) -> None:
    """Raises OptionError if `out` can't be a folder, is used by a run, holds another run, or none to resume."""
    check_folder_path(out)
    check_unlocked(out)
    _check_content(out, resume)


def _written() -> tuple[str, ...]:
    """The files that a run writes, except those of TensorBoard."""
    reports = {file for name in TASK_OPTIONS for file in task_named(name).report_files}
    tables = "folds.csv", "metrics.csv", "per_mesh.csv", "results.json"
    return "last.pt", _FIRST_FOLD, "best.pt", *tables, *sorted(reports), "curves.png", "predictions.html"


def _check_content(out: Path, resume: bool) -> None:
    present = [name for name in _written() if (out / name).exists()]
    if present and not resume:
        goes_on = {"last.pt", _FIRST_FOLD} & {*present}
        hint = "add --resume to continue it, or choose another folder" if goes_on else "choose another one"
        raise OptionError(f"{out}: this folder already holds a run ({present[0]}); {hint}")
    if resume and "last.pt" not in present:
        raise OptionError(f"{out}: there is no run in this folder to resume")


def _line(row: Row, score: str) -> str:
    values = {name: row[f"{name}_{score}"] for name in ("train", "validation", "test")}
    texts = [f"{name} {score_text(score, v)}" for name, v in values.items() if v is not None and not math.isnan(v)]
    scores = f"{SCORE_NAMES.get(score, score)}: {', '.join(texts)}" if texts else ""
    return f"epoch {row['epoch']:>4}  loss {row['train_loss']:.4f}  {scores}".rstrip()
