"""Sparse Cholesky factorization of many matrices at once, by dense operations on batches of small matrices.

A solve with the usual sparse factor takes one column after another, which leaves a GPU idle. Here each separator of a
nested dissection is eliminated as a block, and all separators of a level are eliminated together. A solve then consists
of batched products on about ten levels. The dissection, too, consists of operations on whole arrays, which suit a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from diffnet.ops.common.backend import HAS_TRITON
from diffnet.ops.common.cuda_graph import replayed
from diffnet.ops.fronts import reference
from diffnet.ops.fronts.reference import FrontLevel

LANDMARKS = 6  # in each graph
# The axes and the diagonals of a cube. The factors of RNA surfaces are 4 % smaller than with the axes alone, and 9 %
# smaller than with distances on the surface. With the diagonals of the cube's faces, too, they would be 5 % smaller,
# and twice as many cuts would be compared.
DIRECTIONS = [(1.0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1)]
MAX_STEPS = 2**20  # to which the values of a function in a graph are rounded before they are sorted
LEAF = 64  # vertices; regions up to this size aren't cut
MAX_ENTRIES = 1 << 26  # entries of the fronts that are assembled together


class Dissection(NamedTuple):
    """Graphs that are cut in two by separators, recursively (George 1973).

    level: (n,) int64, the level at which each vertex became part of a separator or of a leaf; −1 for vertices of no
        graph
    region: (n,) int64, the region of that level that holds the vertex. The regions of level 0 are the graphs. Region r
        is cut into the regions 2r and 2r + 1 of the next level.
    """

    level: Tensor
    region: Tensor


def nested_dissection(tails: Tensor, heads: Tensor, graph: Tensor, positions: Tensor | None = None) -> Dissection:
    """Dissect connected graphs. The result is the same at every call.

    tails, heads: (E,) int64, all edges in both directions, without loops
    graph: (n,) int64, the graph that each vertex belongs to; −1 for none
    positions: (n, 3) floating point, the places of the vertices, if there are any

    A candidate cut halves a region at the median of a function on its vertices. Each region takes the cut with the
    smallest separator. The functions are the coordinates along several directions. Without positions, they are the
    distances from landmarks and the differences of two such distances.
    """
    level = torch.full_like(graph, -1)
    region = graph.clone()
    vertices = (graph >= 0).nonzero()[:, 0]
    if len(vertices) == 0:
        return Dissection(level, region)
    if positions is None:
        distances = _distances(tails, heads, graph)
        first, second = torch.triu_indices(len(distances), len(distances), 1, device=graph.device)
        functions = torch.cat([distances, distances[first] - distances[second]])
    else:
        functions = positions.T[:, None] * positions.new_tensor(DIRECTIONS).T[:, :, None]
        functions = functions[0] + functions[1] + functions[2]
    # The vertices of each region stand together, in the order of one function in each row.
    number, size = graph[vertices].unique(return_counts=True)  # type: ignore[no-untyped-call]
    order = vertices[_keys(functions[:, vertices], graph[vertices]).argsort(dim=1, stable=True)]
    cuts, n = len(order), len(graph)
    rows, halves = (torch.arange(count, dtype=torch.int32, device=graph.device) for count in (cuts, 2))
    sizes = size.cpu().numpy()
    taken: list[Tensor] = []  # the vertices of each level
    regions: list[Tensor] = []  # their regions
    while len(sizes):
        ends = sizes.cumsum()
        bounds = np.concatenate([[0], np.stack([ends - sizes // 2, ends], 1).ravel()])  # of the halves of each region
        starts = torch.from_numpy(bounds).to(graph.device)
        half = torch.searchsorted(starts[1:], torch.arange(ends[-1], device=graph.device), right=True)
        index = half // 2
        small = sizes <= LEAF
        if small.all():
            taken.append(order[0])
            regions.append(number[index])
            break
        side = torch.zeros(cuts, n, dtype=torch.int8, device=graph.device)  # 1 or 2; 0 outside of the regions
        side.scatter_(1, order, (half % 2 + 1).to(side.dtype).expand_as(order))
        whole = (side[:, tails] | side[:, heads]) != 3  # edges that aren't cut; none leads to another region
        # The border, and behind it marks for edges that aren't cut, since a selection would make a GPU wait.
        border = torch.zeros(cuts, 2 * n, dtype=torch.bool, device=graph.device)
        border.scatter_(1, torch.add(tails, whole, alpha=n), True)
        # The border of one side separates it from the other side.
        lengths = _counted_before(border.gather(1, order))[:, starts].diff(dim=1)
        choice = lengths.view(cuts, -1, 2).permute(2, 0, 1).flatten(0, 1).argmin(0)[index]
        cut, vertices = choice % cuts, order[0]
        later = side[cut, vertices]
        separates = border[cut, vertices] & (choice // cuts + 1 == later)
        if small.any():  # Regions that are small enough are leaves.
            separates |= torch.from_numpy(small).to(graph.device)[index]
        # Each row keeps its order within the halves. Separators and leaves go to its end.
        last = 2 * len(sizes) + 1
        part = torch.zeros_like(graph, dtype=torch.int32)
        part[vertices] = torch.add(later, index, alpha=2).masked_fill_(separates, last).int()
        keys, source = torch.add(part[order], rows[:, None], alpha=last + 1).flatten().sort(stable=True)
        order = order.flatten()[source].view(cuts, -1)
        firsts = torch.arange(1, last + 1, dtype=torch.int32, device=graph.device)
        limits = torch.searchsorted(keys[: order.shape[1]], firsts).cpu().numpy()
        taken.append(order[0, limits[-1] :])
        regions.append(number[index[source[limits[-1] : order.shape[1]]]])
        order, sizes = order[:, : limits[-1]], np.diff(limits)
        number = torch.add(halves, number[:, None], alpha=2).flatten()
        if not sizes.all():
            number, sizes = number[torch.from_numpy(np.flatnonzero(sizes)).to(graph.device)], sizes[sizes > 0]
    for depth, (vertices, of_vertices) in enumerate(zip(taken, regions, strict=True)):
        level[vertices] = depth
        region[vertices] = of_vertices
    return Dissection(level, region)


def _distances(tails: Tensor, heads: Tensor, graph: Tensor) -> Tensor:
    """The number of edges (LANDMARKS, n) from each vertex to landmarks that are far from each other."""
    inside = graph >= 0
    count = int(graph.max()) + 1 if len(graph) else 0
    vertices = torch.arange(len(graph), device=graph.device)

    def farthest(distance: Tensor) -> Tensor:
        """The vertex of each graph with the largest distance."""
        key = distance * len(graph) + vertices
        best = torch.full((count,), -1, device=graph.device).scatter_reduce_(0, graph[inside], key[inside], "amax")
        return best[best >= 0] % len(graph)

    def sixteen_hops(distance: Tensor) -> Tensor:
        for _ in range(16):  # without looking at the result, which would make a GPU wait
            distance = distance.scatter_reduce(0, tails, distance[heads] + 1, "amin")
        return distance

    further = replayed(sixteen_hops, graph)

    def hops(sources: Tensor) -> Tensor:
        distance = torch.full_like(graph, len(graph))
        distance[sources] = 0
        while True:
            before, distance = distance, further(distance).clone()
            if torch.equal(distance, before):
                return distance

    nearest = hops(farthest(torch.zeros_like(graph)))
    fields = [nearest]
    for _ in range(LANDMARKS - 1):
        fields.append(hops(farthest(nearest)))
        nearest = torch.minimum(nearest, fields[-1])
    return torch.stack(fields)


def _keys(values: Tensor, graph: Tensor) -> Tensor:
    """int32 keys (functions, live) that put the graphs one after another, and the values of each function in order."""
    count = int(graph.max()) + 1
    steps = min(MAX_STEPS, 2**31 // count)
    lowest, highest = (
        values.new_zeros(len(values), count).scatter_reduce(1, graph.expand_as(values), values, how, include_self=False)
        for how in ("amin", "amax")
    )
    share = (values - lowest[:, graph]) / (highest - lowest)[:, graph].clamp(min=torch.finfo(torch.float64).tiny)
    return ((graph * steps) + (share * (steps - 1)).long()).int()


def _counted_before(mask: Tensor) -> Tensor:
    """The number of True before each place of a mask (rows, n) and after the last one, (rows, n + 1).

    The rows begin with different numbers, so only differences within a row have a meaning. The sum runs over the flat
    mask, because PyTorch sums up each row of a matrix on one multiprocessor, and a vector on all.
    """
    sums = pad(mask.flatten().cumsum(0), (1, 0))
    return sums.as_strided((len(mask), mask.shape[1] + 1), (mask.shape[1], 1))


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
        self._levels: list[FrontLevel] = []  # from the leaves to the root
        dissection = nested_dissection(rows, columns, graph, positions)
        updates, level = values.new_zeros(1, 1, 1), None
        fronts, infos = [graph[:0]], [graph[:0] < 0]  # of each level: a vertex of each front, and whether it failed
        for depth in reversed(range(int(dissection.level.max()) + 1)):
            level = _Level(depth, dissection, rows, columns, level)
            factor, updates, failed = level.eliminate(dissection.level, rows, columns, values, diagonal, updates)
            fronts.append(level.own[:, 0])
            infos.append(failed)
            self._levels.append(factor)
        # The blocks that aren't positive definite; their solutions are meaningless.
        self.failed = set(graph[torch.cat(fronts)[torch.cat(infos)]].tolist())
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
            half, updates = self._fronts.forward(level, right, updates)
            halfway.append(half)
        solution = torch.zeros_like(right)
        for level, half in zip(reversed(self._levels), reversed(halfway), strict=True):
            self._fronts.backward(level, half, solution)
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
        vertices = (dissection.level == depth).nonzero()[:, 0]
        regions = dissection.region[vertices]
        if children is not None:
            regions = torch.cat([regions, children.regions >> 1])
        self.regions: Tensor = regions.unique()  # type: ignore[no-untyped-call]
        self.front = torch.searchsorted(self.regions, region)  # (n,), valid for vertices inside

        own_keys = (self.front[vertices] * self.stride + vertices).sort().values
        touch = (inside[columns] & ~inside[rows]).nonzero()[:, 0]
        keys = (self.front[columns[touch]] * self.stride + rows[touch]).unique()  # type: ignore[no-untyped-call]
        own_first, self.first = self._starts(own_keys), self._starts(keys)
        widths = torch.stack([own_first.diff().max(), self.first.diff().max()]).tolist()
        self.own: Tensor = self._table(own_keys, own_first, widths[0])
        self.border: Tensor = self._table(keys, self.first, widths[1])
        self.keys = torch.cat([keys, keys.new_full((1,), torch.iinfo(keys.dtype).max)])

        # The row of each own and each border vertex in the updates of both children, counted over all fronts.
        vertices = torch.cat([self.own, self.border], 1)
        self.child_rows = torch.zeros(2, *vertices.shape, dtype=torch.int64, device=rows.device)
        self.child_size, self.children = 1, 0
        if children is not None:
            self.children = len(children.regions)
            self.child_size = children.border.shape[1] + 1
            sides = torch.arange(2, device=rows.device)[:, None]
            child = _find(children.regions, 2 * self.regions + sides, self.children)[:, :, None]
            self.child_rows = child * self.child_size + children.border_place(child, vertices)

    def _starts(self, keys: Tensor) -> Tensor:
        """The first key's index of each front, and the number of keys. keys: sorted, front · stride + vertex"""
        return torch.searchsorted(keys, torch.arange(len(self.regions) + 1, device=keys.device) * self.stride)

    def _table(self, keys: Tensor, first: Tensor, width: int) -> Tensor:
        """A table of the vertices of each front."""
        front = keys // self.stride
        place = torch.arange(len(keys), device=keys.device) - first[front]
        table = keys.new_full((len(self.regions), max(1, width)), self.stride - 1)
        table[front, place] = keys % self.stride
        return table

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
