"""Nested dissection of many graphs at once, by operations on whole arrays, which suit a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffnet.ops.common.cuda_graph import replayed

LANDMARKS = 6  # in each graph
# The axes and the diagonals of a cube. The factors of RNA surfaces are 4 % smaller than with the axes alone, and 9 %
# smaller than with distances on the surface. With the diagonals of the cube's faces, too, they would be 5 % smaller,
# and twice as many cuts would be compared.
DIRECTIONS = [(1.0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1)]
MAX_STEPS = 2**20  # to which the values of a function in a graph are rounded before they are sorted
LEAF = 64  # vertices; regions up to this size aren't cut


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
        functions = _candidates(_distances(tails, heads, graph))
    else:
        functions = positions.T[:, None] * positions.new_tensor(DIRECTIONS).T[:, :, None]
        functions = functions[0] + functions[1] + functions[2]
    # The vertices of each region stand together, in the order of one function in each row.
    number, size = graph[vertices].unique(return_counts=True)  # type: ignore[no-untyped-call]
    order = vertices[_keys(functions[:, vertices], graph[vertices]).argsort(dim=1, stable=True)]
    depth = 0
    while True:
        # Regions that are small enough are leaves.
        index = torch.arange(len(size), device=graph.device).repeat_interleave(size)
        leaf = (size <= LEAF)[index]
        level[order[0, leaf]] = depth
        region[order[0, leaf]] = number[index[leaf]]
        order, inner = order[:, ~leaf], size > LEAF
        number, size = number[inner], size[inner]
        if order.shape[1] == 0:
            return Dissection(level, region)

        index = torch.arange(len(size), device=graph.device).repeat_interleave(size, output_size=order.shape[1])
        start = size.cumsum(0) - size
        later = 2 * (torch.arange(len(index), device=graph.device) - start[index]) >= size[index]
        tails, heads = _inside(tails, heads, level, region)
        side = torch.zeros(len(order), len(level), dtype=torch.bool, device=level.device)
        side.scatter_(1, order, later.expand_as(order))
        border = torch.zeros_like(side)
        candidate, edge = (side[:, tails] != side[:, heads]).nonzero(as_tuple=True)
        border[candidate, tails[edge]] = True
        # The border of one side separates it from the other side.
        touched = border.gather(1, order)
        lengths = torch.cat([_totals(touched & ~later, start, size), _totals(touched & later, start, size)])
        choice = lengths.argmin(0)
        of_side, cut = (choice // len(order)).bool(), choice % len(order)

        vertices = order[0]
        later = side[cut[index], vertices]
        separates = border[cut[index], vertices] & (later == of_side[index])
        level[vertices[separates]] = depth
        region[vertices] = torch.where(separates, number[index], 2 * number[index] + later)
        # Each row keeps its order in the parts of each region: first half, second half, separator.
        part = torch.zeros_like(level)
        part[vertices] = torch.where(separates, 2, later.long())
        order = _parted(order, part[order], index, start)
        size = torch.stack([_totals(part[vertices][None] == half, start, size)[0] for half in (0, 1)], 1).flatten()
        number = torch.stack([2 * number, 2 * number + 1], 1).flatten()[size > 0]
        size = size[size > 0]
        depth += 1


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


def _candidates(distances: Tensor) -> Tensor:
    """The functions on the vertices whose medians are candidate cuts."""
    first, second = torch.triu_indices(len(distances), len(distances), 1, device=distances.device)
    return torch.cat([distances, distances[first] - distances[second]])


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


def _totals(mask: Tensor, start: Tensor, size: Tensor) -> Tensor:
    """The number of True of each region in each row of a mask (rows, live), whose regions stand together."""
    before = _counted_before(mask)
    return before[:, start + size] - before[:, start]


def _counted_before(mask: Tensor) -> Tensor:
    """The number of True before each place of a mask (rows, n) and after the last one, (rows, n + 1).

    The rows begin with different numbers, so only differences within a row have a meaning. The sum runs over the flat
    mask, because PyTorch sums up each row of a matrix on one multiprocessor, and a vector on all.
    """
    sums = pad(mask.flatten().cumsum(0), (1, 0))
    return sums.as_strided((len(mask), mask.shape[1] + 1), (mask.shape[1], 1))


def _parted(order: Tensor, part: Tensor, index: Tensor, start: Tensor) -> Tensor:
    """The order without part 2 and, in each region, part 0 before part 1.

    index: (live,) the region at each place; start: the first place of each region
    """
    within = torch.zeros_like(order)
    first = torch.zeros_like(start)
    for half in (0, 1):
        mine = part == half
        count = _counted_before(mine)
        before = count[:, start]
        within = torch.where(mine, first[index] + count[:, :-1] - before[:, index], within)
        first = first + count[0, pad(start[1:], (0, 1), value=order.shape[1])] - before[0]
    kept = first.cumsum(0) - first  # where each region starts in the new order
    target = torch.where(part < 2, kept[index] + within, int(first.sum()))
    return torch.empty_like(order).scatter_(1, target.clamp(max=order.shape[1] - 1), order)[:, : int(first.sum())]


def _inside(tails: Tensor, heads: Tensor, level: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
    """The edges inside of regions that are still to be cut."""
    live = (level[tails] < 0) & (level[heads] < 0) & (region[tails] == region[heads])
    return tails[live], heads[live]
