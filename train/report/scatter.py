"""A chart of predicted against true numbers as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from diffnet.train.report.charts import fits_chart, png_of
from diffnet.viz.palette import label_colors
from diffnet.viz.pictures import short_names

MAX_COLUMNS = 12
MAX_POINTS = 20_000  # of a column; more are drawn at random


def scatter_png(predictions: NDArray[np.float64], truth: NDArray[np.float64], names: Sequence[str]) -> bytes:
    """Draw predictions against the truth, one panel for each column. Returns the content of a PNG file.

    predictions, truth: (N, C); NaN in the truth is missing
    names: of the columns; the first MAX_COLUMNS are drawn
    """
    shown = min(len(names), MAX_COLUMNS)
    wide = math.ceil(math.sqrt(shown))
    high = math.ceil(shown / wide)
    side = 4.0 if shown == 1 else 2.6  # inches; a page shows all panels in the same width
    figure = Figure(figsize=(1.05 * side * wide, side * high), layout="constrained")
    color = label_colors(1)[0] / 255.0
    titles = short_names(names[:shown], fits_chart)
    for i in range(shown):
        axes = figure.add_subplot(high, wide, i + 1)
        known = np.flatnonzero(~np.isnan(truth[:, i]))
        if len(known) > MAX_POINTS:
            known = np.random.default_rng(0).choice(known, MAX_POINTS, replace=False)
        x, y = truth[known, i], predictions[known, i]
        # Few points are drawn large, and many small and transparent.
        crowding = max(len(known) / 300, 1)
        axes.scatter(x, y, s=max(18 / crowding, 3), color=color, alpha=max(0.8 / crowding, 0.25), lw=0)
        if len(known):
            ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
            axes.plot(ends, ends, color="0.5", lw=1, zorder=0)
        axes.set_title(titles[i], fontsize=10, parse_math=False)
        axes.set_xlabel("Truth")
        axes.set_ylabel("Prediction")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    return png_of(figure)
