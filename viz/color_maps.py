"""Colors for scalars."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.viz.palette import UNLABELED_COLOR, parse_colors
from diffnet.viz.surface import Floats

ColorMap: TypeAlias = "str | Callable[[Any], Any]"

# 17 evenly spaced colors of Matplotlib's maps of these names. viridis and twilight (van der Walt, Smith, Bechtold) are
# perceptually uniform; coolwarm is Moreland's diverging map (2009).
_POINTS = {
    "viridis": "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b "
    "addc30 d8e219 fde725",
    "coolwarm": "3b4cc0 4e68d8 6282ea 779af7 8db0fe a3c2fe b9d0f9 ccd9ed dddcdc ecd3c5 f5c4ac f7b093 f4987a eb7d62 "
    "dd5f4b ca3b37 b40426",
    "twilight": "e2d9e2 c4ced4 95b5c7 7297c1 6276ba 5e51ad 592a8f 45135c 2f1436 4a1342 741e4f 983550 b25652 c27c63 "
    "cca389 d8c7be e2d9e2",
}
COLOR_MAPS = tuple(_POINTS)
_DIVERGING = ("coolwarm",)
_LEVELS = 256


class Scale(NamedTuple):
    """From scalars to colors: the scalars from `low` to `high` have the colors of a table (256, 3) uint8."""

    low: float
    high: float
    table: NDArray[np.uint8]

    def shares(self, values: Floats) -> Floats:
        """The places of scalars on the scale, from 0 to 1. NaN stays NaN."""
        shares: Floats = (values.clip(self.low, self.high) - self.low) / (self.high - self.low)
        return shares

    def colors(self, values: Floats) -> NDArray[np.uint8]:
        """The colors (N, 3) of scalars. Those of NaN are gray."""
        rows = (np.nan_to_num(self.shares(values)) * (len(self.table) - 1)).round().astype(np.int64)
        return np.where(np.isnan(values)[:, None], np.array(UNLABELED_COLOR, np.uint8), self.table[rows])


def make_scale(values: Floats, color_map: ColorMap = "viridis", range: Any = None) -> Scale:
    """The scale for scalars (N,).

    color_map: one of COLOR_MAPS. Other names are looked up in Matplotlib, which must be installed then. Or a function
        from numbers (N,) between 0 and 1 to colors (N, 3) or (N, 4) between 0 and 1, such as Matplotlib's colormaps.
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
    if color_map in _DIVERGING:
        low, high = -largest, largest
    if high - low <= 1e-5 * largest:  # a constant is in the middle of the scale
        middle, half = (low + high) / 2, 0.5 * largest or 1.0
        low, high = middle - half, middle + half
    return Scale(low, high, table)


def color_table(color_map: ColorMap) -> NDArray[np.uint8]:
    """The colors (256, 3) uint8 of a color map, see `make_scale`.

    >>> color_table("viridis")[[0, 255]]
    array([[ 68,   1,  84],
           [253, 231,  37]], dtype=uint8)
    """
    shares = np.linspace(0, 1, _LEVELS)
    if isinstance(color_map, str):
        if color_map in _POINTS:
            points = parse_colors(_POINTS[color_map].split())
            places = np.linspace(0, 1, len(points))
            return _rounded(np.stack([np.interp(shares, places, column) for column in points.T], 1))
        color_map = _of_matplotlib(color_map)
    if not callable(color_map):
        raise ValueError(f"color_map should be a name or a function, got {type(color_map).__name__}")
    colors = np.asarray(color_map(shares), np.float64)
    if colors.shape not in ((_LEVELS, 3), (_LEVELS, 4)) or not ((colors >= 0) & (colors <= 1)).all():
        raise ValueError(f"color_map should return colors (N, 3) from 0 to 1, got values of shape {colors.shape}")
    return _rounded(colors[:, :3] * 255)


def _rounded(colors: Floats) -> NDArray[np.uint8]:
    rounded: NDArray[np.uint8] = colors.round().astype(np.uint8)
    return rounded


def _of_matplotlib(name: str) -> Callable[[Any], Any]:
    own = ", ".join(COLOR_MAPS)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"unknown color_map {name!r}, expected one of {own}. Other names need Matplotlib")
    import matplotlib  # imported here because it takes a quarter of a second, and own maps do without it

    if name not in matplotlib.colormaps:
        raise ValueError(f"unknown color_map {name!r}, expected one of {own}, or a name that Matplotlib knows")
    return matplotlib.colormaps[name]


def ticks(low: float, high: float, count: int = 5) -> list[tuple[float, str]]:
    """About `count` round numbers between two bounds, each with its text.

    >>> ticks(-0.13, 0.62)
    [(0.0, '0.0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6')]
    """
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
