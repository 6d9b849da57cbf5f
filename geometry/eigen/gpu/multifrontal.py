"""Sparse Cholesky factorization of many matrices at once, by dense operations on batches of small matrices.

A solve with the usual sparse factor takes one column after another, which leaves a GPU idle. Here each separator of a
nested dissection is eliminated as a block, and all separators of a level are eliminated together. A solve then consists
of batched products on about ten levels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffnet.geometry.eigen.gpu.nested_dissection import Dissection, nested_dissection
from diffnet.ops.common.cuda_graph import replayed

MAX_ENTRIES = 1 << 26  # entries of the fronts that are assembled together


class MultifrontalCholesky:
    """The factors L Lᵀ of symmetric positive definite matrices, given as one block-diagonal matrix.

    rows, columns: (E,) int64, places of the entries off the diagonal, each once; values: (E,) float64
    diagonal: (n,) float64
    graph: (n,) int64, the block that each vertex belongs to; −1 for vertices of none, whose solutions are 0

    Based on Duff & Reid 1983, "The multifrontal solution of indefinite sparse symmetric linear equations". The inverses
    of L's diagonal blocks are stored explicitly, so a solve consists of products. Results are the same to the bit at
    every call.
    """

    def __init__(self, rows: Tensor, columns: Tensor, values: Tensor, diagonal: Tensor, graph: Tensor) -> None:
        self.failed = set[int]()  # blocks that aren't positive definite; their solutions are meaningless
        self._levels: list[_Level] = []  # from the leaves to the root
        self._solve_for: dict[int, Callable[[Tensor], Tensor]] = {}
        dissection = nested_dissection(rows, columns, graph)
        updates = values.new_zeros(1, 1, 1)
        for depth in reversed(range(int(dissection.level.max()) + 1)):
            level = _Level(depth, dissection, rows, columns, self._levels[-1] if self._levels else None)
            updates, failed = level.eliminate(dissection.level, rows, columns, values, diagonal, updates)
            self.failed |= set(graph[level.own[failed][:, 0]].tolist())
            self._levels.append(level)

    def solve(self, right: Tensor) -> Tensor:
        """The solutions (n, count) for right-hand sides (n, count), float64.

        On a GPU, the next solve with the same count overwrites the result.
        """
        count = right.shape[1]
        if count not in self._solve_for:
            self._solve_for[count] = replayed(self._solve, right)
        return self._solve_for[count](right)

    def _solve(self, right: Tensor) -> Tensor:
        x = pad(right, (0, 0, 0, 1))  # one more row of zeros, for empty places in tables
        updates = right.new_zeros(1, 1, right.shape[1])
        halfway = []
        for level in self._levels:
            own, updates = level.forward(x, updates)
            halfway.append(own)
        solution = torch.zeros_like(x)
        for level, own in zip(reversed(self._levels), reversed(halfway), strict=True):
            level.backward(solution, own)
        return solution[:-1]


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
        self.child_size = 1
        if children is not None:
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
    ) -> tuple[Tensor, Tensor]:
        """Eliminate the own vertices of all fronts.

        Sets `inverse` (F, T, T), the inverses of L's diagonal blocks, and `below` (F, R, T), L's rows of the border.
        Returns the updates, and a mask (F,) of the fronts that aren't positive definite.
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
        self.inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        self.below = fronts[:, width:, :width] @ self.inverse.mT
        update = fronts[:, width:, width:] - self.below @ self.below.mT
        return pad(update, (0, 1, 0, 1, 0, 1)), info != 0

    def forward(self, x: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """L⁻¹ x at the own vertices, and the updates."""
        width = self.own.shape[1]
        flat = updates.flatten(0, 1)
        given = _rows(flat, self.child_rows[0]) + _rows(flat, self.child_rows[1])
        own = self.inverse @ (given[:, :width] + _rows(x, self.own))
        return own, pad(given[:, width:] - self.below @ own, (0, 0, 0, 1, 0, 1))

    def backward(self, x: Tensor, own: Tensor) -> None:
        """Write L⁻ᵀ `own` to the own vertices of x. The border's values must be there already."""
        x[self.own] = self.inverse.mT @ (own - self.below.mT @ _rows(x, self.border))


def _rows(of: Tensor, index: Tensor) -> Tensor:
    """of[index], entry by entry. PyTorch's kernel for whole rows takes twenty times as long for rows this short."""
    return of[index[..., None], torch.arange(of.shape[1], device=of.device)]


def _find(sorted_keys: Tensor, keys: Tensor, missing: int) -> Tensor:
    """The indices of keys in sorted keys; `missing` for keys that aren't there."""
    at = torch.searchsorted(sorted_keys, keys).clamp(max=len(sorted_keys) - 1)
    return torch.where(sorted_keys[at] == keys, at, missing)
