"""The problems that eigensolvers solve, and their constants."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, Array]  # a Laplacian (V, V) and masses (V,)
Pairs: TypeAlias = tuple[Array, Array]  # values (k,) ascending, vectors (V, k)

DENSE_LIMIT, DENSE_LIMIT_PER_PAIR = 256, 3  # up to 256 + 3 k vertices, a dense solve is faster than Lanczos
MIN_VERTICES = 4096  # vertices; the CPU solves smaller components before a GPU has launched its kernels
TOLERANCE = 1e-8  # largest residual, relative to the eigenvalue of the inverse
# Shifts σ in units of 4π k/area, the k-th eigenvalue expected by Weyl's law. They are tried in this order.
# USUAL_SHIFT: With smaller shifts, the lowest pairs converge long before the others. Orthogonality to them is then lost
#     in every other step.
# SMALL_SHIFT: For spectra far below Weyl's law.
# LARGE_SHIFT: For Laplacians that rounding makes indefinite. No loss of orthogonality is tolerated then.
USUAL_SHIFT, SMALL_SHIFT, LARGE_SHIFT = 1 / 12, 1 / 1200, 1.0


class Searched(Protocol):
    """What checks of eigenpairs need of a component. See `Component`."""

    @property
    def laplacian(self) -> scipy.sparse.csr_matrix: ...
    @property
    def mass(self) -> Array: ...
    @property
    def k(self) -> int: ...
    def shift(self, unit: float) -> float: ...


class Component(NamedTuple):
    """A connected component, and the number k of its smallest pairs to find. The constant vector is not counted."""

    laplacian: scipy.sparse.csr_matrix
    mass: Array
    k: int

    def shift(self, unit: float) -> float:
        """σ, given in units of the k-th eigenvalue expected for a surface of this area."""
        return expected_shift(unit, self.k, float(self.mass.sum()))


def expected_shift(unit: float, k: int, area: float) -> float:
    """σ, given in units of the k-th eigenvalue expected for a surface of this area."""
    return unit * 4 * np.pi * k / area


def is_small(vertices: int, k: int) -> bool:
    """Whether a dense solve is faster."""
    return vertices <= DENSE_LIMIT + DENSE_LIMIT_PER_PAIR * k


def checked_problem(laplacian: Any, mass: Any) -> Problem:
    """The Laplacian as a CSR matrix and the masses as an array, both float64.

    mass: see `diagonal_of`

    Raises ValueError for shapes that don't fit, entries that are complex or not finite, negative masses, and a negative
    semi-definite Laplacian.
    """
    for name, values in {"the Laplacian": laplacian, "mass": mass}.items():
        if np.iscomplexobj(values):
            raise ValueError(f"{name} should be real, but its entries are complex")
    mass = diagonal_of(mass)
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
    # Rounding at degenerate faces can turn the sign of a few entries.
    if (diagonal < 0).sum() > (diagonal > 0).sum():
        raise ValueError(
            f"the Laplacian should be positive semi-definite, but its diagonal is negative (down to "
            f"{diagonal.min():.3g}); pass -laplacian if it has the other sign convention, as libigl's cotmatrix has"
        )
    return laplacian, mass


def diagonal_of(mass: Any) -> Array:
    """The masses (V,) float64 of a vector, or of a diagonal matrix (V, V), dense or a SciPy matrix.

    Raises ValueError for other shapes, and for a matrix with entries beside the diagonal.
    """
    if not scipy.sparse.issparse(mass) and np.ndim(mass) == 1:
        return np.asarray(mass, np.float64)
    shape = np.shape(mass)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"mass should be a vector (V,) or a diagonal matrix (V, V), shape is {shape}")
    matrix = scipy.sparse.coo_matrix(mass, dtype=np.float64)
    beside = int(((matrix.row != matrix.col) & (matrix.data != 0)).sum())
    if beside:
        raise ValueError(
            f"mass should be diagonal, but the matrix has {beside} entries beside the diagonal. Lump it: pass the sums "
            "of its rows, np.asarray(mass.sum(axis=1)).ravel()"
        )
    return matrix.diagonal()
