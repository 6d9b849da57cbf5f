"""The inverse of L + σM as a symmetric operator, which turns the smallest eigenvalues into the largest."""

from __future__ import annotations

from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array

Rows: TypeAlias = Any  # vectors as the rows of a matrix (count, V): a NumPy array, or a tensor on a GPU

TILE_LENGTH = 8192  # entries of a row in a tile, see `ShiftInvert.orthogonalize`
TILE_PRODUCTS = 10**6  # multiplications for a tile; above this number, OpenBLAS copies matrices before it multiplies


def transpose(rows: Rows) -> Rows:
    """Transpose the last two dimensions."""
    return rows.swapaxes(-1, -2)


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
        self.shift, self.root = np.asarray(shift), self.from_host(np.sqrt(mass))
        self.rank = len(mass) - 1
        self.constant = self.root / np.sqrt(mass.sum())
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

    def apply(self, rows: Rows) -> Rows:
        """The operator times rows. Rounding errors leave some of the constant in the result."""
        right = np.empty((rows.shape[1], len(rows)))
        for column, row in zip(right.T, rows, strict=True):  # takes half the time of a transposed copy
            column[:] = row
        left = np.empty_like(right)
        self.factor.solve(right, left)
        return np.ascontiguousarray(left.T)

    def apply_inverse(self, rows: Rows) -> Rows:
        """The inverse of the operator times rows."""
        return (self.scaled @ rows.T).T + self.shift * rows

    def start(self, count: int) -> Rows:
        """Random rows orthogonal to the constant, the same at every call."""
        return self.without_constant(random_rows(count, len(self.constant)))

    def along_constant(self, rows: Rows) -> Rows:
        """Scalar products of rows with the constant, which is M^½ 1 scaled to unit length."""
        return rows @ self.constant

    def without_constant(self, rows: Rows) -> Rows:
        """The part of each row that is orthogonal to the constant."""
        for _ in range(2):  # the constant may be 10⁹ times as long as the rest, so rounding leaves a part of it
            rows = rows - self.along_constant(rows)[..., None] * self.constant
        return rows

    def orthogonalize(self, rows: Rows, known: Rows) -> Rows:
        """Subtract from rows (count, V), in place, their parts along orthonormal rows `known` (n, V).

        Returns the scalar products (n, count) of both. They are computed in tiles that are small enough for OpenBLAS to
        multiply without copying them first. On one core, this takes half the time of products of whole matrices.
        """
        columns = np.ascontiguousarray(rows.T)
        height = max(1, TILE_PRODUCTS // (TILE_LENGTH * len(rows)))
        tiles = [
            (slice(top, top + height), slice(left, left + TILE_LENGTH))
            for left in range(0, len(columns), TILE_LENGTH)
            for top in range(0, len(known), height)
        ]
        overlap = np.zeros((len(known), len(rows)))
        for some, part in tiles:
            overlap[some] += known[some, part] @ columns[part]
        for some, part in tiles:
            columns[part] -= known[some, part].T @ overlap[some]
        rows[...] = columns.T
        return overlap

    def extremes(self, rows: Rows) -> tuple[Array, Array]:
        """The smallest and the largest entry of each row."""
        return rows.min(-1), rows.max(-1)

    def empty(self, count: int) -> Rows:
        """Uninitialized rows."""
        return np.empty((count, len(self.constant)))

    def to_host(self, rows: Rows) -> Array:
        """Rows as a NumPy array."""
        return rows  # type: ignore[no-any-return]

    def from_host(self, rows: Array) -> Rows:
        """A NumPy array as rows on the operator's device."""
        return rows


def random_rows(count: int, size: int) -> Array:
    """Standard normal numbers (count, size), the same at every call."""
    return np.random.default_rng(0).standard_normal((count, size))
