"""One CUDA graph for one batch, to compare with graphs that serve batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from diffnet.ops.common.cuda_graph import capturable_stream, record

T = TypeVar("T")


class CapturedStep(Generic[T]):
    """A step that runs normally on its first call and as a replayed CUDA graph on every later call.

    step: a function that reads and writes tensors that stay in place, and never waits for the GPU. It may call backward
        and an optimizer made with `capturable=True` whose learning rate is a tensor. Random numbers differ between
        replays, as they do between calls.
    pool: `torch.cuda.graph_pool_handle()`. Steps that never run at the same time can share the memory of one pool.

    Replays return the same tensors each time, with new values. Use or copy them before the next call.
    """

    def __init__(self, step: Callable[[], T], pool: Any = None) -> None:
        self._step = step
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    def __call__(self) -> T:
        if self._graph is None:
            return self._record()
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _record(self) -> T:
        with capturable_stream():
            # This run compiles kernels and creates state that lasts, such as an optimizer's.
            result = self._step()
            # PyTorch can't return cached memory to the GPU during a recording, so the memory of this run goes first.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._graph, self._result = record(self._step, self._pool)
        return result
