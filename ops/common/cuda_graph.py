"""CUDA graphs of functions that are called again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


def replayed(function: Callable[[Tensor], Tensor], example: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of tensors of one shape, as a CUDA graph where they are on a GPU: Python takes longer to launch a
    hundred small kernels than they take. Its result is overwritten by the next call.

    It stays as it is beside other threads: while one captures a graph, CUDA lets no other wait for the device.
    """
    if not example.is_cuda or threading.active_count() > 1:
        return function
    given, graph = example.clone(), torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(example.device)
    is_default = current == torch.cuda.default_stream(example.device)  # on which nothing can be captured
    stream = torch.cuda.Stream(example.device) if is_default else current  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        function(given)  # libraries set up at a first call what can't be captured
        graph.capture_begin(capture_error_mode="thread_local")
        result = function(given)
        graph.capture_end()
    current.wait_stream(stream)

    def replay(new: Tensor) -> Tensor:
        given.copy_(new)
        graph.replay()
        return result

    return replay
