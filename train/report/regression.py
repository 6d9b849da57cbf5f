"""The page about a trained regression, and its chart of predicted against true numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from diffnet.data.labeled import TargetsAt
from diffnet.data.places import columns_at
from diffnet.train.metrics import number, score_columns
from diffnet.train.report import report
from diffnet.train.report.charts import chart_names, png_of
from diffnet.train.report.report import Prediction
from diffnet.viz.fields import PLAIN_COLOR
from diffnet.viz.palette import label_colors, make_scale
from diffnet.viz.render import Drawing, draw, paint_scalars, png_bytes
from diffnet.viz.surface import surface_of

PICTURED_COLUMNS = 3  # with pictures of each mesh
MAX_COLUMNS = 12  # in the chart
MAX_POINTS = 20_000  # of a column in the chart; more are drawn at random


def column_table(results: Mapping[str, Any]) -> str:
    """A section with the scores of vectors and of columns, which may be None. results: of `Task.results`"""
    entries = [*results.get("vectors", ()), *results["columns"]]
    scores = score_columns(entries)
    table = (
        (html.escape(str(row["name"])), f"{row['count']:,}", *(number(row.get(key)) for key in scores))
        for row in entries
    )
    return report.table_html("Columns", "Scores by column", ("Column", "Targets", *scores.values()), table)


def values_html(row: Prediction, names: Sequence[str], at: TargetsAt) -> str:
    """A mesh as three pictures for each of the first columns of a place: prediction, truth and error.

    Values of whole meshes are the caption of one picture. names: of the columns
    """
    if at == "meshes":
        return _whole_mesh(row, names)
    body, means = "", []
    both = (columns_at(values, names, len(row.mesh.verts), at) for values in (row.prediction, row.truth))
    for (place, columns, predictions), (*_, truths) in zip(*both, strict=True):
        fields = list(zip(columns, predictions.T, truths.T, strict=True))[:PICTURED_COLUMNS]
        if place == "meshes":
            means += [f"{name} {number(value[0])} (truth {number(truth[0])})" for name, value, truth in fields]
            continue
        drawing = draw(surface_of(row.mesh), place, report.PICTURE_SIZE)
        for field in fields:
            pictures, mean = _field(drawing, row.name, *field)
            body += pictures
            means.append(mean)
    heading = f"<h3>{html.escape(row.name)} <small>{html.escape(', '.join(means))}</small></h3>"
    return f"<article>{heading}{body}</article>"


def _field(
    drawing: Drawing, mesh: str, name: str, prediction: NDArray[np.float64], truth: NDArray[np.float64]
) -> tuple[str, str]:
    """The pictures of a field, its truth and the error with one color bar, and its mean error as text."""
    error = prediction - truth
    error_scale = make_scale(error, "coolwarm")
    # One scale for prediction and truth, so that their colors can be compared.
    value_scale = make_scale(np.concatenate([prediction, truth]))._replace(table=error_scale.table)
    figures, values_of = "", {"Prediction": prediction, "Truth": truth, "Error": error}
    for kind, values in values_of.items():
        scale = error_scale if kind == "Error" else value_scale
        png = png_bytes(paint_scalars(drawing, scale.shares(values), scale.table))
        figures += report.figure_html(png, f"{mesh}: {kind.lower()} of {name}", f"{kind} of {name}")
    ends = [(value_scale.low, error_scale.low), (value_scale.high, error_scale.high)]
    low, high = (f"<small>{number(value)}<br>error {number(of_error)}</small>" for value, of_error in ends)
    stops = ",".join(f"rgb({red},{green},{blue})" for red, green, blue in error_scale.table[::17])
    bar = f'<div class="bar">{low}<i style="background:linear-gradient(90deg,{stops})"></i>{high}</div>'
    sizes = np.abs(error[~np.isnan(error)])
    mean = f"MAE of {name} {number(float(sizes.mean()))}" if len(sizes) else f"no targets of {name}"
    return f'<div class="pictures">{figures}</div>{bar}', mean


def _whole_mesh(row: Prediction, names: Sequence[str]) -> str:
    prediction, truth = row.prediction[0], row.truth[0]
    texts = [f"{name} {number(prediction[i])}" for i, name in enumerate(names[:PICTURED_COLUMNS])]
    true = ", ".join(number(value) for value in truth[:PICTURED_COLUMNS])
    return report.small_figure(row, np.array(PLAIN_COLOR, np.uint8), ", ".join(texts), f"truth: {true}")


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
    titles = chart_names(names[:count])
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
        axes.set(xlabel="Truth", ylabel="Prediction")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    return png_of(figure)
