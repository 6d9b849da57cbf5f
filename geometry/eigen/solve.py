"""The smallest eigenpairs of Laplacians, of one or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import scipy.sparse

from diffnet.geometry.eigen.by_component import search
from diffnet.geometry.eigen.cpu import component_pairs
from diffnet.geometry.eigen.problem import Array, Pairs, Problem
from diffnet.geometry.processes import (
    available_cores,
    check_that_processes_start,
    interrupts_blocked,
    worker_pool,
)

if TYPE_CHECKING:
    import torch


def eigenbasis(
    laplacian: scipy.sparse.csr_matrix, mass: Array, k: int, device: torch.device | str = "cpu"
) -> tuple[Array, Array]:
    """The k smallest pairs of L φ = λ M φ: evals (k,) ascending and ≥ 0, evecs (V, k) with ΦᵀMΦ = I, float64.

    laplacian: (V, V) positive semi-definite, mass: (V,) ≥ 0. Vertices of zero mass take no part: their entries are 0.
    device: "cpu", or a GPU, which large components are left to

    Constants on each connected component are null vectors exactly and known beforehand, so they are set rather than
    searched for: the iteration spends itself on the rest, and hundreds of components do it no harm. Where there are
    more components than k, the ones of largest area are kept. Where there are fewer than k pairs, the missing vectors
    are 0 and the missing values repeat the last. The result is the same at every call on the same device.

    The rest comes from a block Lanczos iteration on the inverse of L + σM, component by component (Grimes, Lewis &
    Simon 1994). What it finds is checked before it is returned: residuals, orthonormality, and by the inertia of
    L − μM that no eigenvalue was passed over. Where a check fails, SciPy's single-vector iteration takes its place,
    with a warning that says why.

    Raises ValueError for k < 0, and RuntimeError where nothing converges.
    """
    if str(device) != "cpu":
        return _on_gpu([(laplacian, mass)], k, device, 1)[0]
    steps = search(laplacian, mass, k)
    pairs = None
    try:
        while True:
            pairs = component_pairs(steps.send(pairs))  # type: ignore[arg-type]
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def eigenbases(
    problems: Sequence[Problem], k: int, device: torch.device | str = "cpu", jobs: int | None = None
) -> list[Pairs]:
    """`eigenbasis` of each pair of a Laplacian (V, V) and masses (V,).

    device: as there. On the CPU, each of `jobs` processes takes one after another, as many as there are cores if it
        isn't told. A GPU takes as many at once as its memory holds; where that is as many, results are the same to the
        bit.

    Raises what `eigenbasis` does, and BrokenProcessPool where a process was killed (out of memory, say). Without a
    GPU, a script has to call this under `if __name__ == "__main__":`, since the processes import it; RuntimeError where
    it doesn't.
    """
    jobs = min(jobs or available_cores(), len(problems))
    if str(device) != "cpu" and problems:
        return _on_gpu(problems, k, device, jobs)
    if jobs <= 1:
        return [eigenbasis(laplacian, mass, k) for laplacian, mass in problems]
    try:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            with interrupts_blocked():
                running = [pool.submit(eigenbasis, laplacian, mass, k) for laplacian, mass in problems]
            return [future.result() for future in running]
    except BrokenProcessPool:
        check_that_processes_start()
        raise


def _on_gpu(problems: Sequence[Problem], k: int, device: torch.device | str, jobs: int) -> list[Pairs]:
    import torch  # not above: processes that solve on the CPU start without it

    from diffnet.geometry.eigen.gpu.batches import eigenbases_on_gpu

    return eigenbases_on_gpu(problems, k, torch.device(device), jobs)
