"""Several eigenproblems as one block-diagonal matrix on a device, and the inverses of L + σM as one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.lanczos import random_rows, without_constant
from diffnet.geometry.eigen.problem import Array, Problem
from diffnet.ops.sparse.reference import csr_tensor

CHUNK = 1024  # rows of a scalar product that are added up at once; several chunks of a component fill the GPU


class PackedProblem(NamedTuple):
    """The problems L φ = λ M φ of several meshes, one after another.

    lengths: the number of vertices of each mesh
    rows, columns: (E,) int64, the places of the entries of L, counted over all meshes; each once, in order of the rows
    values: (E,) float64
    mass: (V,) float64, at least 0
    positions: (V, 3) floating point, or None; where vertices are known, factors are smaller
    """

    lengths: tuple[int, ...]
    rows: Tensor
    columns: Tensor
    values: Tensor
    mass: Tensor
    positions: Tensor | None = None

    def restricted(self, kept: Tensor, lengths: tuple[int, ...]) -> PackedProblem:
        """The problem on some vertices, given in their new order, with new lengths."""
        place = torch.full_like(self.mass, -1, dtype=torch.int64)
        place[kept] = torch.arange(len(kept), device=kept.device)
        rows, columns = place[self.rows], place[self.columns]
        inside = ((rows >= 0) & (columns >= 0)).nonzero()[:, 0]
        rows, columns, values = rows[inside], columns[inside], self.values[inside]
        positions = None if self.positions is None else self.positions[kept]
        return PackedProblem(lengths, rows, columns, values, self.mass[kept], positions)

    def on_host(self) -> scipy.sparse.csr_matrix:
        """L as one SciPy matrix."""
        rows, columns, values = (t.cpu().numpy() for t in (self.rows, self.columns, self.values))
        return scipy.sparse.csr_matrix((values, (rows, columns)), (len(self.mass),) * 2)


def packed(problems: Sequence[Problem], device: torch.device) -> PackedProblem:
    """Problems with SciPy matrices, on a device."""
    lengths = tuple(len(mass) for _, mass in problems)
    blocks = [_without_repeats(laplacian) for laplacian, _ in problems]
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [
        np.repeat(np.arange(len(b.indptr) - 1) + at, np.diff(b.indptr)) for b, at in zip(blocks, starts, strict=True)
    ]
    columns = [b.indices.astype(np.int64) + at for b, at in zip(blocks, starts, strict=True)]
    arrays = rows, columns, [b.data for b in blocks], [mass for _, mass in problems]
    return PackedProblem(lengths, *(torch.from_numpy(np.concatenate(array)).to(device) for array in arrays))


def connected_components(problem: PackedProblem) -> Tensor:
    """The first vertex (V,) of the component of each vertex."""
    label = torch.arange(len(problem.mass), device=problem.mass.device)
    while True:
        # Each component takes the smallest number that an edge leads to. Then numbers are followed to their ends.
        lower = torch.minimum(label[problem.rows], label[problem.columns])
        joined = label.scatter_reduce(0, label[problem.rows], lower, "amin")
        joined = joined[joined]
        joined = joined[joined]
        if torch.equal(joined, label):
            return label
        label = joined


def _without_repeats(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The matrix with repeated entries added up, in order of the columns."""
    if matrix.has_canonical_format:
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix


class BatchedShiftInvert:
    """`ShiftInvert` for several components at once, with tensors on a device.

    Vectors are rows (components, count, size) or columns (components · size, count). The size is that of the largest
    component, rounded up to a multiple of CHUNK; other places hold zeros. `failed` holds the indices of the components
    whose L + σM isn't positive definite.
    """

    # A solve for eight right-hand sides takes hardly longer than one for four. With more, the small matrices on the CPU
    # become larger.
    block = 8

    def __init__(self, problem: PackedProblem, shifts: Sequence[float]) -> None:
        self.device = device = problem.mass.device
        self.sizes = problem.lengths
        self.shift = np.array(shifts)
        self.size = -(-max(self.sizes) // CHUNK) * CHUNK
        count = len(self.sizes) * self.size

        component = torch.arange(len(self.sizes), device=device).repeat_interleave(torch.tensor(self.sizes).to(device))
        starts = torch.tensor([0, *np.cumsum(self.sizes)[:-1]]).to(device)
        # The row of each vertex in columns.
        self.place = torch.arange(len(component), device=device) + (component * self.size - starts[component])
        self.root = torch.ones(count, dtype=torch.float64, device=device)
        self.root[self.place] = problem.mass.sqrt()
        constant = torch.zeros_like(self.root)
        constant[self.place] = self.root[self.place]
        self.root, constant = (t.view(len(self.sizes), 1, self.size) for t in (self.root, constant))
        self.constant = constant / (constant * constant).sum(-1, keepdim=True).sqrt()

        # One block-diagonal matrix, scaled as in `ShiftInvert`.
        rows, columns = self.place[problem.rows], self.place[problem.columns]
        scale = 1 / self.root.flatten()
        values = problem.values * scale[rows] * scale[columns]
        on_diagonal, off = rows == columns, rows != columns
        self.diagonal = self.from_host(np.repeat(self.shift, self.size))
        self.diagonal[rows[on_diagonal]] += values[on_diagonal]
        self.entries = rows[off], columns[off], values[off]
        graph = torch.full((count,), -1, device=device)
        graph[self.place] = component
        positions = problem.positions
        if positions is not None:
            positions = torch.zeros(count, 3, dtype=positions.dtype, device=device).index_put((self.place,), positions)
        self.factor = MultifrontalCholesky(*self.entries, self.diagonal, graph, positions)
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
        """Apply a function of columns to rows."""
        components, count, size = rows.shape
        return function(rows.mT.reshape(-1, count)).view(components, size, count).mT.contiguous()

    def start(self, count: int) -> Tensor:
        """Random rows orthogonal to the constant, the same at every call."""
        rows = self.from_host(random_rows(count, self.size))
        return without_constant(torch.where(self.constant > 0, rows, 0), self.constant)  # type: ignore[no-any-return]

    def to_host(self, rows: Tensor) -> Array:
        return rows.cpu().numpy()

    def from_host(self, rows: NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows).to(self.device)
