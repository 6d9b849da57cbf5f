"""The smallest eigenpairs of a dense symmetric matrix, in less time than all of them."""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack

from diffnet.geometry.eigen.problem import Array, Pairs

MIN_SIZE = 128  # rows; of a smaller matrix, all pairs take no longer
BLOCK = 64  # columns that LAPACK works on at once


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
