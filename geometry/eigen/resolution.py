"""Checks whether rounding has spoiled eigenvalues."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array

PAIRS_CHECKED = 4  # smallest pairs; rounding spoils the smallest eigenvalues first
MAX_DEVIATION = 1e-5  # largest deviation of a Rayleigh quotient from its eigenvalue. Clean meshes have less than 1e-7.
ROUNDING = 1e-8  # further deviation, in units of the largest eigenvalue


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
