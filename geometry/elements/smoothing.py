"""Labels with smooth boundaries, by a conditional random field on the elements of a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import ElementsAt, border_lengths, element_areas
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh

_MAX_STEPS = 100  # at most
MAX_WEIGHT = 1e30  # beyond, products overflow single precision
_MAX_CHANGE = 1e-3  # of probabilities, at which the steps end


def smooth_boundaries(
    mesh: Mesh, probabilities: Any, *, at: ElementsAt = "vertices", weight: float = 1.0
) -> NDArray[np.int64]:
    """Labels that follow probabilities and have short boundaries.

    They approximately minimize the energy Σᵢ aᵢ (−log pᵢ(lᵢ)) + weight · Σᵢⱼ bᵢⱼ [lᵢ ≠ lⱼ]. The area aᵢ of an element
    and the length bᵢⱼ of the border between two elements are divided by their means over the mesh, so the energy
    doesn't depend on the size of the mesh. The mean-field approximation of this conditional random field is iterated
    from the probabilities until it changes by less than 0.001.

    probabilities: (N, C) numbers ≥ 0, of each class at each element
    at: the elements: "vertices", "faces" (triangles, or the faces of the file) or "edges"
    weight: from 0 to 1e30. 0 gives the most likely labels. Larger values give shorter boundaries.

    Returns (N,) int64. The result is the same in every run. Raises MeshError for a point cloud, ValueError for another
    shape, for probabilities that are negative or not finite, and for a weight that is out of range.

    Source: Krähenbühl and Koltun 2011, Efficient inference in fully connected CRFs with Gaussian edge potentials; here
    only neighbors are connected.

    >>> from diffnet.geometry import load_mesh
    >>> strip = load_mesh(([[i // 2, i % 2, 0] for i in range(8)], [[i, i + 1, i + 2] for i in range(6)]))
    >>> likely = np.array([0.9, 0.9, 0.4, 0.9, 0.9, 0.9])
    >>> smooth_boundaries(strip, np.stack([likely, 1 - likely], axis=1), at="faces").tolist()
    [0, 0, 0, 0, 0, 0]
    """
    from scipy.special import softmax  # the command line loads this module

    p = np.asarray(probabilities, np.float64)
    if mesh.is_point_cloud:
        raise MeshError(f"{mesh.name}: a point cloud has no boundaries to smooth")
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight should be from 0 to {MAX_WEIGHT:g}, got {weight}")
    per_polygon = at == "faces" and len(p) == mesh.polygon_count
    areas = element_areas(mesh, at, per_polygon)
    if p.ndim != 2 or len(p) != len(areas) or p.shape[1] == 0:
        raise ValueError(
            f"probabilities should have shape ({len(areas)}, C), one row for each of {at}, shape is {p.shape}"
        )
    if not (np.isfinite(p).all() and (p >= 0).all()):
        raise ValueError("probabilities should be finite and at least 0")
    borders = border_lengths(mesh, at, per_polygon)
    costs = (-np.log(np.maximum(p, 1e-12)) * (areas / max(areas.mean(), 1e-300))[:, None]).astype(np.float32)
    strength = weight * borders / max(float(borders.data.mean()) if borders.nnz else 0.0, 1e-300)
    strength = strength.astype(np.float32)  # twice as fast as float64
    shares = softmax(-costs, axis=1)
    for _ in range(_MAX_STEPS):
        # Neighbors attract with their shares. Half of each step keeps regions from swapping their labels in turn.
        new = (shares + softmax(strength @ shares - costs, axis=1)) / 2
        change, shares = float(np.abs(new - shares).max(initial=0.0)), new
        if change < _MAX_CHANGE:
            break
    # An element without area and neighbors has equal shares.
    lone = (areas == 0) & (np.diff(strength.indptr) == 0)
    labels: NDArray[np.int64] = np.where(lone, p.argmax(axis=1), shares.argmax(axis=1)).astype(np.int64)
    return labels
