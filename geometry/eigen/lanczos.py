"""Block Lanczos iteration with thick restarts, for the largest eigenpairs of an operator that is expensive to apply.

The operator is the inverse of L + σM, which turns the smallest eigenvalues into the largest.

Small matrices use NumPy's linear algebra. SciPy has its own BLAS, whose threads and NumPy's would wait for each other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array, Pairs

Rows: TypeAlias = Any  # vectors as the rows of a matrix (…, count, V): a NumPy array, or a tensor on a device
MAX_RESTARTS = 20
ROUNDING = 1e-15
WELL_CONDITIONED = 30  # rows of at most this condition are orthonormal to 1e-13 after one Cholesky QR
TILE_LENGTH = 8192  # entries of a row in a tile
TILE_PRODUCTS = 10**6  # multiplications for a tile; above this number, OpenBLAS copies matrices before it multiplies


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
        return (self.scaled @ rows.T).T + self.shift * rows

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


class KrylovSpace:
    """An orthonormal basis Q of a block Krylov space and the operator on it, T = Q A Qᵀ (Golub & Underwood 1977).

    Vectors are rows. A new block is orthogonalized against the last two blocks. Orthogonality to the others is lost as
    pairs converge, so from time to time a block is orthogonalized against the whole basis. A full basis is reduced to
    the wanted Ritz vectors and some more, and then extended again (Wu & Simon 2000, "Thick-restart Lanczos").

    operator: see `ShiftInvert`
    wanted: number of pairs to find
    block: number of vectors that the operator is applied to at once
    tolerated_loss: loss of orthogonality at which a block is orthogonalized against the whole basis. At 0 every block
        is, which is slower and works for harder problems.
    """

    def __init__(self, operator: ShiftInvert, wanted: int, block: int, tolerated_loss: float = 1e-8) -> None:
        self.operator = operator
        self.block = block
        self.wanted = wanted
        self.tolerated_loss = tolerated_loss
        # This number of vectors is usually enough. There is room for a quarter more, which is rarely used up.
        self.enough = wanted * 5 // 2 + 15 * block
        size = len(operator.root)
        self.capacity = max(min(self.enough * 5 // 4 + 4 * block, size - 1 - block), wanted + 2 * block)
        self.basis: Array = np.empty((self.capacity + block, size))
        self.projected: Array = np.zeros((self.capacity + block, self.capacity + block))
        self.size = 0  # number of vectors that the operator was applied to; the next block follows them
        self.coupling: Array = np.zeros((block, block))  # between the next block and the last one
        self.local = 0  # index of the first vector that the next block couples to
        self.loss = ROUNDING  # estimated scalar products of the next block with the others
        first = operator.apply(without_constant(random_rows(block, size), operator.constant))
        self.basis[:block], _ = _orthonormalized(without_constant(first, operator.constant))

    def converge(self, tolerance: float) -> tuple[Array, Array]:
        """Extend the space until the residuals of the wanted pairs are below `tolerance` times their values.

        Returns values (wanted,), descending, and orthonormal vectors (wanted, V).
        Raises ArithmeticError if they don't converge within MAX_RESTARTS restarts, and LinAlgError if the space can't
        be extended.
        """
        restarts = 0
        check = self.enough
        while True:
            while self.size < min(check, self.capacity - self.block + 1):
                self._extend()
            values, coordinates = self._ritz()
            residuals = np.linalg.norm(self.coupling @ coordinates[-self.block :, : self.wanted], axis=0)
            missing = self.wanted - int((residuals <= tolerance * values[: self.wanted]).sum())
            if missing == 0:
                self._combine(coordinates[:, : self.wanted])
                self.basis.resize(self.wanted, self.basis.shape[1], refcheck=False)  # frees the rest
                return values[: self.wanted], self.basis
            if self.size > self.capacity - self.block:
                if restarts == MAX_RESTARTS or not np.isfinite(self.coupling).all():
                    raise ArithmeticError(f"{missing} of {self.wanted} pairs haven't converged")
                restarts += 1
                self._restart(values, coordinates)
            # The last pairs converge quickly. On small meshes, a check takes longer than several blocks.
            check = self.size + max(3 * self.block, missing // 2)

    def _combine(self, coordinates: Array) -> None:
        """Replace the first vectors by combinations of all, one for each column of `coordinates` (size, count)."""
        combinations = np.ascontiguousarray(coordinates.T)
        for left in range(0, self.basis.shape[1], TILE_LENGTH):  # in place, since large bases fill the memory
            tile = self.basis[:, left : left + TILE_LENGTH]
            tile[: len(combinations)] = combinations @ tile[: self.size]

    def _extend(self) -> None:
        """Apply the operator to the next block.

        The part of the result that is orthogonal to the basis is the block after it.
        """
        lo, hi = self.size, self.size + self.block
        rows = self.operator.apply(self.basis[lo:hi])
        near = self.basis[self.local : hi]
        for _ in range(2):  # twice, because of rounding errors
            overlap = near @ rows.T
            rows -= overlap.T @ near
            self.projected[self.local : hi, lo:hi] += overlap
        rows = without_constant(rows, self.operator.constant)  # rounding errors along the constant would grow, too
        block, coupling = _orthonormalized(rows)
        # Rounding errors along converged vectors, which have the largest values, grow by this factor from block to
        # block. Orthogonality to half of the digits is enough for projections with all digits correct (Simon 1984).
        self.loss *= float(self.projected.diagonal().max() / coupling.diagonal().min())
        if self.loss > self.tolerated_loss:
            # The recurrence starts again from two successive blocks that are orthogonal to all others.
            earlier, recent = self.basis[:lo], self.basis[lo : hi + self.block]
            recent[self.block :] = rows
            self.projected[:lo, lo:hi] += _orthogonalize(recent, earlier)[:, self.block :]
            last, rows = recent[: self.block], recent[self.block :]
            last[:] = _orthonormalized(last)[0]
            overlap = last @ rows.T
            rows -= overlap.T @ last
            self.projected[lo:hi, lo:hi] += overlap
            block, coupling = _orthonormalized(without_constant(rows, self.operator.constant))
            self.loss = ROUNDING
        self.basis[hi : hi + self.block], self.coupling = block, coupling
        self.local, self.size = lo, hi

    def _ritz(self) -> Pairs:
        """All Ritz values (size,), descending, and the coordinates of their vectors as columns."""
        values, coordinates = np.linalg.eigh(self.projected[: self.size, : self.size], UPLO="U")
        return values[::-1], coordinates[:, ::-1]

    def _restart(self, values: Array, coordinates: Array) -> None:
        """Reduce the space to its first Ritz vectors: the wanted ones and a third of the others."""
        keep = min(self.wanted + (self.capacity - self.wanted) // 3, self.size)
        self._combine(coordinates[:, :keep])
        self.basis[keep : keep + self.block] = self.basis[self.size : self.size + self.block]
        self.projected[:] = 0
        np.fill_diagonal(self.projected[:keep, :keep], values[:keep])
        self.size, self.local, self.loss = keep, 0, ROUNDING


def _orthonormalized(rows: Array) -> tuple[Array, Array]:
    """Q and R of rowsᵀ = Qᵀ R, by Cholesky QR, repeated once if rows are far from orthogonal."""
    upper: Array = np.eye(len(rows))
    for _ in range(2):
        # The copy avoids BLAS's routine for a matrix times its own transpose, which is three times slower on few rows.
        lower = np.linalg.cholesky(rows @ rows.copy().T)
        inverse = np.linalg.inv(lower)
        rows, upper = inverse @ rows, lower.T @ upper
        if np.linalg.norm(lower) * np.linalg.norm(inverse) < WELL_CONDITIONED:
            break
    return rows, upper


def _orthogonalize(rows: Array, basis: Array) -> Array:
    """Subtract from rows (count, V), in place, their parts along orthonormal rows `known` (n, V).

    Returns the scalar products (n, count) of both. They are computed in tiles that are small enough for OpenBLAS to
    multiply without copying them first. On one core, this takes half the time of products of whole matrices.
    """
    columns = np.ascontiguousarray(rows.T)
    height = max(1, TILE_PRODUCTS // (TILE_LENGTH * len(rows)))
    tiles = [
        (slice(top, top + height), slice(left, left + TILE_LENGTH))
        for left in range(0, len(columns), TILE_LENGTH)
        for top in range(0, len(basis), height)
    ]
    overlap = np.zeros((len(basis), len(rows)))
    for some, part in tiles:
        overlap[some] += basis[some, part] @ columns[part]
    for some, part in tiles:
        columns[part] -= basis[some, part].T @ overlap[some]
    rows[:] = columns.T
    return overlap
