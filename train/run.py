"""A complete training run: preprocessing, training, evaluation and the report."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    Sample,
    Statistics,
    array_statistics,
    available_cores,
    fill_cache,
    load_meanwhile,
    make_sample,
    own_arrays,
)
from diffnet.geometry import MeshLike
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import write_atomically
from diffnet.train.batches import keep_on_device
from diffnet.train.checkpoint import restore_model
from diffnet.train.device import matmul_dtype
from diffnet.train.evaluate import evaluate
from diffnet.train.loop import train
from diffnet.train.metrics import accuracy, class_scores, confusion_matrix, percent
from diffnet.train.options import TrainOptions
from diffnet.train.run_folder.history import Row
from diffnet.train.run_folder.lock import check_unlocked, locked

SHOWN_MESHES = 8  # on the page of predictions

# The files that a run writes to its folder, except those of TensorBoard.
WRITTEN = ("last.pt", "best.pt", "metrics.csv", "results.json", "confusion.png", "curves.png", "predictions.html")


def run_segmentation(
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
) -> dict[str, Any]:
    """Preprocess, train, evaluate and report. All files are written to the folder `out`.

    Returns the content of results.json. Numbers in it are null if no test element is labeled.

    The folder is locked until the run ends. See `locked` for what holds on network file systems.

    Raises OptionError, see `check_folder`; DataError for a mesh that can't be used; and the errors of `train`.
    """
    check_folder(out, resume)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _check_content(out, resume)  # a run may have ended since
        started = time.perf_counter()
        items = [*data.train, *data.test]
        statistics = array_statistics(data.train, options.features)
        for item in data.test:
            own_arrays(item.mesh, options.features, statistics, item.arrays)  # names what is missing at once
        samples = preprocess(items, options, cache_dir, jobs, console, statistics)
        samples = keep_on_device(samples, device, matmul_dtype(options.precision, device))
        train_samples, test_samples = samples[: len(data.train)], samples[len(data.train) :]
        preprocessing_seconds = time.perf_counter() - started

        with progress_bar(console) as bar:
            task = bar.add_task("training", total=options.epochs)

            def after_epoch(row: Row) -> None:
                bar.update(task, completed=row["epoch"], description=f"training, loss {row['train_loss']:.3f}")
                if row["test_accuracy"] is not None:
                    console.print(_line(row), highlight=False)

            predictions: list[torch.Tensor] = []
            judged = train(
                data,
                train_samples,
                test_samples,
                options,
                out,
                device=device,
                resume=resume,
                capture=capture,
                after_epoch=after_epoch,
                predictions=predictions,
                statistics=statistics,
            )
            bar.update(task, completed=options.epochs)

        if not predictions:
            evaluate(restore_model(judged)[0].to(device), test_samples, options, device, predictions)
        truth = torch.cat([sample.labels.cpu() for sample in test_samples])
        matrix = confusion_matrix(torch.cat(predictions), truth, len(data.label_names)).numpy()
        iou = class_scores(matrix).iou
        results = {
            "test_accuracy": accuracy(torch.from_numpy(matrix)) if matrix.any() else None,
            "mean_iou": float(np.nanmean(iou)) if matrix.any() else None,
            "judged_epoch": len(judged["history"]),
            "train_meshes": len(train_samples),
            "test_meshes": len(test_samples),
            "preprocessing_seconds": round(preprocessing_seconds, 2),
            "training_seconds": round(sum(row["seconds"] for row in judged["history"]), 2),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "cores": available_cores(),
            "versions": {"diffnet": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "options": options.as_dict(),
            "classes": _classes(matrix, data.label_names),
        }
        write_atomically(
            out / "results.json", json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )
        _write_report(out, data, [p.numpy() for p in predictions], matrix, results)
        return results


def check_folder(out: Path, resume: bool) -> None:
    """Raises OptionError if `out` is a file, is in use by a run, holds another run, or holds no run to resume."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out}: the results of a run need a folder, and this is a file")
    check_unlocked(out)
    _check_content(out, resume)


def _check_content(out: Path, resume: bool) -> None:
    present = [name for name in WRITTEN if (out / name).exists()]
    if present and not resume:
        hint = "add --resume to continue it, or choose another folder" if "last.pt" in present else "choose another one"
        raise OptionError(f"{out}: this folder already holds a run ({present[0]}); {hint}")
    if resume and "last.pt" not in present:
        raise OptionError(f"{out}: there is no run in this folder to resume")


def preprocess(
    items: Sequence[LabeledMesh],
    options: TrainOptions,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
    statistics: Statistics | None = None,
) -> list[Sample]:
    """Samples from the cache, filling it first, with a progress bar. Raises DataError for meshes that can't be used."""
    chosen, meshes = options.preprocessing, [item.mesh for item in items]
    failed, samples = load_meanwhile(
        lambda i: make_sample(items[i], chosen, cache_dir, statistics),
        lambda ready: fill_cache_with_bar(meshes, chosen, cache_dir, jobs, console, ready=ready),
    )
    if failed:
        lines = [f"{items[i].name}: {reason}" for i, reason in failed.items()]
        raise DataError(f"{len(failed)} of {len(items)} meshes can't be used: " + "; ".join(lines))
    return [samples[i].result() for i in range(len(items))]


def fill_cache_with_bar(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None,
    console: Console,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
) -> dict[int, str]:
    """`fill_cache` with a progress bar."""
    with progress_bar(console) as bar:
        task = bar.add_task("preprocessing", total=len(sources))
        return fill_cache(sources, options, cache_dir, jobs, lambda: bar.advance(task), device, ready)


def progress_bar(console: Console) -> Progress:
    """A bar with the count, the elapsed time and the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=console,
    )


def _line(row: Row) -> str:
    parts = [f"epoch {row['epoch']:>4}", f"loss {row['train_loss']:.4f}"]
    for name in ("train", "validation", "test"):
        value = row[f"{name}_accuracy"]
        if value is not None:
            parts.append(f"{name} {percent(value)}")
    return "  ".join(parts)


def _classes(matrix: NDArray[np.int64], names: Sequence[str]) -> list[dict[str, Any]]:
    """The scores of each class that occurs in the test set."""
    count, share, iou = class_scores(matrix)
    return [
        {"name": names[i], "count": int(count[i]), "accuracy": float(share[i]), "iou": float(iou[i])}
        for i in np.flatnonzero(count).tolist()
    ]


def _write_report(
    out: Path,
    data: LabeledMeshes,
    predictions: Sequence[NDArray[np.int64]],
    matrix: NDArray[np.int64],
    results: dict[str, Any],
) -> None:
    # Matplotlib takes half a second to import, and training starts without it.
    from diffnet.train.report.charts import confusion_png, curves_png
    from diffnet.train.report.report import Prediction, write_report

    confusion, curves = confusion_png(matrix, data.label_names), curves_png(out / "metrics.csv")
    write_atomically(out / "confusion.png", confusion)
    write_atomically(out / "curves.png", curves)
    # The shown meshes are spread over the test set, because neighbors in its list are often alike.
    count = min(SHOWN_MESHES, len(predictions))
    shown = [round(i) for i in np.linspace(0, len(predictions) - 1, count)]
    summary = {
        "Test accuracy": percent(results["test_accuracy"]),
        "Mean IoU": percent(results["mean_iou"]),
        "Meshes": f"{results['train_meshes']} to train, {results['test_meshes']} to test",
        "Epochs": str(results["judged_epoch"]),
        "Training": f"{results['training_seconds']:.0f} s on {results['device']}",
        "Date": results["date"][:10],
    }

    def row(i: int) -> Prediction:
        item: LabeledMesh = data.test[i]
        return Prediction(item.name, item.mesh.verts, item.mesh.faces, predictions[i], item.labels, data.labels_at)

    write_report(
        out / "predictions.html",
        (row(i) for i in shown),
        summary,
        matrix=matrix,
        label_names=data.label_names,
        confusion=confusion,
        curves=curves,
        title="Segmentation of the test meshes",
    )
