"""Launches of kernels: quick ones, compilation in several threads, and a message while it lasts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 3.0  # seconds of compilation after which a message says so
_COMPILED = 0.25  # seconds; a launch that takes longer has compiled its kernel
_LOG = logging.getLogger("diffnet")
_KNOWN_VERSIONS = ("3.6.", "3.7.")  # of Triton
_WIDE = 2**31  # integers from here on are 64 bits wide in a kernel
# `torch.cuda.current_device` also checks whether CUDA is initialized, which takes longer than the rest.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_ON_GPU = torch.cuda.is_available()  # tests compile for a GPU that isn't there


class _Compilation:
    """How long this process has compiled kernels, and the thread whose launches only compile."""

    seconds = 0.0
    announced = False
    lock = threading.Lock()  # held while `compile_later` is set
    compile_later: Callable[[LaunchedKernel, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], None] | None = None
    owner = 0  # the thread


class GuardedKernel:
    """A kernel that Triton launches, on the device of its first tensor. Triton alone takes the current device."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__name__ = kernel.__name__
        self.__doc__ = kernel.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
                self.kernel[grid](*arguments, **options)

        return launch


class LaunchedKernel(GuardedKernel):
    """A kernel whose launches skip Triton's search for the compiled kernel, on the device of its first tensor.

    Triton checks all arguments in every launch and searches for the compiled kernel. With this search, an eager step on
    small meshes takes 12 to 34 % longer (4 blocks on an H100). So Triton is asked once for each key, if its version is
    a known one. Later launches with the same key go to the compiled kernel that Triton found.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        # Triton doesn't specialize arguments listed in SIZES. The values of all other integers are part of the key.
        self._sizes = [p.do_not_specialize and not p.is_constexpr for p in kernel.params]
        self._names = [p.name for p in kernel.params]
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # by the key of their launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            key, values = self.read(arguments, options)
            if key[0] >= 0 and key[0] != _current_device():
                with torch.cuda.device(key[0]):
                    launch(*arguments, **options)
                return
            compile_later = _Compilation.compile_later
            if compile_later is not None and threading.get_ident() == _Compilation.owner:
                compile_later(self, key, arguments, options)
                return
            launcher = self.compiled.get(key)
            if launcher is not None:
                run, function, metadata, stream_of, hooks, constants = launcher
                if not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls):
                    x, y, z = (*grid, 1, 1)[:3]
                    run(x, y, z, stream_of(key[0]), function, metadata, None, None, None, *values, *constants)
                    return
            start = time.perf_counter()
            hash_source(self.kernel)
            compiled = self.kernel[grid](*arguments, **options)
            if launcher is None and _takes_launches(self.kernel, compiled):
                self.compiled[key] = _launcher(compiled, tuple(options[name] for name in self._names[len(arguments) :]))
            seconds = time.perf_counter() - start
            if seconds > _COMPILED:
                _Compilation.seconds += seconds
                if _Compilation.seconds > _PATIENCE:
                    _announce_compilation()

        return launch

    def read(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the key of a launch, with the device first, and its arguments as `_kernel_arguments` does.

        Two launches with the same key take the same compiled kernel.
        """
        first = arguments[0][0] if type(arguments[0]) is tuple else arguments[0]
        key = [first.get_device(), *options, *options.values()]
        values = _kernel_arguments(arguments, self._sizes, key)
        return tuple(key), values


_hashed: set[int] = set()  # the ids of functions


def hash_source(function: Any) -> None:
    """Let Triton hash a kernel, or a function that a kernel calls. Triton's cache finds kernels by this hash.

    Triton forgets the constants of a called function that has not been hashed yet. The called functions are hashed
    first, so that the hash doesn't depend on the order of launches.
    """
    if id(function) in _hashed:
        return
    _hashed.add(id(function))  # attributes are among the names, too, and may lead back to this function
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if hasattr(type(called), "cache_key"):  # hasattr(called, …) would hash it
            hash_source(called)
    _ = function.cache_key


def _kernel_arguments(arguments: Sequence[Any], sizes: Iterable[bool], key: list[Any]) -> tuple[Any, ...]:
    """Return arguments as a compiled kernel takes them, and extend the key of their launch.

    A compiled kernel takes addresses in place of tensors. Given tensors, Triton would read the addresses again and ask
    CUDA about each.

    sizes: for each argument, whether its value is left out of the key
    """
    results = []
    for value, is_size in zip(arguments, sizes):  # noqa: B905 - constants may follow the arguments
        argument = value
        if is_size:
            key.append(-_WIDE <= value < _WIDE)
        elif isinstance(value, Tensor):
            argument = value.data_ptr()
            key += value.dtype, argument & 15 == 0
        elif type(value) is tuple:
            argument = _kernel_arguments(value, repeat(False), key)
        else:
            key.append("float" if type(value) is float else value)
        results.append(argument)
    return tuple(results)


def _launcher(compiled: Any, constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """The function that launches a compiled kernel, and the values that this function takes besides arguments.

    constants: passed by position after the arguments, as in Triton's tutorial on fused softmax
    """
    import triton

    stream_of = triton.runtime.driver.active.get_current_stream
    # `run` loads the kernel at its first use, so it is read before `function`.
    return compiled.run, compiled.function, compiled.packed_metadata, stream_of, triton.knobs.runtime, constants


def _takes_launches(kernel: Any, compiled: Any) -> bool:
    """Whether later launches may go to the compiled kernel.

    They may not if something replaces or observes Triton's launches, or if this version of Triton is unknown.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    return (
        _ON_GPU
        and torch.version.hip is None
        and is_known_triton()
        and isinstance(compiled, CompiledKernel)
        and JITFunction.run.__module__ == "triton.runtime.jit"
        and not kernel.pre_run_hooks
    )


def is_known_triton() -> bool:
    """Return whether this version of Triton was tried with launches that skip its search, and with Gluon kernels."""
    import triton

    return triton.__version__.startswith(_KNOWN_VERSIONS)


def launched(kernel: Any) -> Any:
    """Decorate a kernel, above `triton.jit`. Kernels of Triton's interpreter are returned unchanged."""
    return _unless_interpreted(LaunchedKernel, kernel)


def guarded(kernel: Any) -> Any:
    """Decorate a kernel whose launches may take as long as Triton's own, above `triton.jit`. See `launched`."""
    return _unless_interpreted(GuardedKernel, kernel)


def _unless_interpreted(wrapper: type[GuardedKernel], kernel: Any) -> Any:
    from triton.runtime.jit import JITFunction

    return wrapper(kernel) if isinstance(kernel, JITFunction) else kernel


def _announce_compilation() -> None:
    """Say, once per process, that kernels are compiled."""
    if not _Compilation.announced:
        _Compilation.announced = True
        _LOG.warning("compiling GPU kernels, once per machine; this takes several seconds")


def compiles_only() -> bool:
    """Return whether launches of this thread compile and don't run, so that results mean nothing."""
    return _Compilation.compile_later is not None and threading.get_ident() == _Compilation.owner


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile the kernels that the block launches, in several threads, and run none of them.

    Compiling takes seconds with an empty cache of Triton. One step of training in such a block compiles all of its
    kernels at the same time; without, each launch waits for its own.

    Results of the block mean nothing, because no kernel writes them. Discard them, and give the block copies of all
    tensors that it changes. Other threads launch as usual. A second such block waits for the first.

    Raises RuntimeError inside another such block.
    """
    if compiles_only():
        raise RuntimeError("kernels are being compiled in another block already")
    waiting: dict[Any, Future[Any]] = {}

    def compile_later(
        kernel: LaunchedKernel, key: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if key in kernel.compiled or (kernel, key) in waiting:
            return
        hash_source(kernel.kernel)  # here, because the threads have no order
        device = torch.cuda.current_device() if _ON_GPU else 0

        def compile_it() -> None:
            if _ON_GPU:
                torch.cuda.set_device(device)
            kernel.kernel.run(*arguments, grid=(1,), warmup=True, **options)

        waiting[kernel, key] = pool.submit(compile_it)

    with _Compilation.lock, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        _Compilation.owner, _Compilation.compile_later = threading.get_ident(), compile_later
        try:
            # Backward passes would run in threads that all threads of Python share.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            _Compilation.compile_later = None
        deadline = time.monotonic() + _PATIENCE
        for future in waiting.values():
            try:
                future.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if future.done():
                    raise
                _announce_compilation()
                future.result()


def hash_triton_ahead() -> None:
    """Begin to hash Triton's files in a thread. The first kernel of a process needs the hash, which takes 0.4 s."""
    if find_spec("triton") is not None and is_known_triton():
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, daemon=True).start()


def saved_as_usual() -> AbstractContextManager[None]:
    """Save tensors for the backward without the caller's hooks.

    `torch.utils.checkpoint` counts the tensors that its hooks see, and runs its function again to read them.
    """
    # A hook that returned the tensor itself would tie an operation to its own output in a cycle of references.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def compile_ahead(loss: Callable[[], Tensor], inputs: Iterable[Tensor]) -> bool:
    """Compile the kernels of a training step in several threads, without taking the step.

    It calls `loss` once and differentiates the result, both in `compiling_only`. Gradients and random generators stay
    as they are. Values are wrong meanwhile, so hooks that record values see wrong ones.

    Args:
        loss: returns the loss, of any shape. It uses the dtypes and the autocast of the step; the number of vertices
            hardly matters.
        inputs: what the step differentiates by, if gradients are on

    Returns whether it has called `loss`. It doesn't if no input is on a GPU, and while another thread compiles.
    """
    inputs = list(inputs)
    if not any(x.is_cuda for x in inputs) or _Compilation.lock.locked():
        return False
    devices = sorted({x.get_device() for x in inputs if x.is_cuda}) if _ON_GPU else []
    with compiling_only(), torch.random.fork_rng(devices), saved_as_usual():
        out = loss()
        wanted = [x for x in inputs if x.requires_grad]
        if out.requires_grad and wanted:
            torch.autograd.grad(out.sum(), wanted, allow_unused=True)
    return True
