"""LU factorizations by SciPy's SuperLU, for symmetric matrices that needn't be positive definite."""

from __future__ import annotations

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray


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
