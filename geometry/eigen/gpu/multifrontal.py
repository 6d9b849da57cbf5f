"""Sparse Cholesky factorization of many matrices at once, by dense operations on batches of small matrices.

A solve with the usual sparse factor takes one column after another, which leaves a GPU idle. Here each separator of a
nested dissection is eliminated as a block, and all separators of a level are eliminated together. A solve then consists
of batched products on about ten levels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from diffnet.geometry.eigen.gpu.dissection import Dissection, nested_dissection
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

    width: T
    vertices: (F, T + R), the T vertices of each region's separator, then its border, the R vertices of upper separators
        that it touches; n where there is none
    children: (3, 2, F, T + R), the row of each vertex in the updates of both children, counted over all fronts, its row
        in its front, and `FrontLevel.child_rows`
    own_size, border_size: (F,) int32
    entries, targets: the entries of the matrix that the fronts begin with, and their places in the fronts

    Each front subtracts an update from upper fronts. An update has a row for each vertex of the border, and one of
    zeros for missing vertices.
    """

    width: int
    vertices: Tensor
    children: Tensor
    own_size: Tensor
    border_size: Tensor
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

    # Keys are front · stride + vertex, for own vertices and for borders.
    own_keys = (front[inside] * stride + inside).sort().values
    climb = level[columns] - level[rows]
    steps, edges = (depths[:, None] < climb).nonzero(as_tuple=True)
    keys = torch.searchsorted(nodes, node[columns[edges]] >> steps) * stride + rows[edges]
    keys = keys.unique()  # type: ignore[no-untyped-call]
    firsts = torch.arange(len(nodes) + 1, device=device) * stride
    own_first, first = torch.searchsorted(own_keys, firsts), torch.searchsorted(keys, firsts)
    entries = (climb >= 0).nonzero()[:, 0]
    of_entries, by_level = level[columns[entries]].to(torch.int8).sort(stable=True)
    entries = entries[by_level]

    # The layout, on the CPU: numbers of each level, and then of each front.
    bounds = torch.searchsorted(nodes, graphs << depths), torch.searchsorted(of_entries, depths.to(torch.int8))
    on_host = torch.cat([*bounds, own_first, first]).cpu().numpy()
    start, entry_start, own_start, border_start = np.split(on_host, np.cumsum([count + 1, count + 1, len(firsts)]))
    filled = np.stack([np.diff(own_start), np.diff(border_start)])
    widths, heights = np.maximum.reduceat(filled, start[:-1], axis=1).clip(1)
    fronts, sizes, child_heights = np.diff(start), widths + heights, np.append(heights[1:], 0)
    slot_start = np.append(0, (fronts * sizes).cumsum())
    depth = np.repeat(np.arange(count), fronts)
    at, size, height = np.arange(len(depth)) - start[depth], sizes[depth], heights[depth]
    base = slot_start[depth] + at * size  # the first of the front's slots in the tables of all levels
    layout = [
        depth,
        size,
        child_heights[depth],
        base - own_start[:-1],  # from keys to slots
        base + widths[depth] - border_start[:-1],
        at * (height + 1) - border_start[:-1],  # from keys to rows of updates
        at * height - border_start[:-1],
        at * size**2 - base * (size + 1),  # from slots to places in the fronts
    ]
    on_device = torch.from_numpy(np.pad(layout, ((0, 0), (0, 1)))).to(device)  # the last one is no front
    front_depth, front_size, missing, own_shift, border_shift, source_shift, row_shift, corner = on_device
    padded = -(-fronts // 4) * 4  # Triton compiles kernels for aligned arrays
    aligned = padded.cumsum() - padded
    counts = np.zeros((2, padded.sum()), np.int32)
    counts[:, aligned[depth] + at] = filled
    own_size, border_size = torch.from_numpy(counts).to(device)

    own, own_slots = own_keys % stride, torch.arange(len(own_keys), device=device) + own_shift[own_keys // stride]
    slot = torch.zeros_like(level).index_put((own,), own_slots)  # of each vertex among the own ones
    vertices = torch.full((int(slot_start[-1]),), stride - 1, device=device)
    vertices[own_slots] = own
    vertices[torch.arange(len(keys), device=device) + border_shift[keys // stride]] = keys % stride
    # The row of the vertex of each slot in the updates of both children. Largest numbers end each search.
    keys, nodes = (torch.cat([x, x.new_full((1,), torch.iinfo(x.dtype).max)]) for x in (keys, nodes))
    children = 2 * nodes[:-1] + torch.arange(2, device=device)[:, None]
    child = torch.searchsorted(nodes, children)
    child = torch.where(nodes[child] == children, child, len(depth))
    all_fronts = torch.arange(len(depth), device=device)
    of_slot = all_fronts.repeat_interleave(front_size[:-1], output_size=len(vertices))
    child, missing = child[:, of_slot], missing[of_slot]
    wanted = child * stride + vertices
    found = torch.searchsorted(keys, wanted)
    there = keys[found] == wanted
    sources = torch.where(there, found + source_shift[child], missing)
    places = torch.where(there, found - first[child], missing)
    in_children = torch.stack([sources, places, torch.where(there, found + row_shift[child], -1)])
    # The places of the entries in the fronts.
    row, column = rows[entries], columns[entries]
    front = front[column]
    border_slot = torch.searchsorted(keys, front * stride + row) + border_shift[front]
    row_slot = torch.where(climb[entries] == 0, slot[row], border_slot)
    targets = row_slot * front_size[front] + slot[column] + corner[front]

    levels = []
    for i in reversed(range(count)):
        slots, mine = slice(slot_start[i], slot_start[i + 1]), slice(entry_start[i], entry_start[i + 1])
        shape, some = (int(fronts[i]), int(sizes[i])), slice(aligned[i], aligned[i] + fronts[i])
        tables = vertices[slots].view(shape), in_children[..., slots].view(3, 2, *shape)
        levels.append(_Level(int(widths[i]), *tables, own_size[some], border_size[some], entries[mine], targets[mine]))
    return levels, (nodes[:-1] >> front_depth[:-1]) - graphs


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
    groups = zip(fronts.split(together), level.children.split(together, 2), strict=True)  # type: ignore[no-untyped-call]
    for group, (sources, places, _) in groups:
        for source, place in zip(sources, places, strict=True):
            group += updates[source[:, :, None], place[:, None, :]]
    factor, info = torch.linalg.cholesky_ex(fronts[:, :width, :width])
    identity = torch.eye(width, dtype=values.dtype, device=values.device)
    half = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    below = fronts[:, width:, :width] @ half.mT
    update = fronts[:, width:, width:] - below @ below.mT
    tables = own.int(), border.int(), level.own_size, level.border_size, level.children[2].int()
    return FrontLevel(*tables, half.mT @ half, below @ half), pad(update, (0, 1, 0, 1)).flatten(0, 1), info
