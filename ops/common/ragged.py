"""Packed ragged batches: mesh b owns the rows ptr[b]:ptr[b+1]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def row_lengths(ptr: Tensor, lengths: Sequence[int] | None = None) -> list[int]:
    """Rows of each mesh as Python integers. Without `lengths` this reads `ptr` back, which waits for a GPU."""
    return list(lengths) if lengths is not None else torch.diff(ptr).tolist()


def row_offsets(lengths: Sequence[int]) -> list[int]:
    """The first row of each mesh: the sum of the lengths before it."""
    return list(accumulate(lengths, initial=0))[:-1]


def segment_mean(x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Weighted mean of x over each mesh.

    x (V, C), weights (V,) ≥ 0, ptr (B+1,) int → (B, C). A mesh with no weight gives zeros.
    """
    weights = weights.to(x.dtype)
    if len(ptr) == 2:
        total, weight = (weights @ x)[None], weights.sum()[None]
    else:
        sizes = row_lengths(ptr, lengths)
        pieces = list(zip(torch.split(weights, sizes), torch.split(x, sizes), strict=True))
        total = torch.stack([w @ rows for w, rows in pieces])
        weight = torch.stack([w.sum() for w, _ in pieces])
    # The untaken branch of a where still passes a gradient, so the division itself must be safe.
    return total / torch.where(weight > 0, weight, 1.0)[:, None]
