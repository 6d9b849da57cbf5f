"""The problems that eigensolvers solve, and their constants."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

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


def checked_problem(laplacian: Any, mass: Any) -> Problem:
    """The Laplacian as a CSR matrix and the masses as an array, both float64.

    Raises ValueError for shapes that don't fit, entries that are not finite, negative masses, and a negative
    semi-definite Laplacian.
    """
    if scipy.sparse.issparse(mass) or np.ndim(mass) != 1:
        raise ValueError(f"mass should be a vector (V,), shape is {np.shape(mass)}; pass the diagonal of a mass matrix")
    mass = np.asarray(mass, np.float64)
    laplacian = scipy.sparse.csr_matrix(laplacian, dtype=np.float64)
    if laplacian.shape != (len(mass), len(mass)):
        raise ValueError(
            f"the Laplacian of {len(mass)} masses should have shape ({len(mass)}, {len(mass)}), "
            f"shape is {laplacian.shape}"
        )
    if not np.isfinite(laplacian.data).all():
        raise ValueError("the Laplacian has entries that are not finite")
    bad = np.flatnonzero(~((mass >= 0) & (mass < np.inf)))  # NaN compares false
    if len(bad):
        raise ValueError(
            f"masses should be finite and at least 0, but {len(bad)} are not; "
            f"the first is mass[{bad[0]}] = {mass[bad[0]]}"
        )
    diagonal = laplacian.diagonal()
    lowest, highest = diagonal.min(initial=0), diagonal.max(initial=0)
    if lowest < 0 and highest <= 1e-9 * -lowest:
        raise ValueError(
            f"the Laplacian should be positive semi-definite, but its diagonal is negative (down to "
            f"{lowest:.3g}); negate a Laplacian of the other sign convention: eigenbasis(-laplacian, …)"
        )
    return laplacian, mass
