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
    take `errors.nanmean()` if there are any. Errors don't depend on the scale of the mesh. For the kinds of distances
    and the errors raised, see `geodesic_errors`.

    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]]  # area 1
    >>> geodesic_label_errors(square, [0, 1, 2, 3], [0, 2, 2, 1])
    tensor([0.0000, 1.0000, 0.0000, 1.4142], dtype=torch.float64)
    """
    return torch.from_numpy(geodesic_errors(mesh, predicted, indices("labels", labels)))
