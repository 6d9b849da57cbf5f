"""The choice of the meshes that a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def spread_over(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, at equal distances from the first to the last.

    Neighbors in a list of meshes are often alike, so a report shows meshes from all of it.

    >>> spread_over("abcdefg", 3)
    ['a', 'd', 'g']
    """
    count = min(limit, len(items))
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]
