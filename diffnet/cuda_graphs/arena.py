"""Memory at fixed addresses, which CUDA graphs of several sizes read and write in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffnet.cuda_graphs.sizes import BatchSize

Shape = Callable[[BatchSize], Sequence[int]]


class Arena:
    """Named buffers. A smaller batch uses the front of a buffer, so all sizes share one piece of memory.

    capacity: the largest batch that the buffers hold
    """

    def __init__(self, device: torch.device, capacity: BatchSize) -> None:
        self.device, self.capacity = device, capacity
        self._flat: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def take(self, name: str, size: BatchSize, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The buffer of this name for batches of this size. A new buffer holds zeros.

        shape: the shape of the buffer, given the size of the batch
        """
        needed, dims = math.prod(shape(self.capacity)), tuple(shape(size))
        key = name, dtype, needed
        if key not in self._flat:
            with torch.inference_mode(False):  # a buffer of inference mode could not be written in training
                self._flat[key] = torch.zeros(needed, dtype=dtype, device=self.device)
        return self._flat[key][: math.prod(dims)].view(dims)
