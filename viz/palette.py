"""Colors for labels and for scalars."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.polygons import Floats

UNLABELED_COLOR = (178, 180, 184)
ERROR_COLORS = np.array([[214, 217, 221], [214, 40, 48]], np.uint8)  # correct, wrong

# Okabe and Ito's colors without black, which would hide the shading, then Paul Tol's indigo and wine, and a mint. All
# ten are distinct under protanopia, deuteranopia and tritanopia too.
_FIRST = ("0072B2", "E69F00", "009E73", "CC79A7", "56B4E9", "D55E00", "F0E442", "332288", "882255", "A5F0C8")
DISTINCT = 1024
ColorMap: TypeAlias = "str | Callable[[Any], Any]"
# Those of Matplotlib that the help names: for scalars, for scalars with signs, and for angles.
COLOR_MAPS = ("viridis", "coolwarm", "twilight")
_LEVELS = 256


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


@cache
def _table() -> NDArray[np.uint8]:
    """The fixed first colors. Each next color is the candidate farthest in Oklab from all previous ones."""
    first = np.array([list(bytes.fromhex(code)) for code in _FIRST], np.uint8)
    steps = np.linspace(0, 255, 20).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, 3)
    lightness, a, b = _oklab(grid).T
    # Without glaring colors, and without dark and pale ones, on which shading would not show.
    candidates = grid[(lightness > 0.4) & (lightness < 0.9) & (np.hypot(a, b) < 0.19)]
    lab = np.ascontiguousarray(_oklab(candidates).T)  # NumPy adds three long rows faster than many rows of three
    # No label gets the gray of unlabeled elements.
    others = _oklab(np.concatenate([first, np.array([UNLABELED_COLOR], np.uint8)]))
    distance = ((lab[:, :, None] - others.T[:, None]) ** 2).sum(0).min(1)
    picks = []
    for _ in range(DISTINCT - len(first)):
        picks.append(int(distance.argmax()))
        distance = np.minimum(distance, ((lab - lab[:, picks[-1:]]) ** 2).sum(0))
    return np.concatenate([first, candidates[picks]])


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
    return cone @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.7936177850, -2.4285922050, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.8086757660],
        ]
    )


class Scale(NamedTuple):
    """From scalars to colors: the scalars from `low` to `high` have the colors of a table (256, 3) uint8."""

    low: float
    high: float
    table: NDArray[np.uint8]

    def shares(self, values: Floats) -> Floats:
        """The places of scalars on the scale, from 0 to 1. NaN stays NaN."""
        return (values.clip(self.low, self.high) - self.low) / (self.high - self.low)

    def colors(self, values: Floats) -> NDArray[np.uint8]:
        """The colors (N, 3) of scalars. Those of NaN are gray."""
        rows = (np.nan_to_num(self.shares(values)) * (len(self.table) - 1)).round().astype(np.int64)
        return np.where(np.isnan(values)[:, None], np.array(UNLABELED_COLOR, np.uint8), self.table[rows])


def make_scale(values: Floats, color_map: ColorMap = "viridis", range: Any = None) -> Scale:
    """The scale for scalars (N,).

    color_map: the name of a colormap of Matplotlib, such as those of COLOR_MAPS, or a function from numbers (N,) from 0
        to 1 to colors (N, 3) or (N, 4) from 0 to 1
    range: the scalars at the ends of the color map. Default: the least and the largest finite scalar, and for
        "coolwarm" a range with 0 in the middle. Differences below 1e-5 of the largest scalar count as rounding errors.

    Raises ValueError for an unknown map and for a range that is not two increasing numbers.
    """
    table = color_table(color_map)
    if range is not None:
        try:
            low, high = (float(end) for end in range)
        except (TypeError, ValueError) as e:
            raise ValueError(f"range should be two numbers (low, high), got {range!r}") from e
        if not (low < high and np.isfinite(high - low)):
            raise ValueError(f"range should be two increasing finite numbers, got ({low:g}, {high:g})")
        return Scale(low, high, table)
    finite = values[np.abs(values) <= np.finfo(np.float32).max]  # differences of larger ones could overflow
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    largest = max(abs(low), abs(high))
    if color_map == "coolwarm":
        low, high = -largest, largest
    if high - low <= 1e-5 * largest:  # a constant is in the middle of the scale
        middle, half = (low + high) / 2, 0.5 * largest or 1.0
        low, high = middle - half, middle + half
    return Scale(low, high, table)


def color_table(color_map: ColorMap) -> NDArray[np.uint8]:
    """The colors (256, 3) uint8 of a color map, see `make_scale`."""
    shares = np.linspace(0, 1, _LEVELS)
    if isinstance(color_map, str):
        import matplotlib  # imported here because it takes a quarter of a second

        if color_map not in matplotlib.colormaps:
            expected = f"{', '.join(COLOR_MAPS)}, or a name that Matplotlib knows"
            raise ValueError(f"unknown color_map {color_map!r}, expected one of {expected}")
        color_map = matplotlib.colormaps[color_map]
    if not callable(color_map):
        raise ValueError(f"color_map should be a name or a function, got {type(color_map).__name__}")
    colors = np.asarray(color_map(shares), np.float64)
    if colors.shape not in ((_LEVELS, 3), (_LEVELS, 4)) or not ((colors >= 0) & (colors <= 1)).all():
        raise ValueError(f"color_map should return colors (N, 3) from 0 to 1, got values of shape {colors.shape}")
    return (colors[:, :3] * 255).round().astype(np.uint8)


def ticks(low: float, high: float, count: int = 5) -> list[tuple[float, str]]:
    """About `count` round numbers between two bounds, each with its text."""
    rough = (high - low) / count
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(power * min((1, 2, 5, 10), key=lambda factor: abs(np.log(factor * power / rough))))
    numbers = np.arange(np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9) + 1) + 0.0  # -0 becomes 0
    largest = max(abs(low), abs(high))
    digits = int(np.floor(np.log10(step) + 1e-9))
    if 1e-4 <= largest < 1e6:
        return [(float(round(n * step, max(-digits, 0))), f"{n * step:.{max(-digits, 0)}f}") for n in numbers]
    decimals = max(int(np.floor(np.log10(largest))) - digits, 0)
    return [(float(n * step), f"{n * step:.{decimals}e}" if n else "0") for n in numbers]
