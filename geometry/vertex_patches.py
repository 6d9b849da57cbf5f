"""Vertices ordered along the surface, and the blocks of that order that are neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from diffnet.geometry.discretize.vertex_order import order_along_surface
from diffnet.geometry.operators import Operators
from diffnet.ops import BlockPattern, Pattern


@dataclass(frozen=True, eq=False)
class Patches:
    """How block-sparse attention sees the vertices of a packed batch.

    order: (V,) int64, the vertex at each place, so that x[order] is ordered along the surface
    places: (V,) int64, the place of each vertex, so that y[places] is in the meshes' own order again
    pattern: (1, V, V) over places: every block with neighbours in it
    mask: (number of blocks, block, block) bool, False between vertices of different meshes
    """

    order: Tensor
    places: Tensor
    pattern: BlockPattern
    mask: Tensor

    def to(self, device: torch.device | str | None) -> Patches:
        return Patches(self.order.to(device), self.places.to(device), self.pattern.to(device), self.mask.to(device))


def patches(operators: Operators, block: int = 32) -> Patches:
    """Patches of `block` vertices that follow each other along the surface, each joined with those next to it.

    Two patches are joined where a vertex of one is in the neighbourhood of a vertex of the other. The order is that of
    reverse Cuthill and McKee, mesh by mesh, which keeps neighbours close to each other.
    """
    neighborhood, _ = (operators.neighborhood or operators.gradient.pattern).to("cpu").with_row_order(None)
    entries = np.ones(neighborhood.nnz, dtype=bool), neighborhood.indices.numpy(), neighborhood.indptr.numpy()
    graph = csr_array(entries, shape=neighborhood.shape)
    bounds = operators.ptr.tolist()
    parts = [lo + order_along_surface(graph[lo:hi, lo:hi]) for lo, hi in pairwise(bounds)]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    ordered = graph[order][:, order]
    ordered.sort_indices()
    pattern = Pattern(torch.from_numpy(ordered.indptr), torch.from_numpy(ordered.indices), len(order))
    blocks = BlockPattern.covering(pattern, block)
    blocks.blocks.prepare()
    place = torch.arange(block)
    mesh = torch.repeat_interleave(torch.arange(len(operators)), torch.tensor(operators.lengths))
    mesh = torch.cat([mesh, mesh.new_full((-len(mesh) % block,), -1)])
    rows, columns = (mesh[i[:, None] * block + place] for i in (blocks.row_indices, blocks.column_indices))
    at = torch.from_numpy(order)
    found = Patches(at, torch.argsort(at), blocks, rows[:, :, None] == columns[:, None, :])
    return found.to(operators.device)
