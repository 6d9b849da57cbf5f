"""Charts of a training run as PNG files: its confusion matrix and its curves."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from diffnet.train.metrics import SCORE_NAMES, SHARES
from diffnet.train.ranking import ranking_curves
from diffnet.viz.palette import label_colors
from diffnet.viz.pictures import short_names

DPI = 160
MAX_RANKED = 10  # classes with curves
_MAX_CLASSES_WITH_NUMBERS = 25
_MAX_CLASSES_WITH_NAMES = 60


def confusion_png(matrix: Any, label_names: Sequence[str]) -> bytes:
    """Draw a confusion matrix. Returns the content of a PNG file.

    matrix: (C, C) integers; rows are the truth, columns the prediction
    label_names: the names of the classes

    Only classes that occur are shown. Each row is drawn as shares of its sum, with percentages if there are few
    classes.
    """
    counts = np.asarray(matrix, np.int64)
    occur = np.flatnonzero(counts.sum(axis=0) + counts.sum(axis=1))
    counts = counts[np.ix_(occur, occur)]
    total = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    n = len(occur)
    side = min(max(3.6, 1.8 + 0.52 * n), 8.0)
    figure = Figure(figsize=(side + 0.7, side), layout="constrained")
    axes = figure.add_subplot()
    axes.set(facecolor="0.93", xlabel="Prediction", ylabel="Truth")
    image = axes.imshow(shares if n else np.full((1, 1), np.nan), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1), fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)  # type: ignore[operator]
    axes.spines[:].set_visible(False)
    size = 9.0 if n <= 16 else 7.5 if n <= 30 else 5.0 if n <= _MAX_CLASSES_WITH_NAMES else 8.0
    ticks = np.arange(0, n, 1 if n <= _MAX_CLASSES_WITH_NAMES else -(-n // 8))
    _name_ticks(axes, ticks, chart_names([label_names[c] for c in occur[ticks]]), size)
    if len(ticks) < n:
        axes.set_title(f"{n} classes, some of them named", fontsize=9, color="0.4")
    axes.tick_params(length=0)
    if n <= _MAX_CLASSES_WITH_NUMBERS:
        _write_percentages(axes, shares, size)
    return png_of(figure)


def ranking_png(rankings: Sequence[Any], label_names: Sequence[str]) -> bytes:
    """Draw ROC curves, and precision by recall, of each ranked class. Returns the content of a PNG file.

    rankings: (2, K) of each class, or of the second one of two, see `exact_rankings`. Up to MAX_RANKED are drawn.
    """
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    roc, precision_by_recall = figure.subplots(1, 2)
    classes = range(len(label_names))[len(label_names) - len(rankings) :]
    every = [row for row in zip(classes, rankings, strict=True) if np.asarray(row[1]).sum(1).all()]
    ranked, colors, curves = every[:MAX_RANKED], label_colors(len(label_names)) / 255.0, []
    for i, counts in ranked:
        false, true, precision = ranking_curves(counts)
        curves += roc.plot(false, true, color=colors[i], lw=1.6)
        precision_by_recall.plot(true, precision, color=colors[i], lw=1.6)
    roc.plot([0, 1], [0, 1], color="0.7", lw=1, ls="--")
    roc.set(xlabel="False positives", ylabel="True positives", title="ROC")
    precision_by_recall.set(xlabel="Recall", ylabel="Precision", title="Precision by recall", ylim=(0, 1.02))
    for axes in (roc, precision_by_recall):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
    if ranked:
        names = [label_names[i].replace("$", r"\$") for i, _ in ranked]
        roc.legend(curves, names, frameon=False, fontsize=8)  # Matplotlib alone hides names that begin with _
    return png_of(figure)


def curves_png(csv_path: str | os.PathLike[str], score: str) -> bytes:
    """Draw losses and scores over the epochs. Returns the content of a PNG file.

    csv_path: a table with a column `epoch`. Every column whose name ends in "loss" or in the score is drawn. Cells may
        be empty. A column without a finite number is left out.
    score: the name of the score, see `Task.score_name`. Accuracies and mean IoU are shares. For R², see `r2_limits`.
    """
    with Path(csv_path).open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    columns = [name for name in table[0] if name.endswith(("loss", score))]
    cells = {
        name: [(float(row["epoch"]), float(row[name])) for row in table if row["epoch"] and row[name]]
        for name in columns
    }
    # A score is NaN in all epochs if no truth is known.
    lines = [name for name in columns if any(math.isfinite(value) for _, value in cells[name])] or columns
    kinds = [kind for kind in ("loss", score) if any(name.endswith(kind) for name in lines)]
    figure = Figure(figsize=(5.2, 2.5 * len(kinds)), layout="constrained")
    colors = label_colors(10) / 255.0
    for axes, kind in zip(np.ravel(figure.subplots(len(kinds), sharex=True)), kinds, strict=True):
        curves = []
        for color, name in zip(colors[[0, 5, 2, 3, 7]], [c for c in columns if c.endswith(kind)], strict=False):
            points = cells[name]
            if not points or name not in lines:
                continue
            label = name.removesuffix(kind).rstrip("_").replace("_", " ") or kind
            marker = "o" if len(points) <= 12 else ""  # without a marker, a single point is invisible
            axes.plot(*np.array(points).reshape(-1, 2).T, color=color, lw=1.8, label=label, marker=marker)
            curves.append([value for _, value in points if math.isfinite(value)])
        label = SCORE_NAMES.get(kind, kind)
        axes.set_ylabel(label[0].upper() + label[1:])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        if kind in SHARES:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        if kind == "r2" and any(curves):
            axes.set_ylim(*r2_limits([curve for curve in curves if curve]))
    figure.axes[-1].set_xlabel("Epoch")
    return png_of(figure)


def r2_limits(curves: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The range of an axis that shows curves of R², lowest value first.

    The first epochs can have large negative values, so values below −0.1 are left out. The last value of each curve is
    always shown.
    """
    values = np.concatenate([np.asarray(curve, np.float64) for curve in curves])
    top = float(values.max())
    bottom = max(float(values.min()), min(-0.1, *(curve[-1] for curve in curves)))
    margin = 0.05 * (top - bottom) or 0.05
    return bottom - margin, top + margin


def png_of(figure: Figure) -> bytes:
    """The content of a PNG file of a figure."""
    out = io.BytesIO()
    # The constrained layout can leave the label of a square plot outside of the figure; "tight" includes it.
    figure.savefig(out, format="png", dpi=DPI, bbox_inches="tight")
    return out.getvalue()


def _name_ticks(axes: Axes, positions: NDArray[np.int64], names: list[str], size: float) -> None:
    is_slanted = max(map(len, names), default=0) > 3
    axes.set_xticks(positions, names, rotation=45 if is_slanted else 0, ha="right" if is_slanted else "center")
    axes.set_yticks(positions, names)
    for text in axes.get_xticklabels():
        text.set(fontsize=size, parse_math=False, rotation_mode="anchor" if is_slanted else "default")
    for text in axes.get_yticklabels():
        text.set(fontsize=size, parse_math=False)


def chart_names(names: Sequence[str]) -> list[str]:
    """Names for which there is room in a chart."""
    return short_names(names, lambda name: len(name) <= 22)


def _write_percentages(axes: Axes, shares: NDArray[np.float64], size: float) -> None:
    for row, column in np.argwhere(shares >= 0.005):
        share = shares[row, column]
        color = "white" if share > 0.55 else "0.15"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=size, color=color)
