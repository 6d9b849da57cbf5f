"""Values that an object computes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def memoized(instance: object, field_name: str, compute: Callable[[], T]) -> T:
    """The value of a field of a frozen dataclass; if it is None, compute it and store it in the field first.

    Such a field is not a constructor argument that callers set, but a cache of what the other fields determine.
    `functools.cached_property` does the same, but torch.compile ignores its cache and traces the computation again.
    """
    value: T | None = getattr(instance, field_name)
    if value is None:
        value = compute()
        object.__setattr__(instance, field_name, value)  # the dataclass is frozen for everyone else
    return value
