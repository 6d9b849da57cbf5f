"""Operators for many meshes, on several cores and a GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from diffnet.data.features import Preprocessing
from diffnet.geometry import BasisPrecision, LaplacianKind, MeshError, MeshLike, Operators, load_mesh, precompute
from diffnet.geometry.preprocessing.entry import Options
from diffnet.geometry.preprocessing.gpu_queue import gpu_solver
from diffnet.geometry.preprocessing.worker import (
    HalfFilled,
    Reader,
    fill_entry,
    half_fill_entry,
    is_filled,
    normalized,
    source_name,
)
from diffnet.geometry.processes import (
    available_cores,
    check_that_processes_start,
    interrupts_blocked,
    worker_pool,
)

T = TypeVar("T")

LOADERS = 4  # threads; more wait for Python's lock
MOST_REASONS = 5  # that one error tells


def load_meanwhile(
    load: Callable[[int], T], fill: Callable[[Callable[[int], Any]], dict[int, str]]
) -> tuple[dict[int, str], dict[int, Future[T]]]:
    """What `fill(ready)` returns, and load(i) for each position i that it called `ready` with: threads read what is
    there while the rest is computed."""
    loaded = dict[int, Future[T]]()
    with ThreadPoolExecutor(min(LOADERS, available_cores())) as loader:

        def ready(position: int) -> None:
            loaded[position] = loader.submit(load, position)

        return fill(ready), loaded


def fill_cache(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
) -> dict[int, str]:
    """Make sure that the cache has the operators of all these meshes, as `prepare` finds them, `jobs` at a time (all
    cores by default).

    advance: called once for each mesh that is done with
    device: what computes eigenbases, see `precompute`. A GPU solves, in this process, for all at once that the jobs
        have come with since it began the last time; rounding depends on which these are.
    ready: called with the position of each mesh that the cache has now

    Returns what is wrong with those that can't be used, by their position; the others are not held up by them. Raises
    OSError where there can be no such folder. With several jobs, a script has to call this under
    `if __name__ == "__main__":`, since the processes import it; RuntimeError where it doesn't. They start fastest where
    it imports PyTorch there, too.
    """
    wanted = Options(options.k, options.laplacian, options.basis)
    return _fill(sources, normalized, wanted, cache_dir, jobs, advance, device, ready)


def precompute_all(
    meshes: Sequence[MeshLike],
    k: int = 128,
    laplacian: LaplacianKind = "robust",
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    basis: BasisPrecision = "float32",
    device: torch.device | str = "cpu",
    jobs: int | None = None,
) -> list[Operators]:
    """`precompute` of each of these meshes, `jobs` at a time (all cores by default).

    meshes, k, laplacian, cache_dir, basis: see `precompute`; without a cache, entries are in a temporary folder until
        they are read
    device: what computes eigenbases. A GPU solves for all at once that the jobs have come with since it began the last
        time; rounding depends on which these are.

    Raises MeshError where meshes can't be used, once the others are done, which the cache has then; ValueError for a
    bad option. With several jobs, a script has to call this under `if __name__ == "__main__":`, since the processes
    import it; RuntimeError where it doesn't. They start fastest where it imports PyTorch there, too.
    """
    options = Options(k, laplacian, basis)
    with TemporaryDirectory() if cache_dir is None else nullcontext(cache_dir) as folder:
        failed, loaded = load_meanwhile(
            lambda i: precompute(meshes[i], k, laplacian, folder, basis=basis, device=device),
            lambda ready: _fill(meshes, load_mesh, options, folder, jobs, lambda: None, device, ready),
        )
        if failed:
            reasons = "; ".join(list(failed.values())[:MOST_REASONS])
            more = "; …" if len(failed) > MOST_REASONS else ""
            raise MeshError(f"{len(failed)} of {len(meshes)} meshes can't be used: {reasons}{more}")
        return [loaded[i].result() for i in range(len(meshes))]


def _fill(
    sources: Sequence[MeshLike],
    read: Reader,
    options: Options,
    cache_dir: str | os.PathLike[str],
    jobs: int | None,
    advance: Callable[[], Any],
    device: torch.device | str,
    ready: Callable[[int], Any],
) -> dict[int, str]:
    """`fill_cache`, of the meshes that `read` makes of the sources."""
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    jobs = min(jobs or available_cores(), len(sources))
    wanted: dict[str, Any] = {"read": read, "options": options, "cache_dir": cache_dir}
    failed: dict[int, str] = {}

    def done(position: int, error: str | None) -> None:
        if error is None:
            ready(position)
        else:
            failed[position] = error
        advance()

    if jobs <= 1:
        for i, source in enumerate(sources):
            done(i, fill_entry(source, device=device, **wanted))
        return failed

    # Looking takes less than starting processes; from the first mesh that isn't there on, they look for themselves.
    waiting = deque(range(len(sources)))
    while waiting and is_filled(sources[waiting[0]], **wanted):
        done(waiting.popleft(), None)
    if torch.device(device).type == "cpu" or not waiting:
        _in_processes(partial(fill_entry, **wanted), sources, waiting, jobs, done)
        return dict(sorted(failed.items()))

    with gpu_solver(torch.device(device), jobs, done) as solve:

        def half_done(position: int, filled: HalfFilled) -> None:
            if isinstance(filled, tuple):
                solve(position, *filled)
            else:
                done(position, filled)

        _in_processes(partial(half_fill_entry, **wanted), sources, waiting, jobs, half_done)
    return dict(sorted(failed.items()))


def _in_processes(
    work: Callable[[MeshLike], T | str],
    sources: Sequence[MeshLike],
    waiting: deque[int],
    jobs: int,
    done: Callable[[int, T | str], None],
) -> None:
    """Call done(position, work(source)) for each position that is waiting, `jobs` at a time."""

    def submit(pool: ProcessPoolExecutor, position: int) -> Future[T | str]:
        with interrupts_blocked():
            return pool.submit(work, sources[position])

    jobs = min(jobs, len(waiting))
    lost: list[int] = []
    while waiting:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            under_way = _work_off(pool, jobs, waiting, submit, done)
        if under_way:
            check_that_processes_start()
        lost += under_way
    # One of these killed its process, so each gets a pool of its own.
    for i in lost:
        with worker_pool(1, available_cores()) as pool:
            try:
                result = submit(pool, i).result()
            except BrokenProcessPool:
                result = f"{source_name(sources[i])}: preprocessing it killed its process (out of memory?)"
        done(i, result)


def _work_off(
    pool: ProcessPoolExecutor,
    jobs: int,
    waiting: deque[int],
    submit: Callable[[ProcessPoolExecutor, int], Future[T]],
    done: Callable[[int, T], None],
) -> list[int]:
    """Work until nothing is waiting, or until a process dies; returns what was under way then.

    A process that dies takes the whole pool with it, so no more is handed out than is worked on.
    """
    running: dict[Future[T], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running[submit(pool, waiting[0])] = waiting[0]
                waiting.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running[future], future.result())
                del running[future]
    except BrokenProcessPool:
        pass
    return list(running.values())
