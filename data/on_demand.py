"""Sequences whose items are computed whenever they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T", covariant=True)


class LazySequence(Sequence[T]):
    """A sequence whose items are computed. Iterating over it raises the IndexError of a computation.

    Iterating over a plain `Sequence` ends at an IndexError, as if there were no more items.
    """

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self)))


class OnDemand(LazySequence[T]):
    """N items, of which none is kept in memory.

    compute: the item of a number from 0 to N - 1
    """

    def __init__(self, count: int, compute: Callable[[int], T]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self._compute(i)
