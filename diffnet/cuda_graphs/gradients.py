"""Buffers for the gradients of parameters, which lie one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import Arena
from diffnet.cuda_graphs.sizes import BatchSize

Groups = tuple[tuple[int, ...], ...]  # the numbers of parameters, in one tuple for each dtype

ALIGNED = 8  # elements. Kernels of optimizers read several at once where a tensor starts at a multiple of this.


def groups_of(parameters: Sequence[Tensor], numbers: Iterable[int]) -> Groups:
    """Group parameters by dtype. Those that would shift their successors off the alignment come last."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in sorted(numbers, key=lambda i: parameters[i].numel() % ALIGNED != 0):
        groups.setdefault(parameters[i].dtype, []).append(i)
    return tuple(tuple(group) for group in groups.values())


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Split a tensor (N,) into tensors of these shapes. They share its memory."""
    # "Unsafe" means that each part has a version of its own: autograd does not see that they share memory. They don't
    # overlap, so that is right. It takes a third of the time of a view for each part.
    parts = flat.unsafe_split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def gradient_buffers(
    arena: Arena, shapes: Sequence[Sequence[torch.Size]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """A buffer (N,) for each group of parameters with these shapes. Recordings of all sizes share them."""
    counts = [sum(shape.numel() for shape in group) for group in shapes]
    return [
        arena.take("gradients", BatchSize(0, 0), lambda size, count=count: (count,), dtype)  # type: ignore[misc]
        for count, dtype in zip(counts, dtypes, strict=True)
    ]
