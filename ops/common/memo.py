"""Fields of frozen dataclasses that are computed at first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def memoized(instance: S, field: str, compute: Callable[[S], T]) -> T:
    """Return a field of a frozen dataclass; if it is None, compute it and store it first.

    This is no cached property, because torch.compile would not see its cache and would trace the computation into every
    step. It is the one place that writes to a frozen instance: the value depends on the other fields alone.
    """
    value: T | None = getattr(instance, field)
    if value is None:
        value = compute(instance)
        object.__setattr__(instance, field, value)
    return value
