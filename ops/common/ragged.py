"""Packed ragged batches: mesh b owns the rows ptr[b]:ptr[b+1]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_ptr, check_rank, check_tensor


def row_lengths(ptr: Tensor, lengths: Sequence[int] | None = None) -> list[int]:
    """Return the rows of each mesh as Python integers. Without `lengths` this reads `ptr` back and waits for a GPU."""
    return list(lengths) if lengths is not None else torch.diff(ptr).tolist()


def row_offsets(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each mesh, which is the sum of the lengths before it.

    Raises TypeError for lengths that are not integers.

    >>> row_offsets([3, 0, 2])
    [0, 3, 3]
    """
    if not all(hasattr(length, "__index__") for length in lengths):
        raise TypeError(f"lengths should be integers, got {lengths!r}")
    return list(accumulate(lengths, initial=0))[:-1]


def cat_shifted(indices: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    """Concatenate index arrays, to each of which its offset is added. The additions are one kernel launch on a GPU.

    >>> cat_shifted([torch.tensor([0, 1]), torch.tensor([0])], [0, 2])
    tensor([0, 1, 2])
    """
    return torch.cat(torch._foreach_add(list(indices), list(offsets)))


def segment_mean(x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Return the weighted mean of x over each mesh. It is differentiable in x and the weights.

    Args:
        x: (V, C) floating point
        weights: (V,) floating point, at least 0
        ptr: (B+1,) int32 or int64, the extents of the meshes, ascending from 0 to V
        lengths: the rows of each mesh as Python integers; they save a read-back of `ptr` if B > 1

    Returns:
        (B, C) in the dtype of x. A mesh without weight gives zeros.

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices or extents.

    >>> x = torch.tensor([[1.0], [3.0], [5.0]])
    >>> segment_mean(x, torch.ones(3), torch.tensor([0, 2, 3]))
    tensor([[2.],
            [5.]])
    """
    check_rank("x", x, "(V, C)", 2)
    check_tensor("weights", weights, (len(x),), x.device)
    ptr = check_ptr(ptr, len(x), lengths, x.device)
    weights = weights.to(x.dtype)
    if len(ptr) <= 2:
        meshes = len(ptr) - 1
        total, weight = (weights @ x)[None][:meshes], weights.sum()[None][:meshes]
    else:
        sizes = row_lengths(ptr, lengths)
        pieces = list(zip(torch.split(weights, sizes), torch.split(x, sizes), strict=True))
        total = torch.stack([w @ rows for w, rows in pieces])
        weight = torch.stack([w.sum() for w, _ in pieces])
    # `where` passes a gradient to both branches, so the division must be finite in both.
    return total / torch.where(weight > 0, weight, 1.0)[:, None]
