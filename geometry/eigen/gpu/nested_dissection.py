"""Nested dissection of many graphs at once, by operations on whole arrays, which suit a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.cuda_graph import replayed

LANDMARKS = 6  # in each graph
LEAF = 32  # vertices; regions up to this size aren't cut


class Dissection(NamedTuple):
    """Graphs that are cut in two by separators, recursively (George 1973).

    level: (n,) int64, the level at which each vertex became part of a separator or of a leaf; −1 for vertices of no
        graph
    region: (n,) int64, the region of that level that holds the vertex. The regions of level 0 are the graphs. Region r
        is cut into the regions 2r and 2r + 1 of the next level.
    """

    level: Tensor
    region: Tensor


def nested_dissection(tails: Tensor, heads: Tensor, graph: Tensor) -> Dissection:
    """Dissect connected graphs. The result is the same at every call.

    tails, heads: (E,) int64, all edges in both directions, without loops
    graph: (n,) int64, the graph that each vertex belongs to; −1 for none

    A candidate cut halves a region at the median of a function on its vertices. The functions are the distances from
    landmarks and the differences of two such distances. Each region takes the cut with the smallest separator. This
    cuts surfaces along short curves.
    """
    candidates = _candidates(_distances(tails, heads, graph))
    level = torch.full_like(graph, -1)
    region = graph.clone()
    live = (graph >= 0).nonzero()[:, 0]
    depth = 0
    while True:
        _, index = region[live].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        size = torch.bincount(index)
        leaf = (size <= LEAF)[index]
        level[live[leaf]] = depth
        live, index = live[~leaf], index[~leaf]
        if len(live) == 0:
            return Dissection(level, region)
        tails, heads = _inside(tails, heads, level, region)

        later = _second_halves(candidates[:, live], index, size)  # (candidates, live)
        side = torch.zeros(len(candidates), len(level), dtype=torch.bool, device=level.device)
        side[:, live] = later
        crosses = side[:, tails] != side[:, heads]
        border = torch.zeros_like(side)
        candidate, edge = crosses.nonzero(as_tuple=True)
        border[candidate, tails[edge]] = True
        border = border[:, live]
        # The border of one side separates it from the other side.
        lengths = torch.stack([_count(border & ~later, index, len(size)), _count(border & later, index, len(size))])
        choice = lengths.reshape(-1, len(size)).argmin(0)
        of_side, cut = choice // len(candidates), choice % len(candidates)
        at = cut[index], torch.arange(len(live), device=live.device)
        later = later[at]
        separates = border[at] & (later == of_side.bool()[index])

        level[live[separates]] = depth
        live, later = live[~separates], later[~separates]
        region[live] = 2 * region[live] + later
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


def _second_halves(values: Tensor, region: Tensor, size: Tensor) -> Tensor:
    """Whether each vertex lies in the half of its region with larger values, (candidates, live)."""
    lowest = values.min()
    key = region * (values.max() - lowest + 1) + (values - lowest)
    order = key.argsort(dim=1, stable=True)
    kept = torch.bincount(region, minlength=len(size))
    start = kept.cumsum(0) - kept
    place = torch.arange(len(region), device=region.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place) - start[region]
    return 2 * rank >= kept[region]


def _count(mask: Tensor, region: Tensor, regions: int) -> Tensor:
    """The number of True in the mask (candidates, live) for each candidate and region."""
    which, vertex = mask.nonzero(as_tuple=True)
    return torch.bincount(which * regions + region[vertex], minlength=len(mask) * regions).reshape(len(mask), regions)


def _inside(tails: Tensor, heads: Tensor, level: Tensor, region: Tensor) -> tuple[Tensor, Tensor]:
    """The edges inside of regions that are still to be cut."""
    live = (level[tails] < 0) & (level[heads] < 0) & (region[tails] == region[heads])
    return tails[live], heads[live]
