"""Plots results from their CSV files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffnet.benchmarks.harness.registry import Benchmark, Metric
from diffnet.benchmarks.harness.results import read_csv
from diffnet.geometry.files import write_atomically
from diffnet.viz.palette import label_colors

_COLUMN: dict[Metric, str] = {"ms": "median_ms", "TFLOP/s": "tflops", "GB/s": "gbps", "MB": "peak_mb"}

Rows = Sequence[dict[str, str]]
Colors = dict[str, Sequence[float]]


def plot(bench: Benchmark, csv_path: Path, png_path: Path) -> None:
    """Plot the results of a benchmark.

    Each metric has one panel for each combination of the parameters other than `bench.x`. A panel has one line per
    peer and a dashed line for the floor. It has bars instead if there is only one value of `bench.x`.
    """
    x, metrics = bench.x, bench.metrics
    table = read_csv(csv_path)
    # The parameters stand before the peer.
    parameters = [name for name in takewhile(lambda name: name != "peer", table[0] if table else ()) if name != x]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in parameters), []).append(row)
    peers = list(dict.fromkeys(row["peer"] for row in table))
    colors = dict(zip(peers, (label_colors(max(len(peers), 1)) / 255.0).tolist(), strict=False))
    across = min(4, max(1, len(groups)))
    down = max(1, math.ceil(len(groups) / across))
    width = max(3.6 * across, 5.0)  # inches; the names beside bars take half of a panel
    figure = Figure(figsize=(width, 2.8 * down * len(metrics) + 0.6), layout="constrained")
    panels = figure.subplots(down * len(metrics), across, squeeze=False).ravel()
    for i, metric in enumerate(metrics):
        begin = i * down * across
        for axes, (values, rows) in zip(panels[begin:], groups.items(), strict=False):
            draw, room = (_lines, 50) if len({row[x] for row in rows}) > 1 else (_bars, 30)
            draw(axes, rows, x, metric, colors)
            name = ", ".join(f"{n} {v}" for n, v in zip(parameters, values, strict=True))
            axes.set_title("\n".join(wrap(name, room)), fontsize=8)
        for axes in panels[begin + len(groups) : begin + down * across]:
            axes.set_visible(False)
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    if lines:
        columns = min(6, int(width / 1.4))
        figure.legend(
            list(lines.values()), list(lines), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    figure.suptitle("\n".join(wrap(bench.summary, 45 * across)), fontsize=10)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140)
    write_atomically(png_path, out.getvalue())


def _lines(axes: Axes, rows: Rows, x: str, metric: Metric, colors: Colors) -> None:
    column = _COLUMN[metric]
    for peer, color in colors.items():
        points = [(float(r[x]), float(r[column])) for r in rows if r["peer"] == peer and r[column]]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), color=color, lw=1.5, marker="o", ms=3, label=peer)
    timed = [r for r in rows if metric != "MB" and r["floor_ms"] and r["median_ms"] and r[column]]
    floor = sorted({(float(r[x]), _floor(r, column)) for r in timed})
    if floor:
        axes.plot(*zip(*floor, strict=True), color="0.3", lw=1, ls="--", label="floor")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")


def _bars(axes: Axes, rows: Rows, x: str, metric: Metric, colors: Colors) -> None:
    shown = [row for row in rows if row[_COLUMN[metric]]]
    values = [float(row[_COLUMN[metric]]) for row in shown]
    names = ["\n".join(wrap(row["peer"], 18)) for row in shown]
    bars = axes.barh(names, values, color=[colors[row["peer"]] for row in shown])
    axes.locator_params(axis="x", nbins=3)
    axes.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=3, size=8)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric}, {rows[0][x]} {x}")
    axes.spines[["top", "right"]].set_visible(False)


def _floor(row: dict[str, str], column: str) -> float:
    """The floor in the unit of a column. A rate is scaled by the ratio of the measured time to the floor."""
    if column == "median_ms":
        return float(row["floor_ms"])
    return float(f"{float(row[column]) * float(row['median_ms']) / float(row['floor_ms']):.3g}")
