"""Plots of results, drawn from their CSV files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffnet.benchmarks.registry import Metric
from diffnet.benchmarks.results import COLUMNS, read_csv
from diffnet.train.export import write_atomically
from diffnet.train.palette import label_colors

_COLUMN: dict[Metric, str] = {"ms": "median_ms", "TFLOP/s": "tflops", "GB/s": "gbps"}


def plot(csv_path: Path, png_path: Path, title: str, x: str, metric: Metric) -> None:
    """One panel for each combination of the parameters other than `x`, one line for each peer, the floor dashed."""
    table = read_csv(csv_path)
    parameters = [name for name in (table[0] if table else {}) if name not in COLUMNS and name != x]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in parameters), []).append(row)
    peers = list(dict.fromkeys(row["peer"] for row in table))
    colors = dict(zip(peers, (label_colors(max(len(peers), 1)) / 255.0).tolist(), strict=False))
    across = min(4, max(1, len(groups)))
    down = max(1, math.ceil(len(groups) / across))
    figure = Figure(figsize=(3.6 * across, 2.8 * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, (values, rows) in zip(panels, groups.items(), strict=False):
        _panel(axes, rows, x, metric, colors)
        axes.set_title(", ".join(f"{n} {v}" for n, v in zip(parameters, values, strict=True)), fontsize=8)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140)
    write_atomically(png_path, out.getvalue())


def _panel(
    axes: Axes, rows: Sequence[dict[str, str]], x: str, metric: Metric, colors: dict[str, Sequence[float]]
) -> None:
    column = _COLUMN[metric]
    for peer, color in colors.items():
        points = [(float(r[x]), float(r[column])) for r in rows if r["peer"] == peer and r[column]]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), color=color, lw=1.5, marker="o", ms=3, label=peer)
    floor = sorted({(float(r[x]), _floor(r, column)) for r in rows if r["floor_ms"] and r["median_ms"] and r[column]})
    if floor:
        axes.plot(*zip(*floor, strict=True), color="0.3", lw=1, ls="--", label="floor")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")


def _floor(row: dict[str, str], column: str) -> float:
    """The floor in the plotted metric: rates scale by measured time over floor."""
    if column == "median_ms":
        return float(row["floor_ms"])
    return float(f"{float(row[column]) * float(row['median_ms']) / float(row['floor_ms']):.3g}")
