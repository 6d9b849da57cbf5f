"""The inverses of L + σM of several components as one operator, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.gpu.packed import PackedProblem
from diffnet.geometry.eigen.problem import Array
from diffnet.geometry.eigen.shift_invert import random_rows, without_constant
from diffnet.ops.sparse.reference import csr_tensor

CHUNK = 1024  # rows of a scalar product that are added up at once; several chunks of a component fill the GPU


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
