"""Steps as CUDA graphs: what a step launches is recorded once, and then launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture(step: Callable[[], T], *, warmup: int = 3, pool: Any = None) -> Callable[[], T]:
    """Run a step `warmup` times, record it, and return a function that replays it.

    step: reads and writes tensors that stay where they are, and never waits for the GPU. It may call backward, and an
        optimizer made with `capturable=True` whose learning rate is a tensor.
    warmup: runs that count like any other. At least one, in which kernels are compiled and memory is found.
    pool: `torch.cuda.graph_pool_handle()`, for steps that share their memory because they are never replayed at once

    What the function returns is what the recorded step returned: the same tensors, with each replay's values in them.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()

    def replay() -> T:
        graph.replay()
        return result

    return replay
