"""Checks of the eigenpairs that the Lanczos iteration returns, and whether rounding has spoiled eigenvalues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray

from diffnet.geometry.eigen.lanczos import Rows, ShiftInvert, random_rows, transpose, without_constant
from diffnet.geometry.eigen.problem import LARGE_SHIFT, Array, Searched

if TYPE_CHECKING:
    from diffnet.geometry.eigen.gpu.lanczos import BatchedShiftInvert

Inverse: TypeAlias = "ShiftInvert | BatchedShiftInvert"  # arrays of the latter have a leading batch dimension
PAIRS_CHECKED = 4  # smallest pairs; rounding spoils the smallest eigenvalues first
MAX_DEVIATION = 1e-5  # largest deviation of a Rayleigh quotient from its eigenvalue. Clean meshes have less than 1e-7.
ROUNDING = 1e-8  # further deviation, in units of the largest eigenvalue


class MissedError(ArithmeticError):
    """Some vectors of a multiple eigenvalue are missing. Wider blocks may find all of them."""


def checked_pairs(
    components: Sequence[Searched], operator: Inverse, values: Array, rows: Rows, block: int
) -> tuple[Array, Rows, list[ArithmeticError | None]]:
    """Eigenvalues of components, from pairs of their shift-inverted operators, and a fault or None for each component.

    values, rows: eigenvalues (k,) and eigenvectors (k, V) of the operator
    block: the block size of the iteration that found them

    Returns λ (k,), the rows, orthonormal up to rounding, and the faults.
    Raises LinAlgError if the vectors are too far from orthonormal to be corrected.
    """
    evals = 1 / values - operator.shift[..., None]
    rows, deviation = _orthonormalized(rows, operator)
    error = _inaccuracy(1 / values, rows, operator)
    together = (np.reshape(array, (len(components), -1)) for array in (evals, operator.shift, deviation, error))
    faults = [
        _fault(component, row[: component.k], float(shift[0]), float(off[0]), float(inaccurate[0]), block)
        for component, row, shift, off, inaccurate in zip(components, *together, strict=True)
    ]
    return np.maximum(evals, 0), rows, faults


def _fault(
    component: Searched, evals: Array, shift: float, deviation: float, error: float, block: int
) -> ArithmeticError | None:
    if evals[-1] < shift < component.shift(LARGE_SHIFT):  # 1/(λ + σ) hardly differs between such λ
        return ArithmeticError(f"the largest eigenvalue is {evals[-1]:.1e}, below the shift of {shift:.1e}")
    if not deviation < 1e-8:
        return ArithmeticError(f"eigenvectors are orthonormal only to {deviation:.1e}")
    if not error < 1e-6:
        return ArithmeticError(f"eigenvectors are accurate only to {error:.1e}")
    count, there = _counts(component, evals, block)
    if count != there:
        return MissedError(f"{count} eigenvalues were found where there are {there}")
    return None


def _orthonormalized(rows: Rows, operator: Inverse) -> tuple[Rows, Array]:
    """Orthonormalize rows that are almost orthonormal.

    Also returns how far the result is from being orthonormal and orthogonal to the constant.
    """
    identity = np.eye(rows.shape[-2])
    gram = operator.to_host(rows @ transpose(rows))
    if np.abs(gram - identity).max() > 1e-10:
        rows = operator.from_host(np.linalg.inv(np.linalg.cholesky(gram))) @ rows
        gram = operator.to_host(rows @ transpose(rows))
    along_constant = operator.to_host(rows @ transpose(operator.constant))
    return rows, np.maximum(np.abs(gram - identity).max((-2, -1)), np.abs(along_constant).max((-2, -1)))


def _inaccuracy(scale: Array, rows: Rows, operator: Inverse) -> Array:
    """The relative error of vectors y, for which the operator's inverse times y should be `scale` times y.

    A residual R means an error of (L + σM)⁻¹ R in the vectors, relative to the gaps of the inverse's spectrum. The size
    of R doesn't measure the error: at degenerate faces, cotangents are huge and masses tiny, so R is mostly rounding.
    The error is measured on a few random combinations of the vectors. An error in any vector shows in them.
    """
    mixture = random_rows(operator.block, rows.shape[-2])
    mixed = operator.from_host(mixture) @ rows
    residual = operator.apply_inverse(mixed) - operator.from_host(mixture * scale[..., None, :]) @ rows
    residual = operator.apply(without_constant(residual, operator.constant))
    residual = without_constant(residual, operator.constant)
    squares = (operator.to_host((part * part).sum((-2, -1))) for part in (residual, mixed))
    return np.sqrt(np.divide(*squares))


def _counts(component: Searched, evals: Array, block: int) -> tuple[int, int]:
    """The number of eigenvalues below some μ that were found, and the number that L has.

    A block Krylov space holds at most `block` vectors of one eigenvalue. So vectors can be missing only if an
    eigenvalue was found `block` times. Eigenvalues are counted only then, as negative pivots of L − μM (Sylvester's
    law).
    """
    count = len(evals)
    last = evals[block - 1 :]
    if not (last - evals[: len(last)] < 1e-5 * last).any():
        return count, count
    ascending = np.concatenate([[0.0], evals])
    gaps = np.flatnonzero(np.diff(ascending) > 1e-4 * evals[-1])
    below = int(gaps[-1]) + 1  # μ lies in the last gap that is wide enough for a reliable count
    mu = (ascending[below - 1] + ascending[below]) / 2
    order = shuffled(len(component.mass))
    matrix = component.laplacian - mu * scipy.sparse.diags(component.mass)
    try:
        pivots = superlu(matrix[order][:, order]).U.diagonal()
    except RuntimeError:  # a pivot is exactly 0 and has no sign
        return count, count
    return below, int((pivots < 0).sum())


def rounding_fault(laplacian: scipy.sparse.csr_matrix, evals: Array, evecs: Array) -> str | None:
    """The reason why the eigenvalues of a connected component are spoiled by rounding, or None if they are not.

    laplacian: (V, V)
    evals: (k,), ascending and ≥ 0, without the zero of the constant vector
    evecs: (V, k), ΦᵀMΦ = I

    Faces of almost zero area have weights of 10⁹ and masses of 10⁻⁸. These shift the eigenvalues of a dense matrix
    M^−½ L M^−½ by more than their size, and negative results become 0. So no eigenvalue may be 0, and eigenvalues must
    agree with the Rayleigh quotients φᵀLφ, which have a much smaller rounding error.
    """
    vectors = evecs[:, :PAIRS_CHECKED]
    return deviation_fault(evals, np.einsum("vk,vk->k", vectors, laplacian @ vectors))


def deviation_fault(evals: Array, quotients: Array) -> str | None:
    """`rounding_fault`, given the Rayleigh quotients of up to PAIRS_CHECKED eigenvectors."""
    if len(evals) == 0:
        return None
    zeros = int((evals == 0).sum())
    if zeros:
        return f"{zeros} nonconstant vectors have eigenvalue 0"
    values = evals[: len(quotients)]
    # NaN compares false, and an infinite last value would allow any deviation.
    right = (np.abs(quotients - values) <= MAX_DEVIATION * values + ROUNDING * evals[-1]) & np.isfinite(evals[-1])
    if right.all():
        return None
    i = int(right.argmin())
    return f"eigenvalue {values[i]:.6g} has the Rayleigh quotient {quotients[i]:.6g}"


def superlu(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.linalg.SuperLU:
    """LU factorization of a symmetric matrix with pivots from the diagonal, whose signs give the matrix's inertia."""
    return scipy.sparse.linalg.splu(
        matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )


def shuffled(count: int) -> NDArray[np.int64]:
    """A fixed permutation of the rows.

    In their own order, SuperLU takes a hundred times as long for some regular meshes, such as subdivided spheres.
    """
    return np.random.default_rng(0).permutation(count)
