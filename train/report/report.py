"""The page about a trained model: its scores, its charts, and its predictions on test meshes."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import UNLABELED, LabelsAt
from diffnet.geometry.files import write_atomically
from diffnet.geometry.processes import available_cores
from diffnet.train.metrics import class_scores, percent
from diffnet.train.report.charts import class_name
from diffnet.train.report.shapes import ClassifiedMesh, caption_of, picture_of
from diffnet.viz.fields import make_field
from diffnet.viz.pages import fill_template
from diffnet.viz.palette import ERROR_COLORS, colorize, label_colors
from diffnet.viz.render import draw, paint, png_bytes
from diffnet.viz.surface import make_surface

PICTURE_SIZE = (420, 340)  # width and height of each picture of a mesh, in pixels


class Prediction(NamedTuple):
    """The prediction and the truth of one mesh or point cloud of the test set.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    prediction, truth: (V,), (F,) or (E,) integers, according to `at`, negative where unlabeled
    """

    name: str
    verts: Any
    faces: Any
    prediction: Any
    truth: Any
    at: LabelsAt = "vertices"


def write_report(
    path: str | os.PathLike[str],
    rows: Iterable[Prediction],
    summary: Mapping[str, str],
    *,
    matrix: Any,
    label_names: Sequence[str],
    confusion: bytes | None = None,
    curves: bytes | None = None,
    title: str = "Predictions",
    shapes: Iterable[ClassifiedMesh] = (),
    elements: str = "Elements",
) -> None:
    """Write one self-contained HTML page about a trained model and its predictions.

    rows: the meshes to show, each as three pictures: prediction, truth and errors
    summary: entries at the top, for example {"Test accuracy": "92.1 %", "Date": "2025-03-01"}, in this order
    matrix: (C, C) integers, the confusion matrix over the test set, for the table of classes; rows are the truth
    label_names: the names of the classes; a class without a name is shown as its number
    confusion, curves: charts to show, see `confusion_png` and `curves_png`
    shapes: classified meshes to show, each as one picture
    elements: the heading of the number of elements of each class

    Raises ValueError for shapes that do not fit.
    """
    parts = [summary_html(summary), _classes_table(matrix, label_names, elements)]
    charts = (
        (confusion, "Confusion matrix", "Confusions by class"),
        (curves, "Losses and accuracies over the epochs", "Training"),
    )
    parts.append(charts_html(charts))
    # NumPy and zlib work without Python's global lock, so threads draw on all cores.
    with ThreadPoolExecutor(available_cores()) as pool:
        meshes = "".join(pool.map(_mesh_section, rows))
        classified = "".join(pool.map(lambda row: _shape_figure(row, label_names), shapes))
    if meshes:
        parts.append(f"<section><h2>Meshes</h2>{meshes}</section>")
    if classified:
        parts.append(f'<section><h2>Meshes</h2><div class="shapes">{classified}</div></section>')
    write_page(path, title, parts)


def write_page(path: str | os.PathLike[str], title: str, parts: Iterable[str]) -> None:
    """Write a page of these parts."""
    body = "\n".join(parts)
    write_atomically(path, fill_template("diffnet.train.report", "report.html", title=html.escape(title), body=body))


def charts_html(charts: Iterable[tuple[bytes | None, str, str]]) -> str:
    """A section with charts, each with its description and its caption. None stands for a chart that there isn't."""
    figures = "".join(figure_html(png, alt, caption) for png, alt, caption in charts if png is not None)
    return f'<section class="charts">{figures}</section>' if figures else ""


def summary_html(summary: Mapping[str, str]) -> str:
    """The entries at the top of a page."""
    entries = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>" for k, v in summary.items())
    return f'<dl class="summary">{"".join(entries)}</dl>'


def _classes_table(matrix: Any, label_names: Sequence[str], elements: str) -> str:
    scores = class_scores(matrix)
    occur = np.flatnonzero(~np.isnan(scores.iou))
    colors = label_colors(len(scores.iou))
    rows = "".join(
        f'<tr><th scope="row">{_swatch(colors[c])}{html.escape(class_name(label_names, int(c)))}</th>'
        f"<td>{scores.elements[c]:,}</td><td>{percent(scores.accuracy[c])}</td><td>{percent(scores.iou[c])}</td></tr>"
        for c in occur
    )
    return (
        '<section><h2>Classes</h2><div class="scroll" tabindex="0" role="region" aria-label="Scores by class"><table>'
        f'<thead><tr><th scope="col">Class</th><th scope="col">{html.escape(elements)}</th>'
        '<th scope="col">Accuracy</th>'
        f'<th scope="col">IoU</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _swatch(color: NDArray[np.uint8]) -> str:
    return f'<i style="background:rgb({color[0]},{color[1]},{color[2]})"></i>'


def figure_html(png: bytes, alt: str, caption: str, note: str = "") -> str:
    """A picture inside the page, with its caption and a small note beside it."""
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    side = f" <small>{html.escape(note)}</small>" if note else ""
    return (
        f'<figure><img src="{source}" alt="{html.escape(alt)}" loading="lazy">'
        f"<figcaption>{html.escape(caption)}{side}</figcaption></figure>"
    )


def _shape_figure(row: ClassifiedMesh, label_names: Sequence[str]) -> str:
    caption, note = caption_of(row, label_names)
    figure = figure_html(picture_of(row), f"{row.name}: {caption}", caption, note)
    return f"<article>{figure}<small>{html.escape(row.name)}</small></article>"


def _mesh_section(row: Prediction) -> str:
    prediction, truth = np.asarray(row.prediction), np.asarray(row.truth)
    if prediction.shape != truth.shape:
        raise ValueError(f"{row.name}: the prediction has shape {prediction.shape}, but the truth has {truth.shape}")
    errors = np.where(truth < 0, UNLABELED, prediction != truth)
    scored = errors[errors >= 0]
    accuracy = percent(float(np.mean(scored == 0)) if len(scored) else np.nan)
    pictures: list[tuple[str, NDArray[Any], NDArray[np.uint8] | None]] = [
        ("Prediction", prediction, None),
        ("Truth", truth, None),
        ("Errors", errors, ERROR_COLORS),
    ]
    surface = make_surface(row.verts, row.faces)
    make_field("labels", "prediction", prediction, surface, row.at)  # raises an error if it does not fit
    drawing = draw(surface, row.at, PICTURE_SIZE)
    figures = "".join(
        figure_html(
            png_bytes(paint(drawing, colorize(labels, colors))),
            f"{row.name}: {kind.lower()}",
            kind,
            f"{len(scored) - int((scored == 0).sum()):,} of {len(scored):,}" if kind == "Errors" else "",
        )
        for kind, labels, colors in pictures
    )
    heading = f"<h3>{html.escape(row.name)} <small>{accuracy} correct</small></h3>"
    return f'<article>{heading}<div class="pictures">{figures}</div></article>'
