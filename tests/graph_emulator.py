"""CUDA graphs without a GPU: a replay calls the recorded function again, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EmulatedGraph:
    """Stands in for a CUDA graph.

    A backward graph reads what its own forward graph has left in memory that all graphs of a pool share. If another
    forward graph of the pool has been replayed since, that is an error here.
    """

    replays = 0

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self.function, self.pool = function, pool
        self.forward = pool.recorded if function.__name__ == "backward" else self
        pool.recorded = self

    def replay(self) -> None:
        if self.forward is self:
            self.pool.replayed = self
        assert self.pool.replayed is self.forward, "the memory of the forward graph is lost"
        EmulatedGraph.replays += 1
        # A CUDA graph knows nothing of autograd, so nothing that surrounds the call may change what happens inside.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
            self.function()
