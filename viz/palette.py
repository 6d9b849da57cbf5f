"""Colors for labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNLABELED_COLOR = (178, 180, 184)
ERROR_COLORS = np.array([[214, 217, 221], [214, 40, 48]], np.uint8)  # correct, wrong

# Okabe and Ito's colors without black, which would hide the shading, then Paul Tol's indigo and wine, and a mint. All
# ten are distinct under protanopia, deuteranopia and tritanopia too.
_FIRST = ("0072B2", "E69F00", "009E73", "CC79A7", "56B4E9", "D55E00", "F0E442", "332288", "882255", "A5F0C8")
DISTINCT = 1024


def label_colors(n: int) -> NDArray[np.uint8]:
    """Colors (n, 3) uint8 for the labels 0 … n - 1.

    The color of a label does not depend on n. The first ten are safe for color-blind viewers. The first 1024 are
    distinct, and then they repeat.

    >>> label_colors(2)
    array([[  0, 114, 178],
           [230, 159,   0]], dtype=uint8)
    """
    return _table()[np.arange(n) % DISTINCT]


def colorize(labels: Any, colors: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The color (..., 3) uint8 of every label of an integer array (...). Negative labels get `UNLABELED_COLOR`.

    colors: (n, 3) uint8, the colors of the labels 0 … n - 1, which then repeat. Default: `label_colors`.
    """
    labels = np.asarray(labels, np.int64)
    if colors is None:
        colors = _table()
    out = np.empty((*labels.shape, 3), np.uint8)
    out[...] = UNLABELED_COLOR
    labeled = labels >= 0
    out[labeled] = colors[labels[labeled] % len(colors)]
    return out


def parse_colors(codes: Sequence[str]) -> NDArray[np.uint8]:
    """Colors (n, 3) uint8 from hexadecimal codes such as "0072B2"."""
    return np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in codes], np.uint8)


@cache
def _table() -> NDArray[np.uint8]:
    """The fixed first colors. Each next color is the candidate farthest in Oklab from all previous ones."""
    first = parse_colors(_FIRST)
    candidates = _candidates()
    lab = np.ascontiguousarray(_oklab(candidates).T)  # NumPy adds three long rows faster than many rows of three
    # No label gets the gray of unlabeled elements.
    taken = _oklab(np.concatenate([first, np.array([UNLABELED_COLOR], np.uint8)]))
    distance = ((lab[:, :, None] - taken.T[:, None]) ** 2).sum(0).min(1)
    chosen = []
    for _ in range(DISTINCT - len(first)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((lab - lab[:, chosen[-1:]]) ** 2).sum(0))
    return np.concatenate([first, candidates[chosen]])


def _candidates() -> NDArray[np.uint8]:
    """A grid of colors without glaring ones, and without dark and pale ones, on which shading would not show."""
    steps = np.linspace(0, 255, 20).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, 3)
    lightness, a, b = _oklab(grid).T
    kept: NDArray[np.uint8] = grid[(lightness > 0.4) & (lightness < 0.9) & (np.hypot(a, b) < 0.19)]
    return kept


def _oklab(rgb: NDArray[np.uint8]) -> NDArray[np.float64]:
    """sRGB (n, 3) to Oklab (Ottosson 2020), where Euclidean distance approximates perceived difference."""
    c = rgb / 255.0
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    cone = np.cbrt(
        linear
        @ np.array(
            [
                [0.4122214708, 0.2119034982, 0.0883024619],
                [0.5363325363, 0.6806995451, 0.2817188376],
                [0.0514459929, 0.1073969566, 0.6299787005],
            ]
        )
    )
    lab: NDArray[np.float64] = cone @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.7936177850, -2.4285922050, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.8086757660],
        ]
    )
    return lab
