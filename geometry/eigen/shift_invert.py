"""The inverse of L + σM as a symmetric operator, which turns the smallest eigenvalues into the largest."""

from __future__ import annotations

from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array

Rows: TypeAlias = Any  # vectors as the rows of a matrix (count, V): NumPy arrays here, tensors on a GPU


def turned(rows: Rows) -> Rows:
    return rows.swapaxes(-1, -2)


class ShiftInvert:
    """M^½ (L + σM)⁻¹ M^½ off the constants, for vectors held as the rows of NumPy arrays.

    laplacian: (V, V) of one connected component, mass: (V,) > 0, shift: σ > 0

    An eigenvalue θ stands for λ = 1/θ − σ, an eigenvector y for φ = M^−½ y. Raises ArithmeticError where L + σM
    isn't positive definite.
    """

    block = 4  # rows to apply it to at once: as many as CHOLMOD solves together; the fewer, the fewer it takes in all

    def __init__(self, laplacian: scipy.sparse.csr_matrix, mass: Array, shift: float) -> None:
        self.shift, self.root = np.asarray(shift), self.from_host(np.sqrt(mass))
        self.rank = len(mass) - 1
        self.constant = self.root / np.sqrt(mass.sum())
        # Scaled before it is inverted rather than around each solve. Cholesky's rounding doesn't depend on the scaling.
        scale = scipy.sparse.diags(1 / self.root)
        self.matrix = (scale @ laplacian @ scale + shift * scipy.sparse.eye(len(mass))).tocsr()
        # Entry by entry: where columns are compressed already, cholespy 2.2 reallocates arrays that are NumPy's.
        entries = self.matrix.tocoo()
        places = entries.row.astype(np.int32), entries.col.astype(np.int32)
        try:
            self.factor = cholespy.CholeskySolverD(len(mass), *places, entries.data, cholespy.MatrixType.COO)
        except ValueError as e:
            raise ArithmeticError(str(e)) from e

    def apply(self, rows: Rows) -> Rows:
        """Rounding errors leave some of the constant in the result."""
        right = np.empty((rows.shape[1], len(rows)))
        for column, row in zip(right.T, rows, strict=True):  # in half the time of a transposed copy
            column[:] = row
        left = np.empty_like(right)
        self.factor.solve(right, left)
        return np.ascontiguousarray(left.T)

    def apply_inverse(self, rows: Rows) -> Rows:
        return (self.matrix @ rows.T).T

    def start(self, count: int) -> Rows:
        """Random rows, the same ones at every call."""
        return self.without_constant(random_rows(count, len(self.constant)))

    def along_constant(self, rows: Rows) -> Rows:
        """Products of rows with the constant, M^½ 1 at unit length."""
        return rows @ self.constant

    def without_constant(self, rows: Rows) -> Rows:
        """The part of each row that is orthogonal to the constant."""
        for _ in range(2):  # once leaves rounding errors, of what may be 10⁹ times as long as the rest
            rows = rows - self.along_constant(rows)[..., None] * self.constant
        return rows

    def extremes(self, rows: Rows) -> tuple[Array, Array]:
        """The smallest and the largest entry of each row."""
        return rows.min(-1), rows.max(-1)

    def empty(self, count: int) -> Rows:
        return np.empty((count, len(self.constant)))

    def to_host(self, rows: Rows) -> Array:
        return rows  # type: ignore[no-any-return]

    def from_host(self, rows: Array) -> Rows:
        return rows


def random_rows(count: int, size: int) -> Array:
    return np.random.default_rng(0).standard_normal((count, size))
