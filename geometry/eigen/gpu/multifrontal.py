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
        levels, graphs = _tables(dissection, graph, rows, columns)
        diagonal, updates = pad(diagonal, (0, 1), value=1.0), values.new_zeros(1, 1)
        infos = [graph[:0].int()]
        for level in levels:
            factor, updates, info = _eliminate(level, values, diagonal, updates)
            self._levels.append(factor)
            infos.append(info)
        # The blocks that aren't positive definite; their solutions are meaningless.
        self.failed = set(graphs[torch.cat(infos[::-1]) != 0].tolist())
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


class _Level(NamedTuple):
    """The fronts of a level, one for each of its F regions.

    vertices: (F, T + R), the T vertices of each region's separator, then its border, the R vertices of upper separators
        that it touches; n where there is none
    width: T
    own_size, border_size: (F,) int32
    sources, places: (2, F, T + R), the row of each vertex in the updates of both children, counted over all fronts, and
        in its front
    child_rows: (2, F, T + R), see `FrontLevel`
    entries, targets: the entries of the matrix that the fronts begin with, and their places in the fronts

    Each front subtracts an update from upper fronts. An update has a row for each vertex of the border, and one of
    zeros for missing vertices.
    """

    vertices: Tensor
    width: int
    own_size: Tensor
    border_size: Tensor
    sources: Tensor
    places: Tensor
    child_rows: Tensor
    entries: Tensor
    targets: Tensor


def _tables(dissection: Dissection, graph: Tensor, rows: Tensor, columns: Tensor) -> tuple[list[_Level], Tensor]:
    """The levels from the leaves to the root, and the graph of each front from the root to the leaves.

    The tables of all levels are made together, since each operation takes as long as for one level.
    """
    level, region = dissection
    device, count = level.device, int(level.max()) + 1
    if count == 0:
        return [], graph[:0]
    graphs, stride = int(graph.max()) + 1, len(level) + 1
    depths = torch.arange(count + 1, device=device)
    # Regions are nodes of trees. The roots have the numbers from `graphs` on, and i has the children 2i and 2i + 1.
    node = (graphs << level.clamp(min=0)) + region
    inside = (level >= 0).nonzero()[:, 0]
    nodes = node[inside].unique() >> depths[:, None]  # type: ignore[no-untyped-call]
    nodes = nodes[nodes >= graphs].unique()
    front = torch.searchsorted(nodes, node)  # valid for vertices inside

    # Keys are front · stride + vertex, of own vertices and of borders.
    own_keys = (front[inside] * stride + inside).sort().values
    climb = level[columns] - level[rows]
    step, edge = (depths[:, None] < climb).nonzero(as_tuple=True)
    keys = (torch.searchsorted(nodes, node[columns[edge]] >> step) * stride + rows[edge]).unique()  # type: ignore[no-untyped-call]
    firsts = torch.arange(len(nodes) + 1, device=device) * stride
    own_first, first = torch.searchsorted(own_keys, firsts), torch.searchsorted(keys, firsts)
    entries = (climb >= 0).nonzero()[:, 0]
    entry_level, by_level = level[columns[entries]].to(torch.int8).sort(stable=True)
    entries = entries[by_level]

    # Numbers for each level, and then for each front.
    bounds = torch.searchsorted(nodes, graphs << depths), torch.searchsorted(entry_level, depths.to(torch.int8))
    on_host = torch.cat([*bounds, own_first, first]).cpu().numpy()
    start, entry_start, own_first_, first_ = np.split(on_host, np.cumsum([count + 1, count + 1, len(firsts)]))
    sizes = np.stack([np.diff(own_first_), np.diff(first_)])
    fronts = np.diff(start)
    width, height = np.maximum.reduceat(sizes, start[:-1], axis=1).clip(1)
    size, below = width + height, np.append(height[1:], 0)
    slot_start = np.append(0, (fronts * size).cumsum())
    of = np.repeat(np.arange(count), fronts)
    at = np.arange(len(of)) - start[of]
    base = slot_start[of] + at * size[of]  # the front's first place in the tables
    numbers = [
        of,
        size[of],
        below[of],
        base - own_first_[:-1],
        base + width[of] - first_[:-1],
        at * (height[of] + 1) - first_[:-1],
        at * height[of] - first_[:-1],
        at * size[of] ** 2 - base * (size[of] + 1),
    ]
    on_device = torch.from_numpy(np.pad(np.stack(numbers), ((0, 0), (0, 1)))).to(device)  # the last one is no front
    depth, size_, missing, own_shift, border_shift, source_shift, row_shift, corner = on_device
    padded = -(-fronts // 4) * 4  # aligned starts, for which Triton compiles the kernels
    size_start = padded.cumsum() - padded
    aligned = np.zeros((2, padded.sum()), np.int32)
    aligned[:, size_start[of] + at] = sizes
    own_size, border_size = torch.from_numpy(aligned).to(device)

    own = own_keys % stride
    slot = torch.arange(len(own), device=device) + own_shift[own_keys // stride]
    own_slot = torch.zeros_like(level).index_put((own,), slot)
    vertices = torch.full((int(slot_start[-1]),), stride - 1, device=device)
    vertices[slot] = own
    vertices[torch.arange(len(keys), device=device) + border_shift[keys // stride]] = keys % stride
    # The row of each vertex in the updates of both children.
    keys, nodes = (torch.cat([x, x.new_full((1,), torch.iinfo(x.dtype).max)]) for x in (keys, nodes))
    children = 2 * nodes[:-1] + torch.arange(2, device=device)[:, None]
    child = torch.searchsorted(nodes, children)
    child = torch.where(nodes[child] == children, child, len(of))
    slot_front = torch.arange(len(of), device=device).repeat_interleave(size_[:-1], output_size=len(vertices))
    child, missing = child[:, slot_front], missing[slot_front]
    wanted = child * stride + vertices
    found = torch.searchsorted(keys, wanted)
    there = keys[found] == wanted
    sources = torch.where(there, found + source_shift[child], missing)
    places = torch.where(there, found - first[child], missing)
    child_rows = torch.where(there, found + row_shift[child], -1)
    # The places of the entries.
    row, column = rows[entries], columns[entries]
    front = front[column]
    border_slot = torch.searchsorted(keys, front * stride + row) + border_shift[front]
    row_slot = torch.where(climb[entries] == 0, own_slot[row], border_slot)
    targets = row_slot * size_[front] + own_slot[column] + corner[front]

    levels = []
    for i in reversed(range(count)):
        slots, part = slice(slot_start[i], slot_start[i + 1]), slice(entry_start[i], entry_start[i + 1])
        shape, some = (int(fronts[i]), int(size[i])), slice(size_start[i], size_start[i] + fronts[i])
        of_children = (table[:, slots].view(2, *shape) for table in (sources, places, child_rows))
        sizes_ = own_size[some], border_size[some]
        levels.append(
            _Level(vertices[slots].view(shape), int(width[i]), *sizes_, *of_children, entries[part], targets[part])
        )
    return levels, (nodes[:-1] >> depth[:-1]) - graphs


def _eliminate(level: _Level, values: Tensor, diagonal: Tensor, updates: Tensor) -> tuple[FrontLevel, Tensor, Tensor]:
    """Eliminate the own vertices of all fronts.

    diagonal: (n + 1,), with a 1 for places without a vertex

    Returns the factor, the updates, and the number (F,) of the first minor of each front that isn't positive, or 0.
    """
    (count, size), width = level.vertices.shape, level.width
    own, border = level.vertices[:, :width], level.vertices[:, width:]
    fronts = values.new_zeros(count, size, size)
    fronts.view(-1)[level.targets] = values[level.entries]
    fronts.diagonal(dim1=1, dim2=2)[:, :width] = diagonal[own]
    together = max(1, MAX_ENTRIES // size**2)
    tables = (table.split(together, 1) for table in (level.sources, level.places))  # type: ignore[no-untyped-call]
    for group, sources, places in zip(fronts.split(together), *tables, strict=True):  # type: ignore[no-untyped-call]
        for source, place in zip(sources, places, strict=True):
            group += updates[source[:, :, None], place[:, None, :]]
    factor, info = torch.linalg.cholesky_ex(fronts[:, :width, :width])
    identity = torch.eye(width, dtype=values.dtype, device=values.device)
    half = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    below = fronts[:, width:, :width] @ half.mT
    update = fronts[:, width:, width:] - below @ below.mT
    sizes = level.own_size, level.border_size
    result = FrontLevel(own.int(), border.int(), *sizes, level.child_rows.int(), half.mT @ half, below @ half)
    return result, pad(update, (0, 1, 0, 1)).flatten(0, 1), info
