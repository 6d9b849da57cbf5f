"""Sparse Cholesky factorization of many matrices at once, by dense operations on batches of small matrices.

A solve with the usual sparse factor takes one column after another, which leaves a GPU idle. Here each separator of a
nested dissection is eliminated as a block, and all separators of a level are eliminated together. A solve then consists
of batched products on about ten levels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffnet.geometry.eigen.gpu.nested_dissection import Dissection, nested_dissection
from diffnet.ops.common.backend import HAS_TRITON
from diffnet.ops.common.cuda_graph import replayed
from diffnet.ops.fronts import reference
from diffnet.ops.fronts.reference import FrontLevel

MAX_ENTRIES = 1 << 26  # entries of the fronts that are assembled together


class MultifrontalCholesky:
    """The factors L Lᵀ of symmetric positive definite matrices, given as one block-diagonal matrix.

    rows, columns: (E,) int64, places of the entries off the diagonal, each once; values: (E,) float64
    diagonal: (n,) float64
    graph: (n,) int64, the block that each vertex belongs to; −1 for vertices of none, whose solutions are 0
    positions: (n, 3), see `nested_dissection`

    Based on Duff & Reid 1983, "The multifrontal solution of indefinite sparse symmetric linear equations". The inverses
    of the diagonal blocks are stored explicitly, so a solve consists of products. Results are the same to the bit at
    every call.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        values: Tensor,
        diagonal: Tensor,
        graph: Tensor,
        positions: Tensor | None = None,
    ) -> None:
        self.failed = set[int]()  # blocks that aren't positive definite; their solutions are meaningless
        self._levels: list[FrontLevel] = []  # from the leaves to the root
        dissection = nested_dissection(rows, columns, graph, positions)
        updates, level = values.new_zeros(1, 1, 1), None
        for depth in reversed(range(int(dissection.level.max()) + 1)):
            level = _Level(depth, dissection, rows, columns, level)
            found, updates, failed = level.eliminate(dissection.level, rows, columns, values, diagonal, updates)
            self.failed |= set(graph[level.own[failed][:, 0]].tolist())
            self._levels.append(found)
        self._solve_for: dict[int, Callable[[Tensor], Tensor]] = {}
        self._fronts: ModuleType = reference
        if HAS_TRITON and values.is_cuda:
            from diffnet.ops.fronts import kernels

            self._fronts = kernels

    def solve(self, right: Tensor) -> Tensor:
        """The solutions (n, count) for right-hand sides (n, count), float64.

        On a GPU, the next solve with the same count overwrites the result.
        """
        count = right.shape[1]
        if count not in self._solve_for:
            self._solve_for[count] = replayed(self._solve, right.contiguous())
        return self._solve_for[count](right)

    def _solve(self, right: Tensor) -> Tensor:
        right = right.contiguous()
        updates = right.new_zeros(1, right.shape[1])
        halfway = []
        for level in self._levels:
            own, updates = self._fronts.forward(level, right, updates)
            halfway.append(own)
        solution = torch.zeros_like(right)
        for level, own in zip(reversed(self._levels), reversed(halfway), strict=True):
            self._fronts.backward(level, own, solution)
        return solution


class _Level:
    """The fronts of a level, one for each of its F regions.

    own: (F, T), the vertices of each region's separator
    border: (F, R), the vertices of upper separators that the region touches

    Places without a vertex hold n. Each front subtracts an update from upper fronts. An update has a row for each
    vertex of the border. The tensor of updates has one more front and one more row, both of zeros, for missing ones.
    """

    def __init__(
        self, depth: int, dissection: Dissection, rows: Tensor, columns: Tensor, children: _Level | None
    ) -> None:
        self.depth = depth
        self.stride = len(dissection.level) + 1
        inside = dissection.level >= depth
        region = torch.where(inside, dissection.region >> (dissection.level - depth).clamp(min=0), -1)
        self.regions = region[inside].unique()  # type: ignore[no-untyped-call]
        self.front = torch.searchsorted(self.regions, region)  # (n,), valid for vertices inside

        vertices = (dissection.level == depth).nonzero()[:, 0]
        self.own, _ = self._table((self.front[vertices] * self.stride + vertices).sort().values)
        touch = inside[columns] & ~inside[rows]
        keys = (self.front[columns[touch]] * self.stride + rows[touch]).unique()  # type: ignore[no-untyped-call]
        self.border, self.first = self._table(keys)
        self.keys = torch.cat([keys, keys.new_full((1,), torch.iinfo(keys.dtype).max)])

        # The row of each own and each border vertex in the updates of both children, counted over all fronts.
        vertices = torch.cat([self.own, self.border], 1)
        self.child_rows = torch.zeros(2, *vertices.shape, dtype=torch.int64, device=rows.device)
        self.child_size, self.children = 1, 0
        if children is not None:
            self.children = len(children.regions)
            self.child_size = children.border.shape[1] + 1
            for side, source in enumerate(self.child_rows):
                child = _find(children.regions, 2 * self.regions + side, len(children.regions))
                source[:] = child[:, None] * self.child_size + children.border_place(child[:, None], vertices)

    def _table(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """A table of the vertices of each front, and the index of each front's first key.

        keys: sorted numbers front · stride + vertex
        """
        front, vertex = keys // self.stride, keys % self.stride
        size = torch.bincount(front, minlength=len(self.regions) + 1)
        first = size.cumsum(0) - size
        place = torch.arange(len(keys), device=keys.device) - first[front]
        table = keys.new_full((len(self.regions), max(1, int(size.max()))), self.stride - 1)
        table[front, place] = vertex
        return table, first

    def border_place(self, front: Tensor, vertex: Tensor) -> Tensor:
        """The place of a vertex in the border of a front; R if it isn't there."""
        at = _find(self.keys, front * self.stride + vertex, -1)
        return torch.where(at >= 0, at - self.first[front], self.border.shape[1])

    def eliminate(
        self, level: Tensor, rows: Tensor, columns: Tensor, values: Tensor, diagonal: Tensor, updates: Tensor
    ) -> tuple[FrontLevel, Tensor, Tensor]:
        """Eliminate the own vertices of all fronts.

        Returns the factor, the updates, and a mask (F,) of the fronts that aren't positive definite.
        """
        (count, width), size = self.own.shape, self.child_rows.shape[2]
        # The matrix's entries in columns of `own` and in rows of `own` or of the border.
        mine = ((level[columns] == self.depth) & (level[rows] <= self.depth)).nonzero()[:, 0]
        row, column = rows[mine], columns[mine]
        places = torch.arange(width, device=rows.device)
        place = level.new_zeros(self.stride)
        place[self.own] = places.expand_as(self.own)
        at = torch.where(level[row] == self.depth, place[row], width + self.border_place(self.front[column], row))
        fronts = values.new_zeros(count, size, size)
        fronts[self.front[column], at, place[column]] = values[mine]
        # Places without a vertex get a 1 on the diagonal.
        fronts[:, places, places] = pad(diagonal, (0, 1), value=1.0)[self.own]

        flat = updates.flatten()
        together = max(1, MAX_ENTRIES // size**2)
        groups = zip(fronts.split(together), self.child_rows.split(together, 1), strict=True)  # type: ignore[no-untyped-call]
        for group, sources in groups:
            for source in sources:
                group += flat[source[:, :, None] * self.child_size + source[:, None, :] % self.child_size]
        factor, info = torch.linalg.cholesky_ex(fronts[:, :width, :width])
        identity = torch.eye(width, dtype=values.dtype, device=values.device)
        half = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        below = fronts[:, width:, :width] @ half.mT
        update = fronts[:, width:, width:] - below @ below.mT
        return self._factor(half.mT @ half, below @ half), pad(update, (0, 1, 0, 1, 0, 1)), info != 0

    def _factor(self, inverse: Tensor, coupling: Tensor) -> FrontLevel:
        child, place = self.child_rows // self.child_size, self.child_rows % self.child_size
        height = self.child_size - 1
        rows = torch.where((child < self.children) & (place < height), child * height + place, -1)
        own_size, border_size = ((table < self.stride - 1).sum(1).int() for table in (self.own, self.border))
        return FrontLevel(self.own.int(), self.border.int(), own_size, border_size, rows.int(), inverse, coupling)


def _find(sorted_keys: Tensor, keys: Tensor, missing: int) -> Tensor:
    """The indices of keys in sorted keys; `missing` for keys that aren't there."""
    at = torch.searchsorted(sorted_keys, keys).clamp(max=len(sorted_keys) - 1)
    return torch.where(sorted_keys[at] == keys, at, missing)
