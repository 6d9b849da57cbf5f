"""Eigenbases of many Laplacians at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool

import torch

from diffnet.geometry import cudss
from diffnet.geometry.eigenbases_on_gpu import eigenbases_on_gpu
from diffnet.geometry.eigenbasis import Pairs, Problem, eigenbasis
from diffnet.geometry.workers import (
    available_cores,
    check_that_processes_start,
    interrupts_blocked,
    worker_pool,
)


def eigenbases(
    problems: Sequence[Problem], k: int, device: torch.device | str = "cpu", jobs: int | None = None
) -> list[Pairs]:
    """`eigenbasis` of each pair of a Laplacian (V, V) and masses (V,), on all cores, or so many.

    device: as there. Where the GPU factorises too, it takes several at once, in this process; otherwise each of `jobs`
        processes takes one after another.

    Raises what `eigenbasis` does, and BrokenProcessPool where a process was killed (out of memory, say). A script has
    to call this under `if __name__ == "__main__":`, since the processes import it; RuntimeError where it doesn't.
    """
    jobs, device = min(jobs or available_cores(), len(problems)), torch.device(device)
    if jobs <= 1:
        return [eigenbasis(laplacian, mass, k, device) for laplacian, mass in problems]
    if cudss.is_chosen(device):
        return eigenbases_on_gpu(problems, k, device, jobs)
    try:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            with interrupts_blocked():
                running = [pool.submit(eigenbasis, laplacian, mass, k, device) for laplacian, mass in problems]
            return [future.result() for future in running]
    except BrokenProcessPool:
        check_that_processes_start()
        raise
