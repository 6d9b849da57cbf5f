"""The memory pool of CUDA graphs, used while no graph is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """Take the memory of this thread from a pool. The pool must hold a graph. Nothing happens on the CPU.

    device: the current device
    """
    if device.type != "cuda":
        yield
        return
    handle: Any = SimpleNamespace(id=pool)  # in place of a `MemPool`, which would own the memory
    # Backward passes would run in other threads, whose memory comes from elsewhere.
    with torch.cuda.use_mem_pool(handle), torch.autograd.set_multithreading_enabled(False):
        yield


def live_blocks(pool: Any, device: torch.device) -> frozenset[int]:
    """The addresses of the tensors in a pool."""
    if device.type != "cuda":
        return frozenset()
    segments = torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
    blocks = (block for segment in segments for block in segment["blocks"])
    return frozenset(block["address"] for block in blocks if block["state"] == "active_allocated")
