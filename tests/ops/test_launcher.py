"""Launches that only compile: which threads they concern, and what stays as it is."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffnet.ops.common import launcher
from diffnet.ops.common.launcher import LaunchedKernel, compile_ahead, compiles_only, compiling_only, hash_source
from diffnet.ops.common.memo import can_remember

pytest.importorskip("triton")


class Kernel:
    """Stands in for a kernel of Triton. Records its compilations and its runs."""

    __name__ = "kernel"
    cache_key = "hash"
    pre_run_hooks: tuple[()] = ()

    def __init__(self) -> None:
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=name == "rows_size", is_constexpr=name == "BLOCK")
            for name in ("x", "rows_size", "BLOCK")
        ]
        self.compiled: list[bool] = []  # whether in the main thread
        self.ran = 0
        self.fn = lambda: None

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert warmup
        self.compiled.append(threading.current_thread() is threading.main_thread())

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            self.ran += 1

        return run


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Launches(torch.autograd.Function):
    """Launches a kernel in the forward and another variant of it in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: LaunchedKernel) -> Tensor:
        ctx.kernel = kernel
        kernel[1,](x, 5, BLOCK=16)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.kernel[1,](grad, 5, BLOCK=32)
        return grad, None


class Hashed:
    order: list[str] = []  # noqa: RUF012 - of all instances

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    @property
    def cache_key(self) -> str:
        Hashed.order.append(self.fn.__name__)
        return str(self.fn.__name__)


@Hashed
def inner() -> None:
    pass


@Hashed
def outer(x: Any) -> None:
    inner()  # type: ignore[operator]
    x.kernel()  # an attribute, not a function of this name


@Hashed
def kernel(x: Any) -> None:
    outer(x)  # type: ignore[operator]
    inner()  # type: ignore[operator]


def test_called_functions_are_hashed_first() -> None:
    """Triton would leave out the constants of functions that are not hashed yet."""
    for _ in range(2):
        hash_source(kernel)
        assert Hashed.order == ["inner", "outer", "kernel"]


def test_each_variant_is_compiled_once_in_another_thread() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launched = LaunchedKernel(kernel)
    with compiling_only():
        assert compiles_only()
        assert not can_remember()
        for rows in (5, 6):
            launched[1,](x, rows, BLOCK=16)
        launched[1,](x, 5, BLOCK=32)
        launched[1,](x.half(), 5, BLOCK=32)
    assert kernel.compiled == [False] * 3
    assert kernel.ran == 0
    assert not compiles_only()
    assert can_remember()
    launched[1,](x, 5, BLOCK=16)
    assert kernel.ran == 1


def test_keys_tell_launches_apart() -> None:
    names = ("x", "items", "rows_size", "count", "scale", "BLOCK")
    kernel = Kernel()
    kernel.params = [
        SimpleNamespace(name=n, do_not_specialize=n == "rows_size", is_constexpr=n == "BLOCK") for n in names
    ]
    launched, x = LaunchedKernel(kernel), torch.zeros(16)

    def key(x: Any = x, items: Any = (x, 3), rows: int = 5, count: Any = 2, scale: float = 0.5, block: int = 16) -> Any:
        return launched.read((x, items, rows, count, scale), {"BLOCK": block})[0]

    assert key() == key(rows=7, scale=0.25, x=x.clone()) == key(x=torch.nn.Parameter(x))
    others = [
        key(x=x.half()),
        key(x=x[1:]),
        key(items=(x.half(), 3)),
        key(items=(x[1:], 3)),
        key(items=(x, 4)),
        key(rows=2**31),
        key(count=3),
        key(count=None),
        key(block=32),
    ]
    assert len({key(), *others}) == 1 + len(others)


def test_later_launches_pass_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launcher takes addresses in place of tensors."""
    compiled = Compiled()
    active = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    # Triton's versions and kernels are checked elsewhere; here is no GPU.
    monkeypatch.setattr("diffnet.ops.common.launcher._takes_launches", lambda kernel, found: found is compiled)
    kernel, x = Kernel(), torch.zeros(16)
    kernel.__class__ = type("Known", (Kernel,), {"__getitem__": lambda self, grid: lambda *a, **o: compiled})
    launched = LaunchedKernel(kernel)
    launched[3, 2](x, 5, BLOCK=16)
    assert compiled.launches == []
    launched[3, 2](x, 6, BLOCK=16)
    expected = (3, 2, 1, 7, "function", "metadata", None, None, None, x.data_ptr(), 6, 16)
    assert compiled.launches == [expected]
    launched[3,]((x[1:], x), 6, BLOCK=16)
    launched[3,]((x[1:], x), 6, BLOCK=16)
    assert compiled.launches[1][-3:] == ((x[1:].data_ptr(), x.data_ptr()), 6, 16)
    monkeypatch.setattr("triton.knobs.runtime.launch_enter_hook.calls", [print])
    launched[3, 2](x, 6, BLOCK=16)
    assert len(compiled.launches) == 2  # Triton's own launch calls the hooks


def test_other_threads_launch_as_usual() -> None:
    kernel, called = Kernel(), []
    launched = LaunchedKernel(kernel)
    x = torch.zeros(8, requires_grad=True)

    def train() -> None:
        assert not compiles_only()
        Launches.apply(x, launched).sum().backward()
        compile_ahead(lambda: called.append(0), [x])  # type: ignore[arg-type, return-value]

    with compiling_only():
        in_thread(train)
        assert kernel.ran == 2
        torch.autograd.grad(Launches.apply(x, launched).sum(), x)
    assert kernel.ran == 2
    assert len(kernel.compiled) == 2
    assert called == []


def test_errors_end_the_block_and_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ArithmeticError("no registers")

    kernel = Kernel()
    launched = LaunchedKernel(kernel)
    with pytest.raises(ZeroDivisionError), compiling_only():
        raise ZeroDivisionError
    with compiling_only(), pytest.raises(RuntimeError, match="another block"), compiling_only():
        pass
    launched[1,](torch.zeros(1), 1, BLOCK=16)
    assert kernel.ran == 1
    monkeypatch.setattr(kernel, "run", fail)
    with pytest.raises(ArithmeticError, match="no registers"), compiling_only():
        launched[1,](torch.zeros(1), 2, BLOCK=32)


def test_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors say that they are on a GPU, as in step_costs.py."""
    kernel = Kernel()
    launched = LaunchedKernel(kernel)
    x = torch.zeros(8, requires_grad=True)
    compile_ahead(lambda: pytest.fail("there is no GPU"), [x])
    monkeypatch.setattr(Tensor, "is_cuda", True)
    before = torch.get_rng_state()

    def loss() -> Tensor:
        return Launches.apply(x, launched) * torch.rand(8)

    compile_ahead(loss, [x])
    assert len(kernel.compiled) == 2
    assert kernel.ran == 0
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        compile_ahead(loss, [x])
    assert len(kernel.compiled) == 3


def test_ahead_within_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint counts the tensors that its function saves. The recomputation compiles nothing."""
    launched = LaunchedKernel(Kernel())
    x = torch.ones(8, requires_grad=True)
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "is_cuda", True)
                compile_ahead(lambda: Launches.apply(x.detach().requires_grad_(), launched).square(), [x])
        return x.square()

    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0))
    assert len(calls) == 2


def test_a_gpu_without_triton_has_nothing_to_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where PyTorch has CUDA and no Triton."""
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails
    launcher.hash_triton_ahead()
