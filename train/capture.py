"""Steps as CUDA graphs: what a step launches is recorded once, and from then on launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class CapturedStep(Generic[T]):
    """A step that runs as it is when it is first called, and as a replayed CUDA graph whenever it is called again.

    step: reads and writes tensors that stay where they are, and never waits for the GPU. It may call backward, and an
        optimizer made with `capturable=True` whose learning rate is a tensor. Random numbers differ between replays as
        they do between calls.
    pool: `torch.cuda.graph_pool_handle()`, for steps that may share memory because they never run at once

    Replays return the same tensors each time, with new values in them: use or copy them before the next call.
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
        # A run beforehand compiles kernels and makes what lasts from step to step; recording by itself runs nothing.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self._pool):
            self._result = self._step()
        return result
