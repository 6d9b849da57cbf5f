"""Boundaries of triangle meshes."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, not_a_tensor


def boundary_vertices(faces: Tensor, vertices: int) -> Tensor:
    """Return which vertices lie on the boundary, (V,) bool: on an edge that belongs to exactly one face.

    faces: (F, 3) integers
    vertices: the number of vertices, V

    Vertices that no face uses are not on the boundary. On a GPU, it waits for the GPU.

    Raises TypeError for faces that are no integer tensor, ValueError for another shape.

    >>> import torch
    >>> boundary_vertices(torch.tensor([[0, 1, 2], [0, 2, 3], [0, 3, 1]]), 5).tolist()  # around vertex 0
    [False, True, True, True, False]
    """
    if not isinstance(faces, Tensor):
        raise not_a_tensor("faces", faces)
    if faces.is_floating_point() or faces.dtype == torch.bool:
        raise TypeError(f"faces should be integers, got {faces.dtype}")
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {tuple(faces.shape)}")
    check_count("vertices", vertices, 0)
    corners = faces.long()
    ends = torch.stack([corners, corners.roll(-1, 1)]).sort(0).values.reshape(2, -1)
    ends = ends[:, ends[0] != ends[1]]  # a face with a repeated corner has a side without length
    edges, count = torch.unique(ends[0] * vertices + ends[1], return_counts=True)
    alone = edges[count == 1]
    mask = torch.zeros(vertices, dtype=torch.bool, device=faces.device)
    mask[alone // max(vertices, 1)] = True
    mask[alone % max(vertices, 1)] = True
    return mask
