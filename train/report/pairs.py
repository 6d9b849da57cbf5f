"""The page about a trained correspondence: its scores, its charts, and transferred colors of test pairs."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from diffnet.geometry import Mesh, error_curve
from diffnet.geometry.files import csv_text, write_atomically
from diffnet.geometry.geodesics.errors import THRESHOLDS
from diffnet.train.correspondence.maps import ScoredPairs
from diffnet.train.metrics import scores_a_test, spread_over
from diffnet.train.report import report
from diffnet.train.report.charts import png_of
from diffnet.train.report.report import Chart, charts_html, figure_html, write_page
from diffnet.train.report.transfer import pair_colors
from diffnet.viz import page
from diffnet.viz.render import draw, paint, png_bytes
from diffnet.viz.surface import surface_of

SHOWN_PAIRS = 8


def write_pairs_report(
    out: Path, pairs: ScoredPairs, results: Mapping[str, Any], summary: Mapping[str, str], curves: bytes | None
) -> None:
    """Write predictions.html, a page for each shown pair in pairs/, and errors.csv and errors.png if errors are known.

    results: the content of results.json
    summary: entries at the top of the page
    """
    numbers, kind = _spread(pairs), "test" if scores_a_test(results) else "scored"
    scores: dict[str, str] = {}
    charts: list[Chart] = []
    if pairs.errors:
        curve = error_curve(np.concatenate([pair.errors for pair in pairs.errors]))
        rows = ((f"{limit:.6g}", f"{share:.6g}") for limit, share in zip(THRESHOLDS, curve, strict=True))
        write_atomically(out / "errors.csv", csv_text([("error", "share"), *rows]))
        chart = curve_png(curve)
        write_atomically(out / "errors.png", chart)
        caption = f"Geodesic errors of the {kind} pairs"
        charts.append((chart, caption, caption))
        scores = {
            "Mean error ×100": f"{results['mean_error_x100']:.3f}",
            "Area under the curve": f"{results['auc']:.4f}",
        }
        if results["flipped_pairs"] is not None:
            scores["Left and right exchanged"] = f"{results['flipped_pairs']} of {results['test_pairs']} pairs"
    (out / "pairs").mkdir(exist_ok=True)
    articles = "".join(_article(out, pairs, number) for number in numbers)
    charts.append((curves, "Training", "Training"))
    parts = [charts_html(charts), f"<section><h2>{kind.capitalize()} pairs</h2>{articles}</section>"]
    entries = {**scores, "Pairs": str(results["test_pairs"]), **summary}
    write_page(out / "predictions.html", f"Correspondences of the {kind} pairs", entries, parts)


def curve_png(curve: NDArray[np.float64]) -> bytes:
    """Draw the share of errors below each of `THRESHOLDS`. Returns the content of a PNG file."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(THRESHOLDS, 100 * curve, lw=1.8)
    axes.set(xlabel="Geodesic error / √area", ylabel="Correspondences (%)", xlim=(0, THRESHOLDS[-1]), ylim=(0, 101))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    return png_of(figure)


def _spread(pairs: ScoredPairs) -> list[int]:
    """Pairs from the best to the worst. Without errors, pairs spread over the test set."""
    order = list(range(len(pairs.data.test_pairs)))
    if pairs.errors:
        order = [i for i in order if len(pairs.errors[i].errors)]  # partial shapes may have no overlap
        order.sort(key=lambda i: float(np.nanmean(pairs.errors[i].errors)))
    return spread_over(order, SHOWN_PAIRS)


def _article(out: Path, pairs: ScoredPairs, number: int) -> str:
    """The pictures of a pair, with a link to its page, which is written."""
    data, matches = pairs.data, pairs.maps[number]
    first, second = (data.test[i] for i in data.test_pairs[number])
    notes, errors = "", None
    if pairs.errors:
        scores = pairs.errors[number]
        notes = f"mean error ×100 {100 * np.nanmean(scores.errors):.2f}"
        notes += ", left and right exchanged" if scores.flipped else ""
        truth = data.truth(first, second)
        assert truth is not None
        errors = np.full(len(first.mesh.verts), np.nan)  # where the truth is not known
        errors[truth.vertices] = scores.errors
    heading = f"{first.name} to {second.name}"
    path = f"pairs/{number:03d}.html"
    meshes, titles = [first.mesh, second.mesh], (first.name, second.name)
    colors = pair_colors(first.mesh, second.mesh, matches, errors)
    page(meshes, colors=colors, titles=titles, heading=heading).save(out / path)
    pictures = (
        (first.mesh, colors[0]["position"], "Transferred colors", first.name),
        (second.mesh, colors[1]["position"], "Colors by position", second.name),
        (first.mesh, colors[0]["texture"], "Transferred texture", first.name),
        (second.mesh, colors[1]["texture"], "Texture", second.name),
    )
    figures = "".join(figure_html(_picture(m, c), f"{name}: {text}", text, name) for m, c, text, name in pictures)
    link = f'<a href="{path}">{html.escape(heading)}</a>'
    return f'<article><h3>{link} <small>{notes}</small></h3><div class="pictures">{figures}</div></article>'


def _picture(mesh: Mesh, colors: NDArray[np.uint8]) -> bytes:
    return png_bytes(paint(draw(surface_of(mesh), "vertices", report.PICTURE_SIZE), colors))
