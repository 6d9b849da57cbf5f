"""The weighted mean of each mesh in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.ragged import row_lengths


def weighted_sums(
    x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The sums over each mesh of weights · x, (B, C), and of the weights, (B,), in the dtype of x."""
    weights = weights.to(x.dtype)
    if len(ptr) <= 2:
        meshes = len(ptr) - 1
        return (weights @ x)[None][:meshes], weights.sum()[None][:meshes]
    sizes = row_lengths(ptr, lengths)
    pieces = list(zip(torch.split(weights, sizes), torch.split(x, sizes), strict=True))
    return torch.stack([w @ rows for w, rows in pieces]), torch.stack([w.sum() for w, _ in pieces])
