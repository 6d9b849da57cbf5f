"""What a training run came to: its curves, its confusions, and its predictions on the test meshes."""

from __future__ import annotations

import base64
import csv
import html
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from diffnet.data.labeled import UNLABELED, LabelsAt
from diffnet.train.report.export import png_bytes, write_atomically
from diffnet.train.report.palette import ERROR_COLORS, label_colors
from diffnet.train.report.render import render

_MOST_CLASSES_WITH_NUMBERS = 25
_MOST_CLASSES_WITH_NAMES = 60
_PICTURE_SIZE = (420, 340)


class Prediction(NamedTuple):
    """One mesh or point cloud of the test set, as predicted and as it should be.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    prediction, truth: (V,), (F,) or (E,) integers, according to `at`, negative where unlabeled
    """

    name: str
    verts: Any
    faces: Any
    prediction: Any
    truth: Any
    at: LabelsAt = "vertices"


class ClassScores(NamedTuple):
    """Scores of each class, (C,) each.

    elements: how many elements have this class in truth, int64
    accuracy: the share of those that were predicted so, NaN where there are none
    iou: intersection over union of truth and prediction, NaN where a class occurs in neither
    """

    elements: NDArray[np.int64]
    accuracy: NDArray[np.float64]
    iou: NDArray[np.float64]


def class_scores(matrix: Any) -> ClassScores:
    """The scores of each class, from a confusion matrix (C, C) of counts: rows are the truth, columns predictions."""
    counts = _square(matrix)
    right, truth, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    union = truth + predicted - right
    with np.errstate(invalid="ignore"):
        return ClassScores(truth, right / truth, right / union)


def confusion_matrix_picture(path: str | os.PathLike[str], matrix: Any, label_names: Sequence[str]) -> None:
    """Draw a confusion matrix as a PNG file.

    matrix: (C, C) integers, rows are the truth, columns the prediction
    label_names: the names of the classes

    Only classes that occur are shown. Each row is drawn as shares of its sum, with percentages written in while there
    are few classes. Raises ValueError where the matrix isn't square.
    """
    write_atomically(path, _confusion_png(matrix, label_names))


def curves_picture(path: str | os.PathLike[str], csv_path: str | os.PathLike[str]) -> None:
    """Draw losses and accuracies over epochs as a PNG file.

    csv_path: a table with a column `epoch`; every column whose name ends in "loss" or "accuracy" is drawn, cells may be
        empty. Accuracies are shares from 0 to 1.

    Raises ValueError where there is no such column or no row.
    """
    write_atomically(path, _curves_png(csv_path))


def predictions_page(
    path: str | os.PathLike[str],
    rows: Iterable[Prediction],
    summary: Mapping[str, str],
    *,
    matrix: Any,
    label_names: Sequence[str],
    csv_path: str | os.PathLike[str] | None = None,
    title: str = "Predictions",
) -> None:
    """Write one self-contained HTML page about a trained model and its predictions.

    rows: the meshes to show, each as three pictures: prediction, truth, and errors
    summary: what stands at the top, e.g. {"Test accuracy": "92.1 %", "Date": "2025-03-01"}, in this order
    matrix: (C, C) integers, the confusion matrix over the test set, rows are the truth; makes the table of classes
    label_names: the names of the classes
    csv_path: metrics by epoch, drawn as `curves_picture` does

    Raises ValueError where shapes don't fit.
    """
    parts = [_summary(summary), _classes_table(matrix, label_names)]
    figures = [_figure(_confusion_png(matrix, label_names), "Confusion matrix", "Confusions by class")]
    if csv_path is not None:
        figures.append(_figure(_curves_png(csv_path), "Losses and accuracies over the epochs", "Training"))
    parts.append(f'<section class="charts">{"".join(figures)}</section>')
    meshes = "".join(_mesh_section(row) for row in rows)
    if meshes:
        parts.append(f"<section><h2>Test meshes</h2>{meshes}</section>")
    write_atomically(path, _page(title, "\n".join(parts)))


def _square(matrix: Any) -> NDArray[np.int64]:
    counts = np.asarray(matrix, np.int64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f"a confusion matrix should have shape (C, C), shape is {counts.shape}")
    return counts


def _name(label_names: Sequence[str], label: int) -> str:
    return str(label_names[label]) if label < len(label_names) else str(label)


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f}\u202f%"


# ---- charts ----


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160)
    return out.getvalue()


def _confusion_png(matrix: Any, label_names: Sequence[str]) -> bytes:
    counts = _square(matrix)
    occur = np.flatnonzero(counts.sum(axis=0) + counts.sum(axis=1))
    counts = counts[np.ix_(occur, occur)]
    total = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    n = len(occur)
    side = min(max(3.6, 1.8 + 0.52 * n), 8.0)
    figure = Figure(figsize=(side + 0.7, side), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("0.93")
    image = axes.imshow(shares if n else np.full((1, 1), np.nan), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1), fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)  # type: ignore[operator]
    axes.set_xlabel("Prediction")
    axes.set_ylabel("Truth")
    axes.spines[:].set_visible(False)
    size = 9.0 if n <= 16 else 7.5 if n <= 30 else 5.0 if n <= _MOST_CLASSES_WITH_NAMES else 8.0
    named = np.arange(0, n, 1 if n <= _MOST_CLASSES_WITH_NAMES else -(-n // 8))
    _name_ticks(axes, named, [_short(_name(label_names, int(c))) for c in occur[named]], size)
    if len(named) < n:
        axes.set_title(f"{n} classes, some of them named", fontsize=9, color="0.4")
    axes.tick_params(length=0)
    if n <= _MOST_CLASSES_WITH_NUMBERS:
        _write_percentages(axes, shares, size)
    return _png(figure)


def _name_ticks(axes: Axes, positions: NDArray[np.int64], names: list[str], size: float) -> None:
    slanted = max(map(len, names), default=0) > 3
    axes.set_xticks(positions, names, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_yticks(positions, names)
    for text in axes.get_xticklabels():
        text.set(fontsize=size, parse_math=False, rotation_mode="anchor" if slanted else "default")
    for text in axes.get_yticklabels():
        text.set(fontsize=size, parse_math=False)


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _write_percentages(axes: Axes, shares: NDArray[np.float64], size: float) -> None:
    for row, column in np.argwhere(shares >= 0.005):
        share = shares[row, column]
        color = "white" if share > 0.55 else "0.15"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=size, color=color)


def _curves_png(csv_path: str | os.PathLike[str]) -> bytes:
    with Path(csv_path).open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    columns = [name for name in (table[0] if table else {}) if name and name.endswith(("loss", "accuracy"))]
    if not columns or "epoch" not in table[0]:
        raise ValueError(
            f"{csv_path}: expected rows with a column 'epoch' and columns that end in 'loss' or 'accuracy'"
        )
    kinds = [kind for kind in ("loss", "accuracy") if any(name.endswith(kind) for name in columns)]
    figure = Figure(figsize=(5.2, 2.5 * len(kinds)), layout="constrained")
    colors = label_colors(10) / 255.0
    for axes, kind in zip(np.ravel(figure.subplots(len(kinds), sharex=True)), kinds, strict=True):
        for color, name in zip(colors[[0, 5, 2, 3, 7]], [c for c in columns if c.endswith(kind)], strict=False):
            points = [(float(row["epoch"]), float(row[name])) for row in table if row["epoch"] and row[name]]
            if not points:
                continue
            label = name.removesuffix(kind).rstrip("_").replace("_", " ") or kind
            axes.plot(*np.array(points).reshape(-1, 2).T, color=color, lw=1.8, label=label, marker=_marker(points))
        axes.set_ylabel(kind.capitalize())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        if kind == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    figure.axes[-1].set_xlabel("Epoch")
    return _png(figure)


def _marker(points: Sequence[Any]) -> str:
    """Few points are marked, so that a single one can be seen."""
    return "o" if len(points) <= 12 else ""


# ---- the page ----


def _summary(summary: Mapping[str, str]) -> str:
    entries = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>" for k, v in summary.items())
    return f'<dl class="summary">{"".join(entries)}</dl>'


def _classes_table(matrix: Any, label_names: Sequence[str]) -> str:
    scores = class_scores(matrix)
    occur = np.flatnonzero(~np.isnan(scores.iou))
    colors = label_colors(len(scores.iou))
    rows = "".join(
        f'<tr><th scope="row">{_swatch(colors[c])}{html.escape(_name(label_names, int(c)))}</th>'
        f"<td>{scores.elements[c]:,}</td><td>{_percent(scores.accuracy[c])}</td><td>{_percent(scores.iou[c])}</td></tr>"
        for c in occur
    )
    return (
        '<section><h2>Classes</h2><div class="scroll" tabindex="0" role="region" aria-label="Scores by class"><table>'
        '<thead><tr><th scope="col">Class</th><th scope="col">Elements</th><th scope="col">Accuracy</th>'
        f'<th scope="col">IoU</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _swatch(color: NDArray[np.uint8]) -> str:
    return f'<i style="background:rgb({color[0]},{color[1]},{color[2]})"></i>'


def _figure(png: bytes, alt: str, caption: str, note: str = "") -> str:
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    side = f" <small>{html.escape(note)}</small>" if note else ""
    return (
        f'<figure><img src="{source}" alt="{html.escape(alt)}" loading="lazy">'
        f"<figcaption>{html.escape(caption)}{side}</figcaption></figure>"
    )


def _mesh_section(row: Prediction) -> str:
    prediction, truth = np.asarray(row.prediction), np.asarray(row.truth)
    if prediction.shape != truth.shape:
        raise ValueError(f"{row.name}: {prediction.shape} labels are predicted, but the truth has {truth.shape}")
    errors = np.where(truth < 0, UNLABELED, prediction != truth)
    scored = errors[errors >= 0]
    accuracy = _percent(float(np.mean(scored == 0)) if len(scored) else np.nan)
    pictures: list[tuple[str, NDArray[Any], NDArray[np.uint8] | None]] = [
        ("Prediction", prediction, None),
        ("Truth", truth, None),
        ("Errors", errors, ERROR_COLORS),
    ]
    figures = "".join(
        _figure(
            png_bytes(render(row.verts, row.faces, labels, at=row.at, size=_PICTURE_SIZE, colors=colors)),
            f"{row.name}: {what.lower()}",
            what,
            f"{len(scored) - int((scored == 0).sum()):,} of {len(scored):,}" if what == "Errors" else "",
        )
        for what, labels, colors in pictures
    )
    heading = f"<h3>{html.escape(row.name)} <small>{accuracy} correct</small></h3>"
    return f'<article>{heading}<div class="pictures">{figures}</div></article>'


def _page(title: str, body: str) -> str:
    escaped = html.escape(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escaped}</h1>
{body}
</main>
</body>
</html>
"""


_STYLE = """
:root { --ground: #f6f7f8; --panel: #fff; --ink: #1d2126; --faint: #667079; --line: #dfe3e7; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16191d; --panel: #1e2227; --ink: #e8eaed; --faint: #98a2ab; --line: #31373e; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0 0 1.25rem; font-size: 1.7rem; font-weight: 650; letter-spacing: -.01em; line-height: 1.2; }
h2 { margin: 2.75rem 0 .8rem; font-size: 1.1rem; font-weight: 600; }
h3 { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin: 0 0 .6rem; font-size: 1rem;
  font-weight: 600; }
h1, h3, dd, th[scope=row] { overflow-wrap: anywhere; }
small { color: var(--faint); font-size: .875rem; font-weight: 400; font-variant-numeric: tabular-nums; }
.summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1px; margin: 0;
  overflow: hidden; border: 1px solid var(--line); border-radius: 10px; background: var(--panel); }
.summary div { padding: .8rem 1rem; box-shadow: 0 0 0 1px var(--line); }
dt { color: var(--faint); font-size: .85rem; }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { max-height: 25rem; overflow: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--panel); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem 1rem; text-align: right; }
th:first-child { text-align: left; }
th[scope=row] { font-weight: 400; }
thead th { position: sticky; top: 0; background: var(--panel); box-shadow: inset 0 -1px var(--line);
  color: var(--faint); font-size: .85rem; font-weight: 500; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
i { display: inline-block; width: .8em; height: .8em; margin-right: .6em; border-radius: 3px; vertical-align: -.05em;
  box-shadow: inset 0 0 0 1px rgb(0 0 0 / .18); }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 0 .75rem; margin-top: .4rem; color: var(--faint);
  font-size: .875rem; }
img { display: block; width: 100%; height: auto; border-radius: 8px; background: #fff; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1rem;
  align-items: start; margin-top: 2.75rem; }
.charts figure { padding: .9rem; border: 1px solid var(--line); border-radius: 10px; background: #fff; }
.charts figure { display: flex; flex-direction: column-reverse; gap: .5rem; }
.charts figcaption { margin: 0; color: #1d2126; font-size: .95rem; font-weight: 600; }
article { margin-bottom: 1rem; padding: 1rem; border: 1px solid var(--line); border-radius: 10px;
  background: var(--panel); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: .8rem; }
@media (max-width: 32rem) { th, td { padding-inline: .6rem; } }
@media print { .scroll { max-height: none; } article { break-inside: avoid; } }
"""
