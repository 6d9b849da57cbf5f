"""Edges of packed meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.mesh.mesh import mesh_edges
from diffnet.ops.common.compiler import not_compiled
from diffnet.ops.common.ragged import cat_shifted

if TYPE_CHECKING:
    from diffnet.geometry.operators import Operators


class Edges(NamedTuple):
    """The edges of a batch.

    pairs: (E, 2) int64, packed vertex indices, mesh after mesh
    lengths: the number of edges of each mesh
    """

    pairs: Tensor
    lengths: tuple[int, ...]


@not_compiled
def find_edges(operators: Operators) -> Edges:
    """Find the edges of the faces. Raises ValueError if no mesh has faces, and on the meta device."""
    faces = operators.faces
    if faces.is_meta:
        raise ValueError("operators on the meta device hold no faces to find edges of; read .edges before .to('meta')")
    if len(faces) == 0 and operators.num_vertices > 0:
        raise ValueError("point clouds have no faces and so no .edges; write .edge_index(), which also joins points")
    pairs = mesh_edges(faces.cpu().numpy())
    if len(operators) == 1:
        counts = [len(pairs)]
    else:
        mesh = np.searchsorted(np.cumsum(operators.lengths), pairs[:, 0], side="right")
        counts = np.bincount(mesh, minlength=len(operators)).tolist()
    return Edges(torch.from_numpy(pairs).to(faces.device), tuple(counts))


def pack_edges(found: Sequence[Edges | None], vertex_offsets: Sequence[int]) -> Edges | None:
    """The edges of a batch from those of its meshes, if all are known, else None."""
    known = [edges for edges in found if edges is not None]
    if len(known) < len(found):
        return None
    pairs = cat_shifted([edges.pairs for edges in known], vertex_offsets)
    return Edges(pairs, sum((edges.lengths for edges in known), ()))


def edge_index(operators: Operators, self_loops: bool = False) -> Tensor:
    """See `Operators.edge_index`."""
    pattern, size = operators.gradient.pattern, operators.num_vertices
    rows, columns = pattern.row_indices.long(), pattern.column_indices.long()
    keys = torch.cat([rows * size + columns, columns * size + rows])
    if self_loops:
        keys = torch.cat([keys, torch.arange(size, device=keys.device) * (size + 1)])
    else:
        keys = keys[torch.cat([rows, columns]) != torch.cat([columns, rows])]
    keys = torch.unique(keys)  # sorted
    return torch.stack([keys // max(size, 1), keys % max(size, 1)])
