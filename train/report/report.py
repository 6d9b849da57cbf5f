"""The page about a trained model: its scores, its charts, and its predictions on test meshes."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import UNLABELED, LabelsAt, TargetsAt
from diffnet.geometry import Mesh
from diffnet.geometry.files import write_atomically
from diffnet.geometry.processes import available_cores
from diffnet.train.metrics import class_scores, percent
from diffnet.viz.pages import fill_template
from diffnet.viz.palette import ERROR_COLORS, colorize, label_colors
from diffnet.viz.render import draw, paint, png_bytes
from diffnet.viz.surface import surface_of

PICTURE_SIZE = (420, 340)  # width and height of each picture of a mesh, in pixels
LISTED_MESHES = 50  # in the table of scores
SMALL_SIZE = (300, 260)  # the same of a mesh with one picture

Chart = tuple[bytes | None, str, str]  # a PNG file or None, its description and its caption


class Prediction(NamedTuple):
    """The prediction and the truth of one mesh or point cloud of the test set.

    prediction, truth: (N,) integers, negative where unlabeled, or (N, C) numbers, NaN in the truth where missing. The
        prediction of the class of a whole mesh has the probabilities (1, C) of all classes.
    """

    name: str
    mesh: Mesh
    prediction: Any
    truth: Any


def class_table(matrix: Any, label_names: Sequence[str], at: TargetsAt) -> str:
    """A section with the scores of each class, from a confusion matrix (C, C) whose rows are the truth."""
    scores = class_scores(matrix)
    colors = label_colors(len(scores.iou))
    table = (
        (
            f'<i style="background:rgb({",".join(map(str, colors[c]))})"></i>{html.escape(label_names[c])}',
            f"{scores.elements[c]:,}",
            percent(scores.accuracy[c]),
            percent(scores.iou[c]),
        )
        for c in np.flatnonzero(~np.isnan(scores.iou)).tolist()
    )
    columns = "Class", "Meshes" if at == "meshes" else "Elements", "Accuracy", "IoU"
    return table_html("Classes", "Scores by class", columns, table)


def write_page(path: str | os.PathLike[str], title: str, summary: Mapping[str, str], parts: Iterable[str]) -> None:
    """Write one self-contained HTML page with these parts.

    summary: entries at the top, for example {"Test accuracy": "92.1 %", "Date": "2025-03-01"}, in this order
    """
    entries = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>" for k, v in summary.items() if v)
    body = "\n".join([f'<dl class="summary">{"".join(entries)}</dl>', *parts])
    write_atomically(path, fill_template("diffnet.train.report", "report.html", title=html.escape(title), body=body))


def charts_html(charts: Iterable[Chart]) -> str:
    """A section with charts. None stands for a chart that there isn't."""
    figures = "".join(figure_html(png, alt, caption) for png, alt, caption in charts if png is not None)
    return f'<section class="charts">{figures}</section>' if figures else ""


def table_html(heading: str, label: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A section with a table, whose cells are HTML. The first one of a row is its heading."""
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(map("<td>{}</td>".format, cells))}</tr>' for first, *cells in rows
    )
    return (
        f'<section><h2>{heading}</h2><div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def mesh_table_html(rows: Sequence[Sequence[Any]]) -> str:
    """A section with the scores of each mesh, the first LISTED_MESHES of them. rows: with a header, the worst first"""
    more = len(rows) - 1 - LISTED_MESHES
    heading = "Scores of each mesh" + (f", the first {LISTED_MESHES}; per_mesh.csv has all" if more > 0 else "")
    header, *cells = ([html.escape(str(cell)) for cell in row] for row in rows[: LISTED_MESHES + 1])
    return table_html(heading, "Scores of each mesh", header, cells)


def meshes_html(rows: Iterable[Prediction], section: Callable[[Prediction], str], at: TargetsAt) -> str:
    """A section with the HTML of each mesh."""
    # NumPy and zlib work without Python's global lock, so threads draw on all cores.
    with ThreadPoolExecutor(available_cores()) as pool:
        meshes = "".join(pool.map(section, rows))
    if at == "meshes" and meshes:
        meshes = f'<div class="shapes">{meshes}</div>'
    return f"<section><h2>Meshes</h2>{meshes}</section>" if meshes else ""


def figure_html(png: bytes, alt: str, caption: str, note: str = "") -> str:
    """A picture inside the page, with its caption and a small note beside it."""
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    side = f" <small>{html.escape(note)}</small>" if note else ""
    return (
        f'<figure><img src="{source}" alt="{html.escape(alt)}" loading="lazy">'
        f"<figcaption>{html.escape(caption)}{side}</figcaption></figure>"
    )


def small_figure(row: Prediction, color: NDArray[np.uint8], caption: str, note: str) -> str:
    """A mesh in one color (3,), with its prediction and a note."""
    surface = surface_of(row.mesh)
    colors = np.tile(color, (len(surface.verts), 1))
    png = png_bytes(paint(draw(surface, "vertices", SMALL_SIZE), colors))
    name = html.escape(row.name)
    return f"<article>{figure_html(png, f'{row.name}: {caption}', caption, note)}<small>{name}</small></article>"


def labels_html(row: Prediction, label_names: Sequence[str], at: TargetsAt) -> str:
    """A mesh as three pictures, prediction, truth and errors; or as one, if it has one label."""
    if at == "meshes":
        return _whole_mesh(row, label_names)
    prediction, truth = np.asarray(row.prediction), np.asarray(row.truth)
    errors = np.where(truth < 0, UNLABELED, prediction != truth)
    mistakes = errors[errors >= 0]
    accuracy = percent(float(np.mean(mistakes == 0)) if len(mistakes) else np.nan)
    wrong = f"{len(mistakes) - int((mistakes == 0).sum()):,} of {len(mistakes):,}"
    pictures: list[tuple[str, NDArray[Any], NDArray[np.uint8] | None, str]] = [
        ("Prediction", prediction, None, ""),
        ("Truth", truth, None, ""),
        ("Errors", errors, ERROR_COLORS, wrong),
    ]
    drawing = draw(surface_of(row.mesh), cast(LabelsAt, at), PICTURE_SIZE)
    figures = "".join(
        figure_html(png_bytes(paint(drawing, colorize(labels, colors))), f"{row.name}: {kind.lower()}", kind, note)
        for kind, labels, colors, note in pictures
    )
    heading = f"<h3>{html.escape(row.name)} <small>{accuracy} correct</small></h3>"
    return f'<article>{heading}<div class="pictures">{figures}</div></article>'


def _whole_mesh(row: Prediction, label_names: Sequence[str]) -> str:
    """The prediction with its probability, and the truth if the prediction is wrong."""
    probabilities, truth = np.asarray(row.prediction).ravel(), int(np.asarray(row.truth).ravel()[0])
    label = int(probabilities.argmax())
    caption = f"{label_names[label]}, {percent(float(probabilities[label]), 0)}"
    note = "unlabeled" if truth < 0 else f"✗ truth: {label_names[truth]}"
    return small_figure(row, colorize(np.array([label]))[0], caption, "" if truth == label else note)
