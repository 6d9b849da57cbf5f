"""Curvature at the vertices, from the shape operator."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.geometry.batches.functional import check_operators
from diffnet.geometry.operators import Operators


def curvature(operators: Operators) -> Tensor:
    """Mean and Gaussian curvature at the vertices of meshes and point clouds, (V, 2).

    The first column is the mean curvature, in 1/length. It is positive where the surface bends away from its normal, as
    on a sphere with outward normals. The second is the Gaussian curvature, in 1/length².

    Both come from the shape operator, the derivative of the normal along the surface: half its trace, and its
    determinant. It is computed from the normals of `operators.frames` and the gradient. Where the normal of a neighbor
    points to the other side, it is turned first. The curvature of a vertex without neighbors is 0.

    Raises TypeError for an argument of another type.

    >>> import trimesh
    >>> from diffnet.geometry import precompute
    >>> ball = precompute(trimesh.creation.icosphere(3, radius=2.0), k=0)
    >>> mean, gaussian = curvature(ball).mean(0).tolist()  # of a sphere, 1/radius and 1/radius²
    >>> round(mean, 2), round(gaussian, 2)
    (0.5, 0.25)
    """
    check_operators(operators)
    pattern, frames = operators.gradient.pattern, operators.frames
    rows, columns = pattern.row_indices, pattern.column_indices
    own, neighbor = frames[rows, 2], frames[columns, 2]
    agrees = (own * neighbor).sum(1, keepdim=True) >= 0
    turn = torch.where(agrees, neighbor, -neighbor) - own
    along = (frames[rows, :2] * turn[:, None]).sum(2)  # (nnz, 2), the turn along both tangents
    entries = operators.gradient.values[:, :, None] * along
    shape = frames.new_zeros(2, len(frames), 2).index_add(1, rows, entries)  # its derivative along X and Y
    mixed = (shape[0, :, 1] + shape[1, :, 0]) / 2  # the two are equal but for errors of the discretization
    mean = (shape[0, :, 0] + shape[1, :, 1]) / 2
    gaussian = shape[0, :, 0] * shape[1, :, 1] - mixed**2
    return torch.stack([mean, gaussian], 1)
