"""Work on the meshes of a data set, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import Any, TypeVar

from diffnet.data.labeled import LabeledMesh
from diffnet.geometry.processes import WorkerPool, available_cores

S = TypeVar("S")
T = TypeVar("T")

CHUNK = 32  # items that a worker process takes in one call


def computed_for_all(
    work: Callable[[LabeledMesh], T],
    items: Sequence[LabeledMesh],
    is_long: Callable[[LabeledMesh], bool],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> list[T]:
    """The results of a function for each mesh, in order. Worker processes compute those that take long.

    work: picklable
    is_long: whether the work on a mesh takes longer than sending it to a process, which takes some milliseconds
    jobs: number of processes; by default one for each core
    advance: called once for each mesh when it is done

    See `precompute_all` for calls from a script. Raises the errors of `work`.
    """
    long = [i for i, item in enumerate(items) if is_long(item)]
    jobs = min(jobs or available_cores(), len(long))
    in_workers = set(long if jobs > 1 else [])
    found = {}
    for i, item in enumerate(items):
        if i not in in_workers:
            found[i] = work(item)
            advance()
    if in_workers:
        with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
            running = {pool.submit(work, items[i]): i for i in long}
            for future in as_completed(running):
                found[running[future]] = future.result()
                advance()
    return [found[i] for i in range(len(items))]


def computed_in_chunks(
    work: Callable[[Sequence[S]], Sequence[T]], items: Sequence[S], jobs: int | None = None, size: int = CHUNK
) -> Iterator[tuple[int, T]]:
    """The position and the result of each item, as they come. Worker processes take several items in one call.

    work: picklable; it gets some of the items and returns the result of each
    items: read once each
    jobs: number of processes; by default one for each core. If it is 1, this process does the work.
    size: the most items in one call

    See `precompute_all` for calls from a script. Raises the errors of `work`.
    """
    starts = range(0, len(items), size)
    jobs = min(jobs or available_cores(), len(starts))
    if jobs <= 1:
        for start in starts:
            yield from enumerate(work(items[start : start + size]), start)
        return
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        running = {pool.submit(work, items[start : start + size]): start for start in starts}
        for future in as_completed(running):
            yield from enumerate(future.result(), running[future])
