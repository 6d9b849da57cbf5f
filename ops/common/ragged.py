"""Packed ragged batches: mesh b owns the rows ptr[b]:ptr[b+1]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diffnet.ops.common.cuda_graph import NotCapturable, is_recorded


def row_lengths(ptr: Tensor, lengths: Sequence[int] | None = None) -> list[int]:
    """Return the rows of each mesh as Python integers. Without `lengths` this reads `ptr` back and waits for a GPU."""
    if lengths is not None:
        return list(lengths)
    if ptr.is_cuda and is_recorded():  # CUDA would refuse to read back with an error that doesn't say what to do
        raise NotCapturable("plain PyTorch divides a batch of several meshes at sizes that it reads from the GPU")
    return torch.diff(ptr).tolist()


def row_offsets(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each mesh, which is the sum of the lengths before it.

    Raises TypeError for lengths that are not integers.

    >>> row_offsets([3, 0, 2])
    [0, 3, 3]
    """
    if not all(isinstance(length, int) or hasattr(length, "__index__") for length in lengths):
        raise TypeError(f"lengths should be integers, got {lengths!r}")
    return list(accumulate(lengths, initial=0))[:-1]


def cat_shifted(indices: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    """Add to each index array its offset, and concatenate them. The additions are one kernel launch on a GPU.

    >>> cat_shifted([torch.tensor([0, 1]), torch.tensor([0])], [0, 2])
    tensor([0, 1, 2])
    """
    return torch.cat(torch._foreach_add(list(indices), list(offsets)))
