"""Farthest point sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, check_finite, check_lengths, check_tensor


def farthest_points(
    positions: Tensor, count: int, lengths: Sequence[int] | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Choose points that are spread evenly over each mesh. Each next point is the farthest from those before it.

    Distances are straight lines in space. Ties go to the point with the lower number.

    positions: (V, N) floating point, on any device; several meshes are packed
    count: points per mesh, at least 1
    lengths: the number of vertices of each mesh, such as `operators.lengths`. None means one mesh.
    generator: draws the first point of each mesh. None begins at the point farthest from the mean of the mesh, so the
        result depends on the positions alone.

    Returns (B, count) int64, packed vertex indices. No point is chosen twice.

    Raises TypeError for positions that are no floating-point tensor. Raises ValueError for another shape, for lengths
    that don't add up to V, for a mesh with fewer points than `count`, and on the CPU for positions that aren't finite.

    Source: Eldar et al. 1997, The farthest point strategy for progressive image sampling.

    >>> farthest_points(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), 3)
    tensor([[3, 0, 2]])
    """
    check_tensor("positions", positions, ("V", "N"))
    check_count("count", count, 1)
    counts = check_lengths(lengths, "positions", len(positions))
    if min(counts, default=count) < count:
        raise ValueError(f"each mesh needs at least count = {count} points, lengths are {counts}")
    if not positions.shape[1]:
        raise ValueError(f"positions should have at least one column, shape is {tuple(positions.shape)}")
    check_finite("positions", positions)
    if not counts:
        return torch.empty(0, count, dtype=torch.int64, device=positions.device)
    x = positions.detach().to(torch.promote_types(positions.dtype, torch.float32))
    # One row per mesh: all meshes take a step at once. The places after the end of a mesh are never the farthest.
    rows = torch.nn.utils.rnn.pad_sequence(list(torch.split(x, counts)), batch_first=True)
    sizes = torch.tensor(counts, device=x.device)[:, None]
    # Squares of very large or small numbers overflow or underflow. Dividing by a power of 2 is exact.
    largest = rows.abs().amax((1, 2), keepdim=True)
    rows = rows / torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), 1)
    outside = torch.arange(rows.shape[1], device=x.device) >= sizes
    if generator is None:
        here = _squares(rows, rows.sum(1, keepdim=True) / sizes[..., None]).masked_fill_(outside, -1).argmax(1)
    else:
        shares = torch.rand(len(counts), generator=generator, device=generator.device, dtype=torch.float64)
        here = (shares.to(x.device) * sizes[:, 0]).long()
    distance = torch.full(rows.shape[:2], torch.inf, device=x.device, dtype=x.dtype)
    picks = [here]
    for _ in range(count - 1):
        # -1 marks the places that can't be chosen.
        outside.scatter_(1, here[:, None], True)
        newest = rows.gather(1, here[:, None, None].expand(-1, 1, rows.shape[2]))
        distance = torch.minimum(distance, _squares(rows, newest)).masked_fill_(outside, -1)
        here = distance.argmax(1)
        picks.append(here)
    starts = sizes.cumsum(0) - sizes
    return torch.stack(picks, 1) + starts


def _squares(rows: Tensor, center: Tensor) -> Tensor:
    return (rows - center).square().sum(2)
