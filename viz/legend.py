"""Legends and titles of pictures. Text is drawn by Pillow, which is loaded faster than Matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from diffnet.viz.fields import MISSING_COLOR
from diffnet.viz.palette import Scale, colorize, ticks

INK, _FAINT, _LINE = (29, 33, 38), (92, 101, 110), (150, 156, 163)


class Legend(NamedTuple):
    """The meaning of colors.

    heading: text above, or ""
    entries: names with their colors
    scale: of a color bar, or None
    """

    heading: str
    entries: Sequence[tuple[str, Any]]
    scale: Scale | None = None


def label_legend(heading: str, labels: Any, names: Sequence[str]) -> Legend:
    """The legend of the labels that occur. A label without a name is shown as its number, negative ones come last."""
    occur = np.unique(labels)
    shown = occur[occur >= 0]
    texts = [str(names[c]) if c < len(names) else str(c) for c in shown.tolist()]
    entries = list(zip(texts, colorize(shown), strict=True))
    return Legend(heading, entries + [("unlabeled", MISSING_COLOR)] * bool((occur < 0).any()))


@cache
def font(size: int) -> Any:
    """DejaVu Sans from Matplotlib's files, which has Greek letters and symbols. Without it, Pillow's own font."""
    found = importlib.util.find_spec("matplotlib")  # this doesn't import it
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "mpl-data/fonts/ttf/DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def one_line_each(texts: Sequence[str], letters: Any, width: float) -> list[str]:
    """The texts, each on one line of some width, see `short_names`."""
    return short_names([" ".join(text.split()) for text in texts], lambda text: letters.getlength(text) <= width)


def legend_image(legend: Legend, height: int, size: int, background: tuple[int, int, int]) -> Image.Image:
    """A legend as a picture of some height. Its width follows from the text, at most 18 times the size of the text."""
    letters, row, pad = font(size), round(1.7 * size), round(0.9 * size)
    most = 16 * size
    (heading,) = one_line_each([legend.heading], letters, most)
    top = pad + (row + pad // 2 if heading else 0)
    entries = list(legend.entries)
    marks = ticks(legend.scale.low, legend.scale.high) if legend.scale else []
    room = max((height - top - pad) // row, 1)
    if not legend.scale and len(entries) > room:
        hidden = len(entries) - room + 1
        entries = [*entries[: room - 1], (f"and {hidden} more", None)]
    names = one_line_each([name for name, _ in entries], letters, most - 2 * size)
    entries = [(name, color) for name, (_, color) in zip(names, entries, strict=True)]
    texts = [(heading, 0), *((name, 1.7 * size) for name, _ in entries), *((text, 2.2 * size) for _, text in marks)]
    width = round(max(letters.getlength(text) + left for text, left in texts)) + pad + size // 2
    image = Image.new("RGB", (width, height), background)
    draw = ImageDraw.Draw(image)
    draw.text((0, pad), heading, fill=_FAINT, font=letters)
    if legend.scale:
        room_below = pad + (row + pad) * len(entries)
        bar = max(min(height - top - size // 2 - room_below, 22 * size), 2 * size)
        _draw_bar(image, legend.scale, marks, (0, top + size // 2), (round(1.2 * size), bar), letters, size)
        top += size // 2 + bar + pad
    for name, color in entries:
        if color is not None:
            box = (0, top + 0.25 * size, size, top + 1.25 * size)
            draw.rectangle(box, fill=tuple(int(c) for c in color), outline=_LINE)
        draw.text((1.7 * size, top + 0.75 * size), name, fill=INK, font=letters, anchor="lm")
        top += row
    return image


def _draw_bar(
    image: Image.Image,
    scale: Scale,
    marks: Sequence[tuple[float, str]],
    corner: tuple[int, int],
    extent: tuple[int, int],
    letters: Any,
    size: int,
) -> None:
    """A color bar with numbers on its right."""
    (left, top), (width, height) = corner, extent
    draw = ImageDraw.Draw(image)
    rows = np.linspace(len(scale.table) - 1, 0, height).round().astype(int)
    image.paste(Image.fromarray(np.repeat(scale.table[rows][:, None], width, axis=1)), (left, top))
    draw.rectangle((left, top, left + width - 1, top + height - 1), outline=_LINE)
    for number, text in marks:
        y = top + (height - 1) * (1 - (number - scale.low) / (scale.high - scale.low))
        draw.line((left + width, y, left + width + 0.4 * size, y), fill=_LINE)
        draw.text((left + width + 0.8 * size, y), text, fill=INK, font=letters, anchor="lm")


def short_names(names: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Names that fit. Dots stand for what is cut.

    fits: whether there is room for a text. It should hold for a part of each text for which it holds.

    A long name loses its middle, because names often differ at the end. Where names would then look the same, they show
    the part from their first difference on.

    >>> short_names(["upper jaw, left molar", "upper jaw, left incisor", "gum"], lambda text: len(text) <= 12)
    ['upper… molar', 'upper…ncisor', 'gum']
    """
    short = [name if fits(name) else _without_middle(name, fits) for name in names]
    for text in set(short):
        alike = [name for name, other in zip(names, short, strict=True) if other == text]
        if len(set(alike)) > 1:
            start = next(i for i, letters in enumerate(zip_longest(*alike)) if len(set(letters)) > 1)
            pairs = zip(names, short, strict=True)
            short = [_from(name, start, fits) if other == text else other for name, other in pairs]
    return short


def _without_middle(name: str, fits: Callable[[str], bool]) -> str:
    for kept in range(len(name) - 1, 0, -1):
        text = name[: kept // 2] + "…" + name[len(name) - (kept - kept // 2) :]
        if fits(text):
            return text
    return "…"


def _from(name: str, start: int, fits: Callable[[str], bool]) -> str:
    """The part of a name around its character number `start`, with as much before it as fits beside the rest."""
    end = len(name)
    while end > start + 1 and not fits(_part(name, start, end)):
        end -= 1
    while start > 0 and fits(_part(name, start - 1, end)):
        start -= 1
    return _part(name, start, end)


def _part(name: str, start: int, end: int) -> str:
    return "…" * (start > 0) + name[start:end] + "…" * (end < len(name))
