"""The smallest eigenpairs of a connected component, on the CPU.

Small components are solved as dense matrices, others by block Lanczos. If its checks fail, SciPy's ARPACK is used.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from scipy.linalg import lapack

from diffnet.geometry.eigen.checks import MissedError, checked_pairs, rounding_fault, shuffled, superlu
from diffnet.geometry.eigen.lanczos import KrylovSpace, ShiftInvert
from diffnet.geometry.eigen.problem import (
    LARGE_SHIFT,
    SMALL_SHIFT,
    TOLERANCE,
    USUAL_SHIFT,
    Array,
    Component,
    Pairs,
    is_small,
)
from diffnet.geometry.errors import ConvergenceError

# glibc returns freed blocks to the system if they are larger than any block of up to 32 MiB that was freed before. The
# matrices of small meshes would be made of fresh pages again and again, which takes a seventh of the time.
np.empty(2**25 - 2**16, np.uint8)

MIN_SIZE = 128  # rows; of a smaller matrix, all pairs take no longer
BLOCK = 64  # columns that LAPACK works on at once


def pairs_on_cpu(component: Component) -> Pairs:
    """The pairs of a component. Raises ConvergenceError if no solver converges."""
    if component.k == 0:
        return np.zeros(0), np.zeros((len(component.mass), 0))
    return dense_pairs(*component) if is_small(len(component.mass), component.k) else lanczos_pairs(component)


def dense_pairs(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    """The k smallest eigenpairs of a dense matrix.

    The matrix is M^−½ L M^−½ or, if rounding spoils its small eigenvalues, the inverse of L + σM.
    """
    component = Component(laplacian, mass, k)
    pairs = _pairs_of_dense(component)
    if rounding_fault(laplacian, *pairs) is not None:
        with suppress(np.linalg.LinAlgError):  # rounding has made L + σM indefinite
            inverse = _pairs_of_dense_inverse(component)
            if rounding_fault(laplacian, *inverse) is None:
                return inverse
    return pairs


def _pairs_of_dense_inverse(component: Component) -> Pairs:
    """The pairs from M^½ (L + σM)⁻¹ M^½, whose largest eigenvalues are those wanted.

    Cholesky's rounding doesn't depend on the scale of rows, so small masses don't matter. Raises LinAlgError if L + σM
    isn't positive definite.
    """
    laplacian, mass, k = component
    sigma = component.shift(USUAL_SHIFT)
    root = np.sqrt(mass)
    constant = root / np.sqrt(mass.sum())
    lower = np.linalg.cholesky(laplacian.toarray() + sigma * np.diag(mass))
    half = np.linalg.solve(lower, np.diag(root))
    half -= np.outer(half @ constant, constant)  # the constant gets the eigenvalue 0
    values, vectors = smallest_pairs(-(half.T @ half), k)
    with np.errstate(divide="ignore"):
        evals = -1 / values - sigma
    along_constant = constant @ vectors
    mixed = np.abs(along_constant) > 1e-12
    if mixed.any():  # λ is so large that 1/(λ + σ) is 0 up to rounding, as the constant's value is
        q, r = np.linalg.qr(vectors - np.outer(constant, along_constant))
        vectors = q * np.sign(np.diag(r))
        evals[mixed] = np.einsum("vk,vk->k", vectors / root[:, None], laplacian @ (vectors / root[:, None]))[mixed]
    return _signed(evals, (vectors / root[:, None]).T)


def _pairs_of_dense(component: Component) -> Pairs:
    laplacian, mass, k = component
    root = np.sqrt(mass)
    constant = root / np.sqrt(mass.sum())
    matrix = laplacian.toarray()
    matrix /= root[:, None]
    matrix /= root
    # Give the constant an eigenvalue above all others, so that the k smallest pairs are without it.
    largest_row_sum = (abs(laplacian) @ (1 / root) / root).max()
    matrix += np.outer((2 * largest_row_sum + 1) * constant, constant)
    evals, evecs = smallest_pairs(matrix, k)
    return _signed(evals, (evecs / root[:, None]).T)


def lanczos_pairs(component: Component) -> Pairs:
    """Block Lanczos with one shift after another. If every shift fails, warns and uses `scipy_pairs`."""
    reasons = []
    for unit, tolerated_loss in ((USUAL_SHIFT, 1e-8), (SMALL_SHIFT, 1e-8), (LARGE_SHIFT, 0.0)):
        try:
            return _block_lanczos(component, component.shift(unit), tolerated_loss)
        except (ArithmeticError, np.linalg.LinAlgError) as e:
            reasons.append(str(e))
    failed = f"block Lanczos failed on {len(component.mass)} vertices ({'; then: '.join(reasons)})"
    warnings.warn(f"{failed}; SciPy's slower iteration is used", stacklevel=2)
    return scipy_pairs(*component)


def _block_lanczos(component: Component, sigma: float, tolerated_loss: float) -> Pairs:
    """Raises ArithmeticError or LinAlgError if L + σM isn't positive definite, or if a result fails a check."""
    operator = ShiftInvert(component.laplacian, component.mass, sigma)

    def with_blocks_of(block: int) -> Pairs:
        values, rows = KrylovSpace(operator, component.k, block, tolerated_loss).converge(TOLERANCE)
        evals, rows, (fault,) = checked_pairs([component], operator, values, rows, block)
        if fault is not None:
            raise fault
        rows /= operator.root
        return _signed(evals, rows)

    with suppress(MissedError):
        return with_blocks_of(operator.block)
    return with_blocks_of(2 * operator.block)


def scipy_pairs(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    """ARPACK's Lanczos iteration on the inverse of L + σM, with the constant projected out.

    Raises ConvergenceError if it doesn't converge.
    """
    order = shuffled(len(mass))
    laplacian, mass = laplacian[order][:, order], mass[order]
    mass_matrix = scipy.sparse.diags(mass).tocsc()
    mean = mass / mass.sum()
    start = np.random.default_rng(0).standard_normal(len(mass))
    for shift, patience in ((SMALL_SHIFT, 1), (LARGE_SHIFT, 4)):
        sigma = Component(laplacian, mass, k).shift(shift)
        factor = superlu(laplacian + sigma * mass_matrix)

        def deflated_solve(b: Array, factor: scipy.sparse.linalg.SuperLU = factor) -> Array:
            x: Array = factor.solve(b)
            x -= mean @ x
            return x

        try:
            evals, evecs = scipy.sparse.linalg.eigsh(
                laplacian,
                k,
                M=mass_matrix,
                sigma=-sigma,
                OPinv=scipy.sparse.linalg.LinearOperator(laplacian.shape, deflated_solve, dtype=np.float64),
                v0=start - mean @ start,
                ncv=min(len(mass) - 1, (2 * k + 20) * patience),
                maxiter=100 * k * patience,
            )
        except scipy.sparse.linalg.ArpackError:
            continue
        ascending = np.argsort(evals, kind="stable")
        evals, evecs = evals[ascending], evecs[:, ascending]
        gram = evecs.T @ (mass[:, None] * evecs)
        residual = laplacian @ evecs - mass[:, None] * evecs * evals
        error = np.sqrt(np.abs((residual * deflated_solve(residual)).sum(0)) / (evals + sigma)).max()
        if np.abs(gram - np.eye(k)).max() < 1e-8 and error < 1e-5:
            return _signed(evals, evecs[np.argsort(order)].T)
    raise ConvergenceError(f"the eigenbasis didn't converge for {k} pairs on {len(mass)} vertices")


def _signed(evals: Array, rows: Array) -> Pairs:
    """λ ≥ 0, and φ with positive peaks from rows, which are overwritten. The peak is the entry of largest magnitude."""
    rows *= np.where(-rows.min(1) > rows.max(1), -1.0, 1.0)[:, None]
    return np.maximum(evals, 0), rows.T


def smallest_pairs(matrix: Array, k: int) -> Pairs:
    """The first k values (k,) and vectors (V, k) of np.linalg.eigh. The matrix (V, V) has both triangles.

    np.linalg.eigh computes all vectors. Here, LAPACK makes the matrix tridiagonal (sytrd), finds all values (sterf),
    and only the wanted vectors by inverse iteration (stein, ormqr). If that fails, np.linalg.eigh is used.
    """
    size = len(matrix)
    if size >= MIN_SIZE and 2 * k <= size:
        # The transpose has LAPACK's order of entries, so it isn't copied twice.
        reflectors, diagonal, beside, scales, _ = lapack.dsytrd(matrix.T, lower=1, lwork=BLOCK * size)
        values, missed = lapack.dsterf(diagonal, beside)
        if not missed and np.isfinite(values).all():
            # All rows are one block. These arrays have an entry for each row, but only the first k are read.
            blocks = np.ones(size, np.int32), np.full(size, size, np.int32)
            vectors, missed = lapack.dstein(diagonal, beside, values[:k], *blocks)
            if not missed and np.isfinite(vectors).all():  # NaN for a matrix of zeros
                # The reflectors begin one row below the diagonal. This view has one row more, which isn't read.
                lower = reflectors.ravel("F")[1 : 1 + size * (size - 1)].reshape(size, size - 1, order="F")
                vectors[1:] = lapack.dormqr("L", "N", lower, scales, vectors[1:], BLOCK * k)[0]
                return values[:k], vectors
    values, vectors = np.linalg.eigh(matrix)
    return values[:k], vectors[:, :k]
