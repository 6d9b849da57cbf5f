"""The inverse of L + σM as a symmetric operator, which turns the smallest eigenvalues into the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.component import Array, Problem
from diffnet.geometry.multifrontal import MultifrontalCholesky

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
        self.matrix.sort_indices()
        arrays = self.matrix.indptr.astype(np.int32), self.matrix.indices.astype(np.int32), self.matrix.data
        try:
            # Of a symmetric matrix, rows are columns.
            self.factor = cholespy.CholeskySolverD(len(mass), *arrays, cholespy.MatrixType.CSC)
        except ValueError as e:
            raise ArithmeticError(str(e)) from e

    def apply(self, rows: Rows) -> Rows:
        """Rounding errors leave some of the constant in the result."""
        right = np.ascontiguousarray(rows.T)
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

    def empty(self, count: int) -> Rows:
        return np.empty((count, len(self.constant)))

    def to_host(self, rows: Rows) -> Array:
        return rows  # type: ignore[no-any-return]

    def from_host(self, rows: Array) -> Rows:
        return rows


class ShiftInverts(ShiftInvert):
    """Several of them on a GPU, for vectors (how many, count, V) that are 0 beyond the vertices of each.

    `failed` tells, by their places, those whose L + σM isn't positive definite.
    """

    block = 8  # more hardly take longer to solve for, but small matrices on the CPU are the larger

    def __init__(self, problems: Sequence[Problem], shifts: Sequence[float], device: torch.device) -> None:
        self.device = device
        self.sizes = [len(mass) for _, mass in problems]
        self.rank = min(self.sizes) - 1
        self.shift = np.array(shifts)
        count, size = len(problems), max(self.sizes)
        mass, indptr = np.zeros((count, size)), np.empty((count, size + 1), np.int64)
        blocks = [_without_repeats(laplacian) for laplacian, _ in problems]
        for i, block in enumerate(blocks):
            mass[i, : self.sizes[i]] = problems[i][1]
            indptr[i, : len(block.indptr)], indptr[i, len(block.indptr) :] = block.indptr, block.indptr[-1]
        masses = self.from_host(mass)
        inside = masses > 0
        self.root = torch.where(inside, masses, 1).sqrt()[:, None]
        self.constant = (masses / masses.sum(1, keepdim=True)).sqrt()[:, None]

        # All of them as one matrix, with `size` rows for each, scaled as above.
        length = sum(block.nnz for block in blocks)
        numbers = torch.arange(count * size, device=device)
        rows = numbers.repeat_interleave(self.from_host(np.diff(indptr).ravel()), output_size=length)
        columns = self.from_host(np.concatenate([block.indices for block in blocks])) + rows // size * size
        scale = 1 / self.root.flatten()
        values = self.from_host(np.concatenate([block.data for block in blocks])) * scale[rows] * scale[columns]
        on_diagonal, off = rows == columns, rows != columns
        self.diagonal = self.from_host(np.repeat(self.shift, size))
        self.diagonal[rows[on_diagonal]] += values[on_diagonal]
        self.entries = rows[off], columns[off], values[off]
        graph = torch.where(inside.flatten(), numbers // size, -1)
        self.factor = MultifrontalCholesky(*self.entries, self.diagonal, graph)
        self.failed = self.factor.failed

    def apply(self, rows: Tensor) -> Tensor:
        return self._as_one(self.factor.solve, rows)

    def apply_inverse(self, rows: Tensor) -> Tensor:
        row, column, values = self.entries
        starts = torch.searchsorted(row, torch.arange(len(self.diagonal) + 1, device=self.device))
        shape = len(self.diagonal), len(self.diagonal)
        matrix = torch.sparse_csr_tensor(starts, column, values, shape, check_invariants=False)
        return self._as_one(lambda x: matrix @ x + self.diagonal[:, None] * x, rows)

    def _as_one(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Of a function of vectors as columns (how many · V, count)."""
        how_many, count, size = rows.shape
        return function(turned(rows).reshape(-1, count)).view(how_many, size, count).mT.contiguous()

    def start(self, count: int) -> Rows:
        rows = self.from_host(random_rows(count, max(self.sizes)))
        return self.without_constant(torch.where(self.constant > 0, rows, 0))

    def along_constant(self, rows: Tensor) -> Rows:
        return (rows @ turned(self.constant))[..., 0]

    def empty(self, count: int) -> Tensor:
        shape = len(self.sizes), count, max(self.sizes)
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def to_host(self, rows: Tensor) -> Array:
        return rows.cpu().numpy()

    def from_host(self, rows: NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows).to(self.device)


def random_rows(count: int, size: int) -> Array:
    return np.random.default_rng(0).standard_normal((count, size))


def _without_repeats(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """With the sum of the entries that it has for a place."""
    if matrix.has_canonical_format:
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix
