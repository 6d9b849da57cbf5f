"""What is solved for eigenpairs at once: a connected component."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, Array]  # a Laplacian (V, V) and masses (V,)
Pairs: TypeAlias = tuple[Array, Array]  # values (k,) ascending, vectors (V, k)

DENSE_LIMIT = 256  # below this many vertices a dense solve is faster than a Lanczos iteration
TOLERANCE = 1e-8  # of residuals, relative to the eigenvalue of the inverse
# Shifts in units of the k-th eigenvalue that Weyl's law lets expect, 4π k/area. The first keeps the lowest pairs from
# converging so far ahead of the others that orthogonality is lost to them every other step; the second is for
# spectra far below the law; the last, with all care, for Laplacians that rounding makes indefinite.
MODERATE, SMALL, LARGE = 1 / 12, 1 / 1200, 1.0


class Component(NamedTuple):
    """A connected component, whose k smallest pairs are looked for, apart from its constant."""

    laplacian: scipy.sparse.csr_matrix
    mass: Array
    k: int

    def shift(self, unit: float) -> float:
        """σ in units of about the k-th eigenvalue of a surface of this area."""
        return unit * 4 * np.pi * self.k / float(self.mass.sum())

    @property
    def is_small(self) -> bool:
        """Solved as a dense matrix."""
        return len(self.mass) <= max(DENSE_LIMIT, 4 * self.k)
