"""The axes of a shape, which turn with it."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_tensor


def principal_axes(positions: Tensor, mass: Tensor) -> Tensor:
    """The axes of largest, second and least variance of a shape, with signs, so that they turn with the shape.

    positions: (V, 3) floating point
    mass: (V,) the areas of the vertices

    Returns the axes (3, 3), one in each row, a right-handed system. `(positions − center) @ axes.T` is the shape in
    these axes. With p_i the coordinates around the center, the first axis has E[p_1 |p|²] ≥ 0 and the third one
    E[p_3³] ≥ 0.

    If two variances are about equal, small changes of the shape may exchange their axes. If one of the expectations is
    about 0, they may turn the axes by 180°.

    Raises TypeError or ValueError for other arguments.

    >>> corners = torch.tensor([[0.0, 4, 0], [0, -3, 0], [0, -1, 0], [2, 0, 0], [-2, 0, 0], [0, 0, 1], [0, 0, -1]])
    >>> principal_axes(corners, torch.ones(7))
    tensor([[ 0.,  1.,  0.],
            [-1.,  0.,  0.],
            [ 0.,  0.,  1.]])
    """
    check_tensor("positions", positions, ("V", 3))
    check_tensor("mass", mass, (len(positions),), positions.device)
    centered = positions.double() - center_of(positions, mass).double()
    weights = mass.double()
    _, axes = torch.linalg.eigh(centered.mT @ (weights[:, None] * centered))
    first, _, third = axes.mT.flip(0)
    first = first * _sign(weights @ ((centered @ first) * centered.square().sum(1)))
    third = third * _sign(weights @ (centered @ third) ** 3)
    return torch.stack([first, torch.linalg.cross(third, first), third]).to(positions.dtype)


def is_common_orientation(axes: Tensor) -> bool:
    """Whether shapes stand and look the same way, given the `principal_axes` (N, 3, 3) of each.

    The mean of the first axes must have a length of at least 0.8, that of the others of at least 0.4, and all of at
    least √(8/N). Random orientations give shorter means: the mean of N random directions in a plane is longer than
    √(8/N) with probability exp(−8) (Rayleigh test). If half of the shapes lie and the others stand, the first length is
    0.7. Poses turn the second and third axes. For posed people who all face one way, the means of these axes have
    lengths of 0.45 to 0.54.
    """
    lengths = axes.mean(0).norm(dim=1)
    return bool((lengths >= lengths.new_tensor([0.8, 0.4, 0.4]).clamp(min=(8 / len(axes)) ** 0.5)).all())


def shared_axes(axes: Tensor, about: Tensor | None = None) -> Tensor:
    """The mean of each principal axis over shapes, where it has about the same direction in all of them: (3, 3).

    axes: the `principal_axes` (N, 3, 3) of each shape
    about: an axis (3,) of length 1, about which the shapes are turned at random

    The mean of (a · d)² over the axes a must be at least 0.8 for a direction d, and at least 1/3 + 1.35/√N. One set of
    random orientations in 1,000 reaches the latter (by simulation). Otherwise, the row is zeros. Signs of symmetric
    shapes, such as jaws, are random. If they differ, or the mean is shorter than 0.8 or √(8/N), the row is d / 2.
    """
    found, count = torch.zeros_like(axes[0]), len(axes)
    for row, own in zip(found, axes.unbind(1), strict=True):
        moments, mean = own.mT @ own / count, own.mean(0)
        if about is not None:
            along, outer = about @ moments @ about, torch.outer(about, about)
            moments, mean = along * outer + (1 - along) / 2 * (torch.eye(3).to(outer) - outer), outer @ mean
        values, directions = torch.linalg.eigh(moments)
        if values[-1] >= max(0.8, 1 / 3 + 1.35 / count**0.5):
            has_sign = mean.norm() >= max(0.8, (8 / count) ** 0.5) and bool((own @ mean > 0).all())
            row[:] = mean if has_sign else directions[:, -1] / 2
    return found


def center_of(positions: Tensor, mass: Tensor) -> Tensor:
    """The mean (3,) of the positions (V, 3), weighted by the areas (V,) of the vertices."""
    return (mass.double() @ positions.double() / mass.double().sum()).to(positions.dtype)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0)
