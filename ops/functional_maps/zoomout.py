"""Refinement of functional maps by adding eigenfunctions step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, check_tensor
from diffnet.ops.functional_maps.conversion import check_basis, functional_map_from_points, point_map


def zoomout(
    c: Tensor, evecs_a: Tensor, evecs_b: Tensor, mass_b: Tensor, *, k: int | None = None, step: int = 1
) -> Tensor:
    """Refine a functional map (ZoomOut): turn it into a map of points and back, each time with more eigenfunctions.

    The last step takes as many eigenfunctions as are left. Equal sizes of c and k refine once at this size.

    Args:
        c: (K_b, K_a) floating point, a map from functions on a to functions on b
        evecs_a, evecs_b: (V_a, at least k) and (V_b, at least k) floating point
        mass_b: (V_b,) floating point
        k: the number of eigenfunctions of the result, at least those of c. By default all that both shapes have.
        step: how many eigenfunctions to add at a time

    Returns:
        (k, k) in the promoted dtype. It has no gradient.

    Raises:
        TypeError: for arguments of other types.
        ValueError: for other shapes and devices, and a k or step out of range.

    Source: Melzi et al. 2019, ZoomOut: Spectral Upsampling for Efficient Shape Correspondence.

    >>> zoomout(torch.eye(1), torch.eye(3), torch.eye(3), torch.ones(3)).shape
    torch.Size([3, 3])
    """
    check_basis(c, evecs_a, evecs_b)
    check_tensor("mass_b", mass_b, (len(evecs_b),), c.device)
    most, step = min(evecs_a.shape[1], evecs_b.shape[1]), check_count("step", step, 1)
    k = most if k is None else check_count("k", k, 1)
    if not max(c.shape) <= k <= most:
        raise ValueError(f"k should be from {max(c.shape)}, as in c, to {most} eigenvectors, got {k}")
    with torch.no_grad():
        k_b, k_a = c.shape
        while True:
            matches = point_map(c, evecs_a, evecs_b)
            k_a, k_b = min(k_a + step, k), min(k_b + step, k)
            c = functional_map_from_points(matches, evecs_a[:, :k_a], evecs_b[:, :k_b], mass_b)
            if k_a == k_b == k:
                return c
