"""CUDA graphs of functions that are called many times."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class NotCapturable(RuntimeError):
    """A computation can't be recorded as a CUDA graph. The message says why."""


def is_recorded() -> bool:
    """Return whether a CUDA graph is being recorded on the current stream."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


@contextmanager
def capturable_stream(device: torch.device | None = None) -> Iterator[None]:
    """Run the block on a stream that a CUDA graph can be recorded on.

    That is the current stream, or a side stream if the current stream is the default one, which can't be recorded.
    """
    current = torch.cuda.current_stream(device)
    is_default = current == torch.cuda.default_stream(device)
    stream = _side_stream(current.device) if is_default else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device. Graphs can share the memory of a pool only if they are recorded on the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(function: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the kernels that `function` launches as a CUDA graph. Recording runs none of them.

    Call it inside `capturable_stream`, after calling `function` there once: the first call compiles kernels and sets
    up libraries, which can't be recorded.

    pool: `torch.cuda.graph_pool_handle()`, to share memory with other graphs

    Returns the graph and the recorded result, which each replay writes anew. Other threads may use the GPU meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    pool = pool or torch.cuda.graph_pool_handle()
    with _no_garbage_collection():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        with _memory_returned_if_refused(graph, pool):
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # CUDA can't end a recording that it refused; its first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
    return graph, result


@contextmanager
def _memory_returned_if_refused(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """End the use of the pool by a recording that CUDA refused.

    PyTorch 2.11 takes such a recording for one that still runs, and `torch.cuda.empty_cache` does nothing until the
    process ends (https://github.com/pytorch/pytorch/pull/180395). Up to 2.13, the pool's memory stays reserved
    (https://github.com/pytorch/pytorch/pull/190348).
    """
    try:
        yield
    except BaseException:
        try:
            graph.pool()
        except RuntimeError:  # PyTorch has no complete graph, so it doesn't free the pool itself
            device = torch.cuda.current_device()
            with suppress(RuntimeError):  # raised by newer versions, which have ended it
                torch._C._cuda_endAllocateToPool(device, pool)
            if torch.__version__ < "2.14":
                torch._C._cuda_releasePool(device, pool)
        raise


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector from running. It may delete another graph or an event, which would end a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def forget_recording(device: torch.device) -> None:
    """Let the device's random generator leave a recording that CUDA refused. Graphs recorded before should be dropped.

    PyTorch leaves the generator in the state of a recording, in which every draw outside of a graph is an error.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())


def replayed(function: Callable[[Tensor], T], example: Tensor) -> Callable[[Tensor], T]:
    """A function of tensors of one shape as a CUDA graph, if the example is on a GPU. Each call overwrites the result.

    Launching a hundred small kernels from Python takes longer than the kernels themselves. A graph launches them at
    once. The first call runs the function as it is, and records it while the GPU works.

    The function is returned unchanged on the CPU, and while other threads run: during a recording, CUDA lets no other
    thread wait for the device.
    """
    if not example.is_cuda or threading.active_count() > 1:
        return function
    buffer = torch.empty_like(example)
    recorded: list[tuple[torch.cuda.CUDAGraph, T]] = []

    def replay(new: Tensor) -> T:
        buffer.copy_(new)
        if recorded:
            recorded[0][0].replay()
            return recorded[0][1]
        with capturable_stream(buffer.device):
            first = function(buffer)
            recorded.append(record(lambda: function(buffer)))
        return first

    return replay
