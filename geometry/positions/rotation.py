"""Rotations of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, check_lengths, check_tensor


def random_rotation(
    verts: Tensor,
    lengths: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    *,
    axis: int | None = None,
) -> Tensor:
    """Rotate each mesh about the origin by its own random rotation, uniform over all rotations.

    verts: (V, 3) floating point, on any device; several meshes are packed
    lengths: the number of vertices of each mesh, such as `operators.lengths`. None means one mesh.
    generator: draws the rotations; None means the global generator of the CPU. With a generator of the CPU, equal seeds
        give equal rotations on all devices.
    axis: rotate about this coordinate axis only, see `random_rotations`

    Returns new positions of the same shape, dtype and device. It is differentiable. To rotate positions and normals
    alike, use `geometry.random_rotations` and `geometry.rotate`.

    Raises TypeError for verts that are no floating-point tensor, ValueError for another shape and for lengths that are
    negative or don't add up to V.

    >>> verts = torch.eye(3)
    >>> turned = random_rotation(verts, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(turned @ turned.T, verts, atol=1e-6)  # lengths and angles stay
    True
    """
    check_tensor("verts", verts, ("V", 3))
    counts = check_lengths(lengths, "verts", len(verts))
    rotations = random_rotations(len(counts), generator, torch.promote_types(verts.dtype, torch.float32), axis=axis)
    ptr = torch.tensor(list(accumulate(counts, initial=0)))
    positions = rotate(verts, rotations.to(verts.device), ptr.to(verts.device, non_blocking=True))
    return positions.to(verts.dtype)


def random_rotations(
    count: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32, *, axis: int | None = None
) -> Tensor:
    """Draw rotations (count, 3, 3), uniform over all rotations, on the device of the generator.

    generator: None means the global generator of the CPU
    axis: 0, 1 or 2 for rotations about the x, y or z axis only, uniform over all angles. None for all rotations.

    Raises ValueError for another axis and a negative count, TypeError for a count that is no integer.

    Source: Mezzadri 2007, How to generate random matrices from the classical compact groups.
    """
    check_count("count", count, 0)
    device = torch.device("cpu") if generator is None else generator.device
    if axis is not None:
        return _about(axis, 2 * math.pi * torch.rand(count, generator=generator, dtype=dtype, device=device))
    # The Q of a Gaussian matrix is uniform over the orthogonal group once the signs of R's diagonal are removed.
    q, r = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator, dtype=dtype, device=device))
    orthogonal: Tensor = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    return orthogonal * torch.linalg.det(orthogonal)[:, None, None]


def _about(axis: int, angles: Tensor) -> Tensor:
    """Rotations (N, 3, 3) about a coordinate axis by angles (N,)."""
    if axis not in (0, 1, 2):
        raise ValueError(f"axis should be 0, 1, 2 or None, got {axis!r}")
    first, second = (axis + 1) % 3, (axis + 2) % 3
    rotations = angles.new_zeros(len(angles), 3, 3)
    rotations[:, axis, axis] = 1
    rotations[:, first, first] = rotations[:, second, second] = angles.cos()
    rotations[:, first, second] = angles.sin()
    rotations[:, second, first] = -angles.sin()
    return rotations


def rotate(positions: Tensor, rotations: Tensor, ptr: Tensor) -> Tensor:
    """Rotate each mesh about the origin.

    positions: (V, 3), packed; or other vectors at the vertices, such as normals
    rotations: (B, 3, 3), see `random_rotations`
    ptr: (B+1,), the extents of the meshes, such as `operators.ptr`

    Returns (V, 3): each row times the rotation of its mesh. All tensors are on one device.

    >>> quarter = torch.tensor([[[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]]])
    >>> rotate(torch.tensor([[1.0, 0, 0], [0, 0, 1]]), quarter, torch.tensor([0, 2]))
    tensor([[0., 1., 0.],
            [0., 0., 1.]])
    """
    mesh = torch.searchsorted(ptr[1:], torch.arange(len(positions), device=ptr.device), right=True)
    return (positions[:, :, None] * rotations[mesh]).sum(1)
