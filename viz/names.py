"""Names that are cut to fit, and still look different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest


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
