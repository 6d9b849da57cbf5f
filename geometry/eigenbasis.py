"""The smallest eigenpairs of the Laplacian."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray

DENSE_LIMIT = 256  # below this many vertices a dense solve is faster than a Lanczos iteration


def eigenbasis(
    laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The k smallest pairs of L φ = λ M φ: evals (k,) ascending and ≥ 0, evecs (V, k) with ΦᵀMΦ = I, float64.

    laplacian: (V, V) positive semi-definite, mass: (V,) ≥ 0. Vertices of zero mass take no part: their entries are 0.
    Constants on each connected component are null vectors exactly and known beforehand, so they are set rather than
    searched for: the iteration spends itself on the rest, and hundreds of components do it no harm. Where there are
    more components than k, the ones of largest area are kept. Where there are fewer than k pairs, the missing vectors
    are 0 and the missing values repeat the last. The result is the same at every call.

    Raises ValueError for k < 0, and RuntimeError where neither the iteration nor a second, more patient one converges.
    """
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")
    vertices = len(mass)
    live = np.flatnonzero(mass > 0)
    evals, evecs = np.zeros(k), np.zeros((vertices, k))
    pairs = min(k, len(live))
    if pairs == 0:
        return evals, evecs
    stiffness = scipy.sparse.csr_matrix(laplacian)[live][:, live]
    found, vectors = _smallest_pairs(stiffness, mass[live], pairs)
    evals[:pairs], evals[pairs:] = found, found[-1]
    evecs[live, :pairs] = vectors
    return evals, evecs


def _smallest_pairs(
    laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    null = _component_constants(laplacian, mass)[:, :k]
    rest = k - null.shape[1]
    if rest == 0:
        return np.zeros(k), null.toarray()
    solve = _dense if len(mass) <= max(DENSE_LIMIT, 3 * k) else _shift_invert
    evals, evecs = solve(laplacian, mass, null, rest)
    evals = np.concatenate([np.zeros(null.shape[1]), np.maximum(evals, 0)])
    evecs = np.concatenate([null.toarray(), _signed(evecs)], axis=1)
    order = np.argsort(evals, kind="stable")
    return evals[order], evecs[:, order]


def _component_constants(laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64]) -> scipy.sparse.csc_matrix:
    """The M-normalised indicators of the connected components (V, components), largest area first."""
    count, component = scipy.sparse.csgraph.connected_components(laplacian, directed=False)
    area = np.bincount(component, mass, count)
    rank = np.empty(count, np.int64)
    rank[np.argsort(-area, kind="stable")] = np.arange(count)
    entries = (1 / np.sqrt(area[component]), (np.arange(len(mass)), rank[component]))
    return scipy.sparse.csc_matrix(entries, shape=(len(mass), count))


def _dense(
    laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], null: scipy.sparse.csc_matrix, k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    root = np.sqrt(mass)
    matrix = laplacian.toarray() / root[:, None] / root[None, :]
    constants = null.toarray() * root[:, None]
    # Lift the known null vectors above everything else, so that the k smallest are the others.
    lift = 2 * np.abs(matrix).sum(1).max() + 1
    evals, evecs = scipy.linalg.eigh(matrix + lift * constants @ constants.T, subset_by_index=(0, k - 1))
    return evals, evecs / root[:, None]


def _shift_invert(
    laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], null: scipy.sparse.csc_matrix, k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lanczos on the inverse of L + σM, kept M-orthogonal to the known null vectors."""
    mass_matrix = scipy.sparse.diags(mass).tocsc()
    constraint = null.T @ mass_matrix
    start = np.random.default_rng(0).standard_normal(len(mass))
    # Weyl's law: eigenvalues grow as 4π/area. A hundredth of that makes L + σM definite and moves no eigenvalue far.
    for shift, patience in ((0.01, 1), (1.0, 4)):
        sigma = shift * 4 * np.pi / mass.sum()
        factor = scipy.sparse.linalg.splu(
            (laplacian + sigma * mass_matrix).tocsc(),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )

        def deflated_solve(b: NDArray[np.float64], factor: scipy.sparse.linalg.SuperLU = factor) -> NDArray[np.float64]:
            x: NDArray[np.float64] = factor.solve(b)
            x -= null @ (constraint @ x)
            return x

        try:
            evals, evecs = scipy.sparse.linalg.eigsh(
                laplacian,
                k,
                M=mass_matrix,
                sigma=-sigma,
                OPinv=scipy.sparse.linalg.LinearOperator(laplacian.shape, deflated_solve, dtype=np.float64),
                v0=start - null @ (constraint @ start),
                ncv=min(len(mass) - null.shape[1], (2 * k + 20) * patience),
                maxiter=100 * k * patience,
            )
        except scipy.sparse.linalg.ArpackError:
            continue
        order = np.argsort(evals, kind="stable")
        evals, evecs = evals[order], evecs[:, order]
        gram = evecs.T @ (mass[:, None] * evecs)
        residual = laplacian @ evecs - mass[:, None] * evecs * evals
        # A bound on the relative errors of λ + σ: the residuals in the norm of (L + σM)⁻¹. Rounding at degenerate
        # faces, where cotangents are huge and masses tiny, weighs little in it.
        error = np.sqrt(np.abs((residual * deflated_solve(residual)).sum(0)) / (evals + sigma)).max()
        if np.abs(gram - np.eye(k)).max() < 1e-8 and error < 1e-5:
            return evals, evecs
    raise RuntimeError(f"the eigenbasis didn't converge for k = {k + null.shape[1]} on {len(mass)} vertices")


def _signed(evecs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Eigenvectors have no sign; take the one that makes the entry of largest size positive."""
    peak = evecs[np.argmax(np.abs(evecs), axis=0), np.arange(evecs.shape[1])]
    return evecs * np.where(peak < 0, -1.0, 1.0)
