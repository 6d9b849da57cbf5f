"""CUDA graphs that share memory and therefore run one after the other."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import torch

from diffnet.cuda_graphs.buffers import Arena
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.ops.common.cuda_graph import NotCapturable, capturable_stream, forget_recording, record

T = TypeVar("T")

MAX_GRAPHS = 64  # an executable graph of a training step takes a few megabytes
# How many first calls may leave tensors in the memory of the graphs. For example, cuBLAS keeps a workspace.
MAX_LEAKS = 1


class Graph(Protocol):
    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], Any], Any], Graph]


def record_graph(function: Callable[[], Any], pool: Any) -> Graph:
    """Record a function as a CUDA graph."""
    return record(function, pool)[0]


class Lane(Generic[T]):
    """Graphs of batches of several sizes, with the buffers that they read and write.

    All graphs use the same memory. So the results of one must be copied before the next one is replayed, and a forward
    graph must be followed by its own backward graph.

    device: a GPU
    recorder: records a function. Tests on the CPU pass one that calls the function again.
    """

    def __init__(self, device: torch.device, recorder: Recorder = record_graph) -> None:
        self.device = device
        self.busy = False
        self._recorder = recorder
        self._graphs: OrderedDict[Hashable, T] = OrderedDict()
        self.arena = Arena(device, BatchSize(0, 0))
        self._pool: Any = None
        self._anchor: Graph | None = None
        self._leaks = 0
        self._used_on: tuple[int, torch.cuda.Stream] | None = None

    def get(self, key: Hashable) -> T | None:
        """Return the graphs of this key, which becomes the most recently used one. None if there are none."""
        graphs = self._graphs.get(key)
        if graphs is not None:
            self._graphs.move_to_end(key)
        return graphs

    def recorded(self) -> list[Any]:
        """The keys of everything that is kept."""
        return list(self._graphs)

    def keep(self, key: Hashable, graphs: T) -> None:
        """Keep graphs under a key. The least recently used ones are dropped when there are too many."""
        self._graphs[key] = graphs
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def make_room(self, size: BatchSize) -> None:
        """Let the buffers hold batches of this size.

        Larger buffers lie elsewhere, so all graphs are dropped first. They are recorded again when they are needed. The
        largest size is then recorded first, and the others fit into its memory.
        """
        if not size.fits_into(self.arena.capacity):
            capacity = size.union(self.arena.capacity)
            self.clear()
            self.arena = Arena(self.device, capacity)

    def clear(self) -> None:
        """Drop all graphs and buffers, and return their memory."""
        self._graphs.clear()
        self.arena = Arena(self.device, BatchSize(0, 0))
        self._pool = self._anchor = None
        self._free_default_memory()

    def record(self, functions: Sequence[Callable[[], Any]]) -> list[Graph]:
        """Record functions that are replayed one after the other. Call it inside `stream`.

        Each function must have been called there once: the first call compiles kernels and sets up libraries, which
        can't be recorded.

        Raises NotCapturable if CUDA refuses a part of a function.
        """
        self._open_pool()
        try:
            return [self._recorder(function, self._pool) for function in functions]
        except (torch.OutOfMemoryError, NotCapturable):
            raise
        except RuntimeError as error:  # such as a value that the network reads back from the GPU
            # The random generator gets another state, which graphs of before don't use.
            self._graphs.clear()
            self._pool = self._anchor = None
            if self.device.type == "cuda":
                forget_recording(self.device)
            reason = str(error).splitlines()[0]
            if "capturing" in reason:
                reason += "; CUDA says this when a value is read back from the GPU, as by .item()"
            raise NotCapturable(f"it can't be recorded ({reason})") from error

    def _free_default_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _open_pool(self) -> None:
        """Have a pool. PyTorch closes it for good when its last graph is gone, so the lane keeps a small one in it."""
        self._free_default_memory()  # which PyTorch can't do during a recording
        if self._pool is not None:
            return
        if self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._anchor = self._recorder(torch.zeros(1, device=self.device).zero_, self._pool)
        else:
            self._pool = SimpleNamespace()

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Take memory from the pool of the graphs while none of them runs. Call it inside `stream`.

        The first call of a function then needs no memory besides that of the graphs. The block should delete its
        tensors, because a replay overwrites them. If some stay, all graphs are dropped. If this happens again, later
        blocks use the default memory. A lane without graphs uses the default memory, too.
        """
        if self._pool is None or not self._graphs or self._leaks > MAX_LEAKS:
            yield
            return
        before = live_blocks(self._pool, self.device)
        try:
            with allocating_in(self._pool, self.device):
                yield
        except BaseException:
            self._graphs.clear()  # the call may have left tensors
            raise
        if live_blocks(self._pool, self.device) <= before:
            return
        gc.collect()  # some tensors may wait for the garbage collector
        if not live_blocks(self._pool, self.device) <= before:
            self._leaks += 1
            self._graphs.clear()  # graphs that are recorded from now on avoid the tensors

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Let the pool of the graphs grow by the memory that the block takes. Call it inside `stream`."""
        self._open_pool()
        with allocating_in(self._pool, self.device):
            yield

    def follow(self) -> None:
        """Let the current stream wait for the stream on which the graphs ran before, such as that of another thread."""
        if self.device.type != "cuda":
            return
        number = torch._C._cuda_getCurrentRawStream(self.device.index)  # the stream itself takes longer to find
        if self._used_on is None or self._used_on[0] != number:
            current = torch.cuda.current_stream(self.device)
            if self._used_on is not None:
                current.wait_stream(self._used_on[1])
            self._used_on = number, current

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream on which functions are called and recorded."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), capturable_stream(self.device):
            yield


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
