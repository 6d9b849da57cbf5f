"""Eigenbases of many Laplacians at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

import scipy.sparse
import torch
from threadpoolctl import threadpool_limits

from diffnet.geometry import cudss
from diffnet.geometry.eigenbasis import Array, Pairs, eigenbasis
from diffnet.geometry.workers import (
    available_cores,
    check_that_processes_start,
    interrupts_blocked,
    worker_pool,
)

Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, Array]


def eigenbases(
    problems: Sequence[Problem], k: int, device: torch.device | str = "cpu", jobs: int | None = None
) -> list[Pairs]:
    """`eigenbasis` of each pair of a Laplacian (V, V) and masses (V,), `jobs` at a time.

    device: as there. All use the same GPU: while it works for some, the CPU does for others.
    jobs: by default one a core, each in a process of its own; or one for two cores, in threads of this process, where
        the GPU factorises (see `eigenbasis`)

    Raises what `eigenbasis` does, and BrokenProcessPool where a process was killed (out of memory, say). A script has
    to call this under `if __name__ == "__main__":`, since the processes import it; RuntimeError where it doesn't.
    """
    device = torch.device(device)
    in_threads = cudss.is_chosen(device)
    # More threads than that wait for each other at Python's lock.
    jobs = min(jobs or max(1, available_cores() // (2 if in_threads else 1)), len(problems))
    if jobs <= 1:
        return [eigenbasis(laplacian, mass, k, device) for laplacian, mass in problems]
    if in_threads:
        return _in_threads(problems, k, device, jobs)
    try:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            with interrupts_blocked():
                running = [pool.submit(eigenbasis, laplacian, mass, k, device) for laplacian, mass in problems]
            return [future.result() for future in running]
    except BrokenProcessPool:
        check_that_processes_start()
        raise


def _in_threads(problems: Sequence[Problem], k: int, device: torch.device, jobs: int) -> list[Pairs]:
    """Streams of one process run side by side on a GPU, while those of several take turns there."""

    def solve(problem: Problem) -> Pairs:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return eigenbasis(*problem, k, device)

    threads = max(1, available_cores() // jobs)
    with (
        threadpool_limits(threads),
        ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(threads,)) as pool,
    ):
        return list(pool.map(solve, problems))
