"""Launches of kernels: quick ones, compilation in several threads, and a message while it lasts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

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
    lock = threading.Lock()  # held while `pool` exists
    pool: ThreadPoolExecutor | None = None
    owner = 0  # the thread whose launches only compile
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
        compiled: by their key, the compiled kernels that launches go to, and the constants that these take
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__name__ = kernel.__name__
        self.__doc__ = kernel.__doc__
        # Triton doesn't specialize arguments listed in SIZES. The values of all other integers are part of the key.
        self._sizes = [p.do_not_specialize and not p.is_constexpr for p in kernel.params]
        self._names = [p.name for p in kernel.params]
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            pool = _Compilation.pool
            if pool is not None and threading.get_ident() == _Compilation.owner:
                self._compile_ahead(pool, arguments, options)
                return
            key = self.key(arguments, options)
            known = self.compiled.get(key)
            if known is not None:
                compiled, constants = known
                _run(compiled, key[0], (*grid, 1, 1)[:3], (*arguments, *constants))
                return
            start = time.perf_counter()
            found = self.kernel[grid](*arguments, **options)
            if _takes_launches(self.kernel, found):
                # Constants are passed by position, too, as Triton's tutorial on fused softmax does.
                self.compiled[key] = found, tuple(options[name] for name in self._names[len(arguments) :])
            seconds = time.perf_counter() - start
            if seconds > _COMPILED:
                _Compilation.seconds += seconds
                if _Compilation.seconds > _PATIENCE:
                    _Compilation.announce()

        return launch

    def key(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Return what decides which compiled kernel runs: two launches with the same key take the same one."""
        # This runs in every launch, so it asks for exact types first and for the device once.
        first = arguments[0] if type(arguments[0]) is not tuple else arguments[0][0]
        parts = [first.get_device(), *options, *options.values()]
        add = parts.append
        for value, is_size in zip(arguments, self._sizes):  # noqa: B905 - options are no part of `arguments`
            if is_size:
                add(-_WIDE <= value < _WIDE)
                continue
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                add(value.dtype)
                add(value.data_ptr() & 15 == 0)
            elif kind is int:
                add(value)
            elif kind is tuple:
                for x in value:
                    parts += (x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else (x,)
            elif isinstance(value, Tensor):
                parts += (value.dtype, value.data_ptr() & 15 == 0)
            else:
                add(float if kind is float else value)
        return tuple(parts)

    def _compile_ahead(self, pool: ThreadPoolExecutor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = self.key(arguments, options)
        if key in self.compiled or (self, key) in _Compilation.waiting:
            return
        device = _device()

        def compile_it() -> None:
            if _ON_GPU:
                torch.cuda.set_device(device)
            self.kernel.run(*arguments, grid=(1,), warmup=True, **options)

        _Compilation.waiting[self, key] = pool.submit(compile_it)


def _run(compiled: Any, device: int, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Do what `compiled[grid](*arguments)` does in half the time: call no hooks if nobody has set any."""
    import triton

    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*arguments)
        return
    run = compiled.run  # loads the kernel at its first use
    stream = triton.runtime.driver.active.get_current_stream(device)
    run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


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


def compiles_only() -> bool:
    """Return whether launches of this thread compile and don't run, so that results mean nothing."""
    return _Compilation.pool is not None and threading.get_ident() == _Compilation.owner


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile the kernels that the block launches, in several threads, and run none of them.

    Compiling takes seconds with an empty cache of Triton. One step of training in such a block compiles all of its
    kernels at the same time; without, each launch waits for its own. Tensors that kernels write hold anything, so use
    copies of whatever the block changes, and discard its results. Other threads launch as usual.

    Raises RuntimeError if another such block runs.
    """
    if not _Compilation.lock.acquire(blocking=False):
        raise RuntimeError("kernels are being compiled in another block already")
    try:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            _Compilation.owner, _Compilation.pool = threading.get_ident(), pool
            try:
                # Backward passes would run in threads that all threads of Python share.
                with torch.autograd.set_multithreading_enabled(False):
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
    finally:
        _Compilation.lock.release()


def saved_as_usual() -> AbstractContextManager[None]:
    """Save tensors for the backward without the caller's hooks.

    `torch.utils.checkpoint` counts the tensors that its hooks see, and runs its function again to read them.
    """
    # A hook that returned the tensor itself would tie an operation to its own output in a cycle of references.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def compile_ahead(loss: Callable[[], Tensor], inputs: Iterable[Tensor]) -> None:
    """Compile the kernels of a training step in several threads, without taking the step.

    It calls `loss` once and differentiates the result, both in `compiling_only`. Gradients and random generators stay
    as they are. Values are wrong meanwhile, so hooks that record values see wrong ones. Nothing happens if no input is
    on a GPU, and while another thread compiles.

    Args:
        loss: returns the loss, of any shape. It uses the dtypes and the autocast of the step; the number of vertices
            hardly matters.
        inputs: what the step differentiates by, if gradients are on
    """
    inputs = list(inputs)
    devices = sorted({x.get_device() for x in inputs if x.is_cuda})
    if not devices or _Compilation.lock.locked():
        return
    with torch.random.fork_rng(devices if _ON_GPU else []), compiling_only(), saved_as_usual():
        out = loss()
        wanted = [x for x in inputs if x.requires_grad]
        if out.requires_grad and wanted:
            torch.autograd.grad(out.sum(), wanted, allow_unused=True)
