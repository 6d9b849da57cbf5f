"""Patches of vertices along the surface, for block-sparse attention."""

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
    """An order of the vertices of a packed batch, and the pairs of blocks in that order that attend to each other.

    order: (V,) int64, the vertex at each place; x[order] is ordered along the surface
    places: (V,) int64, the place of each vertex; y[places] is in the order of the meshes again
    pattern: (1, V, V) over places, with all blocks that hold neighbors
    mask: (number of blocks, block, block) bool, False between vertices of different meshes
    """

    order: Tensor
    places: Tensor
    pattern: BlockPattern
    mask: Tensor

    def to(self, device: torch.device | str | None) -> Patches:
        """Move to a device."""
        return Patches(self.order.to(device), self.places.to(device), self.pattern.to(device), self.mask.to(device))


def patches(operators: Operators, block: int = 32) -> Patches:
    """Patches of `block` successive vertices along the surface. Each patch attends to the adjacent patches.

    Two patches are adjacent if a vertex of one is in the neighborhood of a vertex of the other. Each mesh is ordered by
    reverse Cuthill-McKee, which keeps neighbors close to each other.
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
