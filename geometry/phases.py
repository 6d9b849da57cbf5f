"""Seconds that the phases of preprocessing take, added up over meshes, threads and worker processes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")
Phase: TypeAlias = Literal["read", "check", "assemble", "solve", "write"]

_seconds: defaultdict[str, float] = defaultdict(float)
_lock = threading.Lock()


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Add the seconds of the block to a phase.

    read: meshes from their files; check: entries of the cache; assemble: everything but the eigenbasis; solve: the
    eigenbasis; write: entries of the cache
    """
    started = time.perf_counter()
    try:
        yield
    finally:
        add_phases({name: time.perf_counter() - started})


def add_phases(seconds: Mapping[str, float]) -> None:
    """Add what another process has measured."""
    with _lock:
        for name, more in seconds.items():
            _seconds[name] += more


def take_phases() -> dict[str, float]:
    """The seconds of each phase since the last call."""
    with _lock:
        taken = dict(_seconds)
        _seconds.clear()
    return taken


def with_phases(function: Callable[..., T], *arguments: object) -> tuple[T, dict[str, float]]:
    """The result of function(*arguments) in a worker process, and the seconds of its phases."""
    take_phases()
    return function(*arguments), take_phases()
