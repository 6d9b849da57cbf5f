"""The inverse of L + σM as a symmetric operator, which turns the smallest eigenvalues into the largest."""

from __future__ import annotations

from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array

Rows: TypeAlias = Any  # vectors as the rows of a matrix (…, count, V): a NumPy array, or a tensor on a device


class ShiftInvert:
    """M^½ (L + σM)⁻¹ M^½ on vectors orthogonal to the constant. Vectors are the rows of NumPy arrays.

    laplacian: (V, V) of one connected component
    mass: (V,) > 0
    shift: σ > 0

    An eigenvalue θ of the operator gives λ = 1/θ − σ, an eigenvector y gives φ = M^−½ y. Raises ArithmeticError if
    L + σM isn't positive definite.
    """

    # Rows to apply the operator to at once. CHOLMOD solves for four right-hand sides together. Wider blocks need more
    # vectors in all until the iteration converges.
    block = 4

    def __init__(self, laplacian: scipy.sparse.csr_matrix, mass: Array, shift: float) -> None:
        self.shift, self.root = np.asarray(shift), np.sqrt(mass)
        self.constant = self.root[None] / np.sqrt(mass.sum())  # M^½ 1, scaled to unit length
        # Scale the matrix once instead of the vectors of each solve. The scaling doesn't change Cholesky's rounding.
        row, column = np.repeat(np.arange(len(mass)), np.diff(laplacian.indptr)), laplacian.indices
        values = laplacian.data / (self.root[row] * self.root[column])
        self.scaled = scipy.sparse.csr_matrix((values, column, laplacian.indptr), laplacian.shape)
        # COO, because cholespy 2.2 reallocates the arrays of compressed matrices, which belong to NumPy. It adds up
        # entries at the same place.
        diagonal = np.arange(len(mass), dtype=np.int32)
        places = (np.concatenate([ends.astype(np.int32), diagonal]) for ends in (row, column))
        values = np.concatenate([values, np.full(len(mass), shift)])
        try:
            self.factor = cholespy.CholeskySolverD(len(mass), *places, values, cholespy.MatrixType.COO)
        except ValueError as e:
            raise ArithmeticError(str(e)) from e

    def apply(self, rows: Array) -> Array:
        """The operator times rows. Rounding errors leave some of the constant in the result."""
        right = np.empty((rows.shape[1], len(rows)))
        for column, row in zip(right.T, rows, strict=True):  # takes half the time of a transposed copy
            column[:] = row
        left = np.empty_like(right)
        self.factor.solve(right, left)
        return np.ascontiguousarray(left.T)

    def apply_inverse(self, rows: Array) -> Array:
        """The inverse of the operator times rows."""
        result: Array = (self.scaled @ rows.T).T + self.shift * rows
        return result

    # `checked_pairs` calls these, since the rows may be tensors on a device.
    def to_host(self, rows: Array) -> Array:
        return rows

    def from_host(self, rows: Array) -> Array:
        return rows


def random_rows(count: int, size: int) -> Array:
    """Standard normal numbers (count, size), the same at every call."""
    return np.random.default_rng(0).standard_normal((count, size))


def without_constant(rows: Rows, constant: Rows) -> Rows:
    """The part of each row that is orthogonal to the constant (…, 1, V), which has unit length."""
    for _ in range(2):  # the constant may be 10⁹ times as long as the rest, so rounding leaves a part of it
        rows = rows - (rows @ transpose(constant)) * constant
    return rows


def transpose(rows: Rows) -> Rows:
    """Transpose the last two dimensions."""
    return rows.swapaxes(-1, -2)
