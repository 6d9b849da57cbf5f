"""Launches of kernels: quick ones, compilation in several threads, and a message while it lasts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 3.0  # seconds of compilation after which a message says so
_COMPILED = 0.25  # seconds that only a launch takes that compiles its kernel
_LOG = logging.getLogger("diffnet")
_KNOWN_VERSIONS = ("3.6", "3.7")  # of Triton
_WIDE = 2**31  # integers from here on are 64 bits wide in a kernel
_ON_GPU = torch.cuda.is_available()  # tests compile for a GPU that isn't there


class _Compilation:
    """How long this process has compiled kernels, and the threads that do it ahead of a launch."""

    seconds = 0.0
    announced = False
    pool: ThreadPoolExecutor | None = None
    others: frozenset[int | None] = frozenset()  # threads that go on launching
    waiting: dict[Any, Future[Any]] = {}  # noqa: RUF012 - one compilation per process

    @classmethod
    def announce(cls) -> None:
        if not cls.announced:
            cls.announced = True
            _LOG.warning("compiling GPU kernels, once per machine; this takes several seconds")


class LaunchedKernel:
    """A kernel that is launched as `kernel[grid](…)`, as Triton's own.

    Triton searches for the compiled kernel in every launch and checks all arguments for it, which takes three times as
    long as `key`. Known versions of Triton are therefore asked once for each key.

    Attributes:
        kernel: Triton's kernel
        compiled: the compiled kernels that launches go to, by their key
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__name__ = kernel.__name__
        self.__doc__ = kernel.__doc__
        # Triton doesn't specialize arguments listed in SIZES. The values of all other integers are part of the key.
        self._sizes = [p.do_not_specialize and not p.is_constexpr for p in kernel.params]
        self._names = [p.name for p in kernel.params]
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if _Compilation.pool is not None and threading.get_ident() not in _Compilation.others:
                self._compile_ahead(_Compilation.pool, arguments, options)
                return
            key = self.key(arguments, options)
            compiled = self.compiled.get(key)
            if compiled is not None:
                # Constants are passed by position, too, as Triton's tutorial on fused softmax does.
                others = [options[name] for name in self._names[len(arguments) :]]
                compiled[(*grid, 1, 1)[:3]](*arguments, *others)
                return
            start = time.perf_counter()
            found = self.kernel[grid](*arguments, **options)
            if _takes_launches(self.kernel, found):
                self.compiled[key] = found
            seconds = time.perf_counter() - start
            if seconds > _COMPILED:
                _Compilation.seconds += seconds
                if _Compilation.seconds > _PATIENCE:
                    _Compilation.announce()

        return launch

    def key(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Return what decides which compiled kernel runs: two launches with the same key take the same one."""
        parts = [_device(), *options, *options.values()]
        for value, is_size in zip(arguments, self._sizes, strict=False):
            if is_size:
                parts.append(-_WIDE <= value < _WIDE)
            elif isinstance(value, Tensor):
                parts += (value.dtype, value.data_ptr() & 15 == 0)
            elif isinstance(value, tuple):
                for x in value:
                    parts += (x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else (x,)
            else:
                parts.append(float if isinstance(value, float) else value)
        return tuple(parts)

    def _compile_ahead(self, pool: ThreadPoolExecutor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = self.key(arguments, options)
        if (self, key) in _Compilation.waiting:
            return
        device = _device()

        def compile_it() -> None:
            if _ON_GPU:
                torch.cuda.set_device(device)
            self.kernel.run(*arguments, grid=(1,), warmup=True, **options)

        _Compilation.waiting[self, key] = pool.submit(compile_it)


def _takes_launches(kernel: Any, compiled: Any) -> bool:
    """Whether later launches may go to the compiled kernel.

    They may not where something replaces or observes Triton's launches, or where this version of Triton is unknown.
    """
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    return (
        _ON_GPU
        and torch.version.hip is None
        and ".".join(triton.__version__.split(".")[:2]) in _KNOWN_VERSIONS
        and isinstance(compiled, CompiledKernel)
        and JITFunction.run.__module__ == "triton.runtime.jit"
        and not kernel.pre_run_hooks
    )


def _device() -> int:
    return torch.cuda.current_device() if _ON_GPU else 0


def launched(kernel: Any) -> Any:
    """Decorate a kernel, above `triton.jit`. Kernels of Triton's interpreter are returned unchanged."""
    from triton.runtime.jit import JITFunction

    return LaunchedKernel(kernel) if isinstance(kernel, JITFunction) else kernel


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile the kernels that the block launches, in several threads, and run none of them.

    Compiling takes seconds with an empty cache of Triton. One step of training in such a block compiles all of its
    kernels at the same time; without, each launch waits for its own. Tensors that kernels write hold anything, so use
    copies of whatever the block changes, and discard its results. Other threads of Python launch as usual.

    Raises RuntimeError inside another such block.
    """
    if _Compilation.pool is not None:
        raise RuntimeError("kernels are being compiled in an outer block already")
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        # Backward passes run in threads of PyTorch, not of Python, and their launches belong to the block.
        threads = [t for t in threading.enumerate() if type(t).__name__ != "_DummyThread"]
        _Compilation.others = frozenset(t.ident for t in threads if t is not threading.current_thread())
        _Compilation.pool = pool
        try:
            yield
        finally:
            _Compilation.pool = None
            waiting, _Compilation.waiting = _Compilation.waiting, {}
        deadline = time.monotonic() + _PATIENCE
        for future in waiting.values():
            try:
                future.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if future.done():
                    raise
                _Compilation.announce()
                future.result()


def compile_ahead(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> None:
    """Compile the kernels of a training step in several threads, without taking the step.

    It calls `loss` once and differentiates the result, both in `compiling_only`. Gradients of the parameters and random
    generators stay as they are. Values are wrong meanwhile, so hooks that record values see wrong ones.

    Args:
        loss: returns the loss, of any shape. It uses the dtypes and the autocast of the step; the number of vertices
            hardly matters.
        parameters: what the step differentiates by. Nothing happens if none of them is on a GPU.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not any(parameter.is_cuda for parameter in wanted):
        return
    devices = {parameter.get_device() for parameter in wanted if parameter.is_cuda}
    with torch.random.fork_rng(sorted(devices) if _ON_GPU else []), torch.enable_grad(), compiling_only():
        torch.autograd.grad(loss().sum(), wanted, allow_unused=True)
