"""The smallest eigenpairs of Laplacians, for one or many at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.by_component import eigenbasis_by_component
from diffnet.geometry.eigen.problem import Array, Pairs, Problem, checked_problem
from diffnet.geometry.processes import WorkerPool, available_cores

if TYPE_CHECKING:
    import torch


def eigenbasis(
    laplacian: scipy.sparse.csr_matrix, mass: Array | scipy.sparse.spmatrix, k: int, device: torch.device | str = "cpu"
) -> tuple[Array, Array]:
    """The k smallest eigenpairs of L φ = λ M φ: evals (k,), ascending and ≥ 0, and evecs (V, k) with ΦᵀMΦ = I, float64.

    laplacian: (V, V) positive semi-definite. libigl's `cotmatrix` has the other sign: negate it.
    mass: (V,) ≥ 0, or a diagonal matrix (V, V). Vertices of zero mass take no part; their entries in the eigenvectors
        are 0.
    device: "cpu" or a GPU. A GPU solves for large components, the CPU for small ones.

    The null vectors are known: they are the constants on each connected component. They are set exactly, and the
    iteration looks for the other pairs only, so hundreds of components don't slow it down. With more components than k,
    the components of largest area are kept. If there are fewer than k pairs, the missing vectors are 0 and the missing
    values repeat the last one. The result is the same at every call on the same device.

    Each component is solved by a block Lanczos iteration on the inverse of L + σM (Grimes, Lewis & Simon 1994). Its
    result is checked: residuals, orthonormality, and by the inertia of L − μM that no eigenvalue is missing. If a check
    fails, SciPy's single-vector iteration is used instead, with a warning that gives the reason. Small components are
    solved as dense matrices. If rounding spoils the eigenvalues, as it can with faces of almost zero area, this warns
    and recommends the robust Laplacian.

    Raises ValueError for k < 0, shapes that don't fit, entries that are not finite, negative masses and a negative
    semi-definite Laplacian, and ConvergenceError if nothing converges.

    >>> import numpy as np
    >>> path = scipy.sparse.csr_matrix([[1.0, -1, 0], [-1, 2, -1], [0, -1, 1]])
    >>> evals, evecs = eigenbasis(path, np.ones(3), 3)
    >>> evals.round(6).tolist()
    [0.0, 1.0, 3.0]
    """
    _check_k(k)
    if str(device) != "cpu":
        return _on_gpu([(laplacian, mass)], k, device, 1)[0]
    return eigenbasis_by_component(*checked_problem(laplacian, mass), k)


def eigenbases(
    problems: Sequence[Problem], k: int, device: torch.device | str = "cpu", jobs: int | None = None
) -> list[Pairs]:
    """`eigenbasis` for each pair of a Laplacian (V, V) and masses (V,).

    device: see `eigenbasis`. A GPU solves for as many problems at once as its memory holds. Results are the same to the
        bit if that number is the same.
    jobs: number of worker processes on the CPU, of threads beside a GPU; by default one for each core

    Without a GPU, a script must call this under ``if __name__ == "__main__":``, because worker processes import the
    script; otherwise it raises WorkerError.

    Raises the errors of `eigenbasis`, and BrokenProcessPool if a worker process was killed (out of memory, for
    example).
    """
    _check_k(k)
    jobs = min(jobs or available_cores(), len(problems))
    if str(device) != "cpu" and problems:
        return _on_gpu(problems, k, device, jobs)
    if jobs <= 1:
        return [eigenbasis(laplacian, mass, k) for laplacian, mass in problems]
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        running = [pool.submit(eigenbasis, laplacian, mass, k) for laplacian, mass in problems]
        return [future.result() for future in running]


def _check_k(k: int) -> None:
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")


def _on_gpu(problems: Sequence[Problem], k: int, device: torch.device | str, jobs: int) -> list[Pairs]:
    import torch  # imported here because worker processes, which solve on the CPU, start without it

    from diffnet.geometry.eigen.gpu.batches import eigenbases_on_gpu

    try:
        return eigenbases_on_gpu(problems, k, torch.device(device), jobs)
    except torch.OutOfMemoryError:
        largest = max(laplacian.shape[0] for laplacian, _ in problems)
        warnings.warn(
            f"{device} has too little free memory for eigenbases of {largest} vertices and k = {k}, so the CPU "
            "computes them. A smaller k takes less",
            stacklevel=3,
        )
    return [eigenbasis(laplacian, mass, k) for laplacian, mass in problems]


def shifted_pairs(pairs: Pairs, lone_mass: Array, shift: float) -> Pairs:
    """The k smallest eigenpairs of (L + σI) φ = λ M φ for a small σ, from the k smallest of L φ = λ M φ.

    The original implementation solves this problem. σ differs from a shift by σM where masses differ, so it separates
    the constants of components.

    pairs: values (k,) ascending and vectors (V, k) with ΦᵀMΦ = I, where missing vectors are 0
    lone_mass: (V,), the masses of vertices with an empty row of L, which take no part in `pairs`, 0 for all others
    shift: σ

    The result is the best one in the span of the given vectors and the lone vertices (Rayleigh-Ritz). It differs from
    the exact one by the square of σ divided by masses and gaps of the spectrum.
    """
    evals, evecs = pairs
    k, present = len(evals), evecs.any(axis=0)
    basis = evecs[:, present]
    values, turn = np.linalg.eigh(np.diag(evals[present]) + shift * basis.T @ basis)
    turn = np.where(np.diag(turn) < 0, -turn, turn)  # keeps the signs of vectors that hardly change
    lone = np.flatnonzero(lone_mass)
    lone = lone[np.argsort(-lone_mass[lone], kind="stable")][:k]
    vectors = np.zeros((len(evecs), len(values) + len(lone)))
    vectors[:, : len(values)] = basis @ turn
    vectors[lone, len(values) + np.arange(len(lone))] = 1 / np.sqrt(lone_mass[lone])
    values = np.concatenate([values, shift / lone_mass[lone]])
    order = np.argsort(values, kind="stable")[:k]
    missing = k - len(order)
    values = np.pad(np.maximum(values[order], 0), (0, missing), "edge") if len(order) else np.zeros(k)
    return values, np.pad(vectors[:, order], ((0, 0), (0, missing)))
