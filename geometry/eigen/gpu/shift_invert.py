"""The inverses of L + σM of several components as one operator, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.problem import Array, Problem
from diffnet.geometry.eigen.shift_invert import Rows, ShiftInvert, random_rows, transpose
from diffnet.ops.sparse.reference import csr_tensor


class BatchedShiftInvert(ShiftInvert):
    """`ShiftInvert` for several components at once, with tensors on a GPU.

    Vectors are rows (components, count, V), padded with zeros to the V of the largest component. `failed` holds the
    indices of the components whose L + σM isn't positive definite.
    """

    # A solve for eight right-hand sides takes hardly longer than one for four. With more, the small matrices on the CPU
    # become larger.
    block = 8

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

        # One block-diagonal matrix with `size` rows for each component, scaled as in `ShiftInvert`.
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
        matrix = csr_tensor(starts, column, values, shape)
        return self._as_one(lambda x: matrix @ x + self.diagonal[:, None] * x, rows)

    def _as_one(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a function of columns (components · V, count) to rows."""
        components, count, size = rows.shape
        return function(transpose(rows).reshape(-1, count)).view(components, size, count).mT.contiguous()

    def start(self, count: int) -> Rows:
        rows = self.from_host(random_rows(count, max(self.sizes)))
        return self.without_constant(torch.where(self.constant > 0, rows, 0))

    def along_constant(self, rows: Tensor) -> Rows:
        return (rows @ transpose(self.constant))[..., 0]

    def orthogonalize(self, rows: Tensor, known: Tensor) -> Rows:
        overlap = known @ transpose(rows)
        rows -= transpose(overlap) @ known
        return overlap

    def extremes(self, rows: Tensor) -> tuple[Array, Array]:
        return self.to_host(rows.amin(-1)), self.to_host(rows.amax(-1))

    def empty(self, count: int) -> Tensor:
        shape = len(self.sizes), count, max(self.sizes)
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def to_host(self, rows: Tensor) -> Array:
        return rows.cpu().numpy()

    def from_host(self, rows: NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows).to(self.device)


def _without_repeats(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The matrix with repeated entries added up."""
    if matrix.has_canonical_format:
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix
