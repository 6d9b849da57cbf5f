"""Nested dissection of graphs, by operations on whole arrays, which suit a GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
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
    counts = torch.tensor([len(vertices) for vertices in taken]).to(graph.device)
    vertices = torch.cat(taken)
    region[vertices] = torch.cat(regions)
    level[vertices] = torch.arange(len(taken), device=graph.device).repeat_interleave(counts, output_size=len(vertices))
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
