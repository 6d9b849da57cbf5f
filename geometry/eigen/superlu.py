"""L U of symmetric matrices by SciPy's SuperLU, where Cholesky's method doesn't do."""

from __future__ import annotations

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray


def superlu(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.linalg.SuperLU:
    """L U of a symmetric matrix with pivots from the diagonal, so that their signs are its inertia."""
    return scipy.sparse.linalg.splu(
        matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )


def shuffled(count: int) -> NDArray[np.int64]:
    """SuperLU takes a hundred times as long to order some regular meshes as they are, such as subdivided spheres."""
    return np.random.default_rng(0).permutation(count)
