"""Edges of packed meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.mesh.mesh import mesh_edges
from diffnet.geometry.store.transfer import aligned
from diffnet.ops import Pattern
from diffnet.ops.common.ragged import cat_shifted


class Edges(NamedTuple):
    """The edges of a batch.

    pairs: (E, 2) int64, packed vertex indices, mesh after mesh
    lengths: the number of edges of each mesh
    """

    pairs: Tensor
    lengths: tuple[int, ...]


def find_edges(faces: Tensor, lengths: Sequence[int]) -> Edges:
    """Find the edges of faces (F, 3), packed vertex indices of meshes with these numbers of vertices.

    Raises ValueError if no mesh has faces.
    """
    if len(faces) == 0 and any(lengths):
        raise ValueError("point clouds have no faces and so no .edges; write .edge_index(), which also joins points")
    pairs = mesh_edges(faces.cpu().numpy())
    mesh = np.searchsorted(np.cumsum(lengths), pairs[:, 0], side="right")
    counts = np.bincount(mesh, minlength=len(lengths)).tolist()
    return Edges(aligned(torch.from_numpy(pairs)).to(faces.device), tuple(counts))


def pack_edges(each: Sequence[Edges | None], vertex_offsets: Sequence[int]) -> Edges | None:
    """The edges of a batch from those of its meshes, if all are known, else None."""
    every = [edges for edges in each if edges is not None]
    if len(every) < len(each):
        return None
    pairs = cat_shifted([edges.pairs for edges in every], vertex_offsets)
    return Edges(pairs, sum((edges.lengths for edges in every), ()))


def edge_index(pattern: Pattern, self_loops: bool) -> Tensor:
    """The edges (2, E) between the rows and the columns of a square pattern, see `Operators.edge_index`."""
    size = pattern.columns
    rows, columns = pattern.row_indices.long(), pattern.column_indices.long()
    keys = torch.cat([rows * size + columns, columns * size + rows])
    if self_loops:
        keys = torch.cat([keys, torch.arange(size, device=keys.device) * (size + 1)])
    else:
        keys = keys[torch.cat([rows, columns]) != torch.cat([columns, rows])]
    keys = torch.unique(keys)  # sorted
    return torch.stack([keys // max(size, 1), keys % max(size, 1)])
