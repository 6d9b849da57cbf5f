"""The page about a trained regression: its scores, its charts, and its predictions on test meshes."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt, TargetsAt
from diffnet.geometry.processes import available_cores
from diffnet.train.report.report import charts_html, figure_html, summary_html, write_page
from diffnet.viz.fields import PLAIN_COLOR
from diffnet.viz.palette import Scale, make_scale
from diffnet.viz.render import draw, paint, paint_scalars, png_bytes
from diffnet.viz.surface import make_surface

PICTURE_SIZE = (420, 340)  # width and height of each picture of a mesh, in pixels
WHOLE_SIZE = (300, 260)  # the same for targets of whole meshes
MAX_COLUMNS = 3  # with pictures of each mesh


class Values(NamedTuple):
    """The prediction and the truth of one mesh or point cloud of the test set.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    prediction, truth: (N, C) numbers; NaN in the truth is missing
    """

    name: str
    verts: Any
    faces: Any
    prediction: NDArray[np.float64]
    truth: NDArray[np.float64]


def write_values_report(
    path: str | os.PathLike[str],
    rows: Iterable[Values],
    summary: Mapping[str, str],
    *,
    columns: Sequence[Mapping[str, Any]],
    at: TargetsAt,
    scatter: bytes,
    curves: bytes | None = None,
    title: str,
) -> None:
    """Write one self-contained HTML page about a trained regression and its predictions.

    rows: the meshes to show. Values at elements are shown as three pictures for each of the first columns: prediction,
        truth and error. Values of whole meshes are the caption of one picture.
    summary: entries at the top, in this order
    columns: name, count, mae, rmse and r2 of each column; a score may be None
    scatter, curves: charts, see `scatter_png` and `curves_png`
    """
    parts = [summary_html(summary), _columns_table(columns)]
    captions = ("Predictions against the truth", "Training")
    parts.append(charts_html(zip((scatter, curves), captions, captions, strict=True)))
    names = [str(column["name"]) for column in columns]
    # NumPy and zlib work without Python's global lock, so threads draw on all cores.
    with ThreadPoolExecutor(available_cores()) as pool:
        if at == "meshes":
            meshes = f'<div class="shapes">{"".join(pool.map(lambda row: _whole_mesh(row, names), rows))}</div>'
        else:
            meshes = "".join(pool.map(lambda row: _mesh_section(row, names, at), rows))
    parts.append(f"<section><h2>Meshes</h2>{meshes}</section>")
    write_page(path, title, parts)


def _columns_table(columns: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(row["name"]))}</th><td>{row["count"]:,}</td>'
        f"<td>{_number(row['mae'])}</td><td>{_number(row['rmse'])}</td><td>{_number(row['r2'])}</td></tr>"
        for row in columns
    )
    return (
        '<section><h2>Columns</h2><div class="scroll" tabindex="0" role="region" aria-label="Scores by column"><table>'
        '<thead><tr><th scope="col">Column</th><th scope="col">Targets</th><th scope="col">MAE</th>'
        f'<th scope="col">RMSE</th><th scope="col">R²</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _number(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:.4g}"


def _mesh_section(row: Values, names: Sequence[str], at: LabelsAt) -> str:
    drawing = draw(make_surface(row.verts, row.faces), at, PICTURE_SIZE)
    body, means = "", []
    for i, name in enumerate(names[:MAX_COLUMNS]):
        prediction, truth = row.prediction[:, i], row.truth[:, i]
        error = prediction - truth
        # One scale for prediction and truth, so that their colors can be compared.
        shared, around = make_scale(np.concatenate([prediction, truth])), make_scale(error, "coolwarm")
        pictures: list[tuple[str, NDArray[np.float64], Scale]] = [
            ("Prediction", prediction, shared),
            ("Truth", truth, shared),
            ("Error", error, around),
        ]
        figures = ""
        for kind, values, scale in pictures:
            png = png_bytes(paint_scalars(drawing, scale.shares(values), scale.table))
            note = f"{_number(scale.low)} to {_number(scale.high)}"
            figures += figure_html(png, f"{row.name}: {kind.lower()} of {name}", f"{kind} of {name}", note)
        body += f'<div class="pictures">{figures}</div>'
        known = np.abs(error[~np.isnan(error)])
        means.append(f"MAE of {name} {_number(float(known.mean()))}" if len(known) else f"no targets of {name}")
    heading = f"<h3>{html.escape(row.name)} <small>{html.escape(', '.join(means))}</small></h3>"
    return f"<article>{heading}{body}</article>"


def _whole_mesh(row: Values, names: Sequence[str]) -> str:
    surface = make_surface(row.verts, row.faces)
    plain = np.tile(np.array(PLAIN_COLOR, np.uint8), (len(surface.verts), 1))
    png = png_bytes(paint(draw(surface, "vertices", WHOLE_SIZE), plain))
    prediction, truth = row.prediction[0], row.truth[0]
    shown = [f"{name} {_number(prediction[i])}" for i, name in enumerate(names[:MAX_COLUMNS])]
    true = ", ".join(_number(value) for value in truth[:MAX_COLUMNS])
    figure = figure_html(png, f"{row.name}: {', '.join(shown)}", ", ".join(shown), f"truth: {true}")
    return f"<article>{figure}<small>{html.escape(row.name)}</small></article>"
