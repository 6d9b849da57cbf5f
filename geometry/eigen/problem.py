"""The problems that eigensolvers solve, and their constants."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, Array]  # a Laplacian (V, V) and masses (V,)
Pairs: TypeAlias = tuple[Array, Array]  # values (k,) ascending, vectors (V, k)

DENSE_LIMIT = 256  # vertices; up to this size a dense solve is faster than a Lanczos iteration
TOLERANCE = 1e-8  # largest residual, relative to the eigenvalue of the inverse
# Shifts σ in units of 4π k/area, the k-th eigenvalue expected by Weyl's law. They are tried in this order.
# MODERATE: with smaller shifts, the lowest pairs converge long before the others, and orthogonality to them is lost in
#     every other step.
# SMALL: for spectra far below Weyl's law.
# LARGE: for Laplacians that rounding makes indefinite; no loss of orthogonality is tolerated then.
MODERATE, SMALL, LARGE = 1 / 12, 1 / 1200, 1.0


class Component(NamedTuple):
    """A connected component, and the number k of its smallest pairs to find. The constant vector is not counted."""

    laplacian: scipy.sparse.csr_matrix
    mass: Array
    k: int

    def shift(self, unit: float) -> float:
        """σ, given in units of the k-th eigenvalue expected for a surface of this area."""
        return unit * 4 * np.pi * self.k / float(self.mass.sum())

    @property
    def is_small(self) -> bool:
        """Whether a dense solve is faster."""
        return len(self.mass) <= max(DENSE_LIMIT, 4 * self.k)
