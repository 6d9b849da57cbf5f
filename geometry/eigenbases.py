"""Eigenbases of many Laplacians at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

import scipy.sparse
import torch

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
    """`eigenbasis` of each pair of a Laplacian (V, V) and masses (V,), in `jobs` processes (by default one a core).

    device: as there. All processes use the same GPU: while it works for one, others factorise on the CPU.

    Raises what `eigenbasis` does, and BrokenProcessPool where a process was killed (out of memory, say). A script has
    to call this under `if __name__ == "__main__":`, since the processes import it; RuntimeError where it doesn't.
    """
    jobs = min(jobs or available_cores(), len(problems))
    if jobs <= 1:
        return [eigenbasis(laplacian, mass, k, device) for laplacian, mass in problems]
    try:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            with interrupts_blocked():
                running = [pool.submit(eigenbasis, laplacian, mass, k, device) for laplacian, mass in problems]
            return [future.result() for future in running]
    except BrokenProcessPool:
        check_that_processes_start()
        raise
