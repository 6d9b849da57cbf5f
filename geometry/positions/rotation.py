"""Random rotations of positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_rank


def random_rotation(
    verts: Tensor, lengths: Sequence[int] | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Rotate each mesh about the origin by its own random rotation, uniform over all rotations.

    verts: (V, 3) floating point, on any device; several meshes are packed
    lengths: the number of vertices of each mesh, such as `operators.lengths`. None means one mesh.
    generator: draws the rotations; None means the global generator of the CPU. With a generator of the CPU, equal seeds
        give equal rotations on all devices.

    Returns new positions of the same shape, dtype and device. It is differentiable. To rotate positions and normals
    alike, use `geometry.random_rotations` and `geometry.rotate`.

    Raises TypeError for verts that are no floating-point tensor, ValueError for another shape and for lengths that
    don't add up to V.

    >>> verts = torch.eye(3)
    >>> turned = random_rotation(verts, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(turned @ turned.T, verts, atol=1e-6)  # lengths and angles stay
    True
    """
    check_rank("verts", verts, "(V, 3)", 2)
    if verts.shape[1] != 3:
        raise ValueError(f"verts should have shape (V, 3), shape is {tuple(verts.shape)}")
    counts = [len(verts)] if lengths is None else list(lengths)
    if sum(counts) != len(verts):
        raise ValueError(f"lengths should add up to the {len(verts)} rows of verts, got {counts}")
    rotations = random_rotations(len(counts), generator, torch.promote_types(verts.dtype, torch.float32))
    ptr = torch.tensor(list(accumulate(counts, initial=0)))
    turned = rotate(verts, rotations.to(verts.device), ptr.to(verts.device, non_blocking=True))
    return turned.to(verts.dtype)


def random_rotations(
    count: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw rotations (count, 3, 3), uniform over all rotations, on the device of the generator.

    generator: None means the global generator of the CPU

    Source: Mezzadri 2007, How to generate random matrices from the classical compact groups.
    """
    # The Q of a Gaussian matrix is uniform over the orthogonal group once the signs of R's diagonal are removed.
    device = torch.device("cpu") if generator is None else generator.device
    q, r = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator, dtype=dtype, device=device))
    orthogonal: Tensor = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    rotations: Tensor = orthogonal * torch.linalg.det(orthogonal)[:, None, None]
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
