"""The page about a trained regression, and its chart of predicted against true numbers."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt, TargetsAt
from diffnet.train.metrics import number, score_columns
from diffnet.train.report import report
from diffnet.train.report.charts import fits_chart, png_of
from diffnet.train.report.report import (
    Prediction,
    charts_html,
    figure_html,
    mesh_table_html,
    meshes_html,
    small_figure,
    table_html,
    write_page,
)
from diffnet.viz.fields import PLAIN_COLOR
from diffnet.viz.palette import Scale, label_colors, make_scale
from diffnet.viz.pictures import short_names
from diffnet.viz.render import draw, paint_scalars, png_bytes
from diffnet.viz.surface import make_surface

PICTURED_COLUMNS = 3  # with pictures of each mesh
MAX_COLUMNS = 12  # in the chart
MAX_POINTS = 20_000  # of a column in the chart; more are drawn at random


def write_values_report(
    path: str | os.PathLike[str],
    rows: Iterable[Prediction],
    summary: Mapping[str, str],
    *,
    columns: Sequence[Mapping[str, Any]],
    vectors: Sequence[Mapping[str, Any]] = (),
    meshes: Sequence[Sequence[Any]] = (),
    at: TargetsAt,
    scatter: bytes,
    curves: bytes | None = None,
    title: str,
) -> None:
    """Write one self-contained HTML page about a trained regression and its predictions.

    rows: the meshes to show. Values at elements are shown as three pictures for each of the first columns: prediction,
        truth and error. Values of whole meshes are the caption of one picture.
    summary: entries at the top, in this order
    columns: name, count and the `score_columns` of each column; a score may be None
    vectors: the same of each vector
    meshes: the table of the scores of each mesh, see `mesh_table_html`
    scatter, curves: charts, see `scatter_png` and `curves_png`
    """
    entries = [*vectors, *columns]
    scores = score_columns(entries)
    table = (
        (html.escape(str(row["name"])), f"{row['count']:,}", *(number(row.get(key)) for key in scores))
        for row in entries
    )
    captions = ("Predictions against the truth", "Training")
    names = [str(column["name"]) for column in columns]

    def section(row: Prediction) -> str:
        return _whole_mesh(row, names) if at == "meshes" else _mesh_section(row, names, at)

    parts = [
        table_html("Columns", "Scores by column", ("Column", "Targets", *scores.values()), table),
        charts_html(zip((scatter, curves), captions, captions, strict=True)),
        mesh_table_html(meshes),
        meshes_html(rows, section, at),
    ]
    write_page(path, title, summary, parts)


def _mesh_section(row: Prediction, names: Sequence[str], at: LabelsAt) -> str:
    drawing = draw(make_surface(row.verts, row.faces), at, report.PICTURE_SIZE)
    body, means = "", []
    for i, name in enumerate(names[:PICTURED_COLUMNS]):
        prediction, truth = row.prediction[:, i], row.truth[:, i]
        error = prediction - truth
        # One scale for prediction and truth, so that their colors can be compared.
        value_scale, error_scale = make_scale(np.concatenate([prediction, truth])), make_scale(error, "coolwarm")
        pictures: list[tuple[str, NDArray[np.float64], Scale]] = [
            ("Prediction", prediction, value_scale),
            ("Truth", truth, value_scale),
            ("Error", error, error_scale),
        ]
        figures = ""
        for kind, values, scale in pictures:
            png = png_bytes(paint_scalars(drawing, scale.shares(values), scale.table))
            note = f"{number(scale.low)} to {number(scale.high)}"
            figures += figure_html(png, f"{row.name}: {kind.lower()} of {name}", f"{kind} of {name}", note)
        body += f'<div class="pictures">{figures}</div>'
        sizes = np.abs(error[~np.isnan(error)])
        means.append(f"MAE of {name} {number(float(sizes.mean()))}" if len(sizes) else f"no targets of {name}")
    heading = f"<h3>{html.escape(row.name)} <small>{html.escape(', '.join(means))}</small></h3>"
    return f"<article>{heading}{body}</article>"


def _whole_mesh(row: Prediction, names: Sequence[str]) -> str:
    prediction, truth = row.prediction[0], row.truth[0]
    texts = [f"{name} {number(prediction[i])}" for i, name in enumerate(names[:PICTURED_COLUMNS])]
    true = ", ".join(number(value) for value in truth[:PICTURED_COLUMNS])
    return small_figure(row, np.array(PLAIN_COLOR, np.uint8), ", ".join(texts), f"truth: {true}")


def scatter_png(predictions: NDArray[np.float64], truth: NDArray[np.float64], names: Sequence[str]) -> bytes:
    """Draw predictions against the truth, one panel for each column. Returns the content of a PNG file.

    predictions, truth: (N, C); NaN in the truth is missing
    names: of the columns; the first MAX_COLUMNS are drawn
    """
    count = min(len(names), MAX_COLUMNS)
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    side = 4.0 if count == 1 else 2.6  # inches; a page shows all panels in the same width
    figure = Figure(figsize=(1.05 * side * across, side * down), layout="constrained")
    color = label_colors(1)[0] / 255.0
    titles = short_names(names[:count], fits_chart)
    for i in range(count):
        axes = figure.add_subplot(down, across, i + 1)
        rows = np.flatnonzero(~np.isnan(truth[:, i]))
        if len(rows) > MAX_POINTS:
            rows = np.random.default_rng(0).choice(rows, MAX_POINTS, replace=False)
        x, y = truth[rows, i], predictions[rows, i]
        # Few points are drawn large, and many small and transparent.
        crowding = max(len(rows) / 300, 1)
        axes.scatter(x, y, s=max(18 / crowding, 3), color=color, alpha=max(0.8 / crowding, 0.25), lw=0)
        if len(rows):
            ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
            axes.plot(ends, ends, color="0.5", lw=1, zorder=0)
        axes.set_title(titles[i], fontsize=10, parse_math=False)
        axes.set_xlabel("Truth")
        axes.set_ylabel("Prediction")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    return png_of(figure)
