"""Geodesic errors of predicted labels, as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.geometry.geodesics.errors import geodesic_errors, indices
from diffnet.geometry.mesh.mesh import MeshLike


def geodesic_label_errors(mesh: MeshLike, predicted: Any, labels: Any) -> Tensor:
    """Measure correspondences: the distance along the surface from the predicted to the true vertex, / √area.

    The mean of the result is the usual error of dense correspondence.

    mesh: the mesh or point cloud whose vertices are the labels, see `load_mesh`
    predicted, labels: (N,) integers, vertices of this mesh, as tensors on any device or as arrays. A negative label
        means that the true vertex is unknown.

    Returns (N,) float64 on the CPU: 0 where both are equal, infinity between components, NaN for negative labels, so
    take `errors.nanmean()` if there are any. Errors don't depend on the scale of the mesh.

    On manifold meshes, a distance is the length of a geodesic path, found by edge flips from the shortest path along
    edges. It is exact unless there is a shorter path around another side of the surface. On other meshes and on point
    clouds, distances come from the heat method, which is less accurate for close points. Vertices at the same position
    are joined as in `precompute`. Each pair of vertices is computed once.

    Raises MeshError for a mesh that can't be used or has no area, TypeError for indices that are not integers,
    ValueError for other shapes, IndexError for indices out of range.

    Sources: Sharp, Crane 2020, You Can Find Geodesic Paths in Triangle Meshes by Just Flipping Edges; Crane et al.
    2013, Geodesics in Heat.

    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]  # area 1
    >>> geodesic_label_errors(square, [0, 1, 2, 3], [0, 2, 2, 1])
    tensor([0.0000, 1.0000, 0.0000, 1.4142], dtype=torch.float64)
    """
    return torch.from_numpy(geodesic_errors(mesh, predicted, indices("labels", labels)))
