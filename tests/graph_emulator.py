"""CUDA graphs without a GPU, which replay a function on the same tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffnet import DiffusionNet, Operators
from diffnet.cuda_graphs.forward import graphed, use_graphs
from diffnet.cuda_graphs.runtime import Settings

M = TypeVar("M", bound=nn.Module)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class Operation(NamedTuple):
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Any]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else type(x)(map(_detached, x)) if isinstance(x, (list, tuple)) else x


class _Recorder(TorchDispatchMode):
    """Records operations. It undoes their changes of older tensors afterwards, because CUDA runs nothing meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        arguments = tuple(map(_detached, args))
        options = {name: _detached(value) for name, value in (kwargs or {}).items()}
        for i, parameter in enumerate(func._schema.arguments):
            # The schema of batch normalization doesn't say that it writes its running statistics.
            writes = parameter.name in ("running_mean", "running_var")
            if writes or (parameter.alias_info is not None and parameter.alias_info.is_write):
                written = args[i] if i < len(args) else (kwargs or {}).get(parameter.name)
                self._before += [
                    (x.detach(), x.detach().clone()) for x in tree_leaves(written) if isinstance(x, Tensor)
                ]
        results = func(*args, **(kwargs or {}))
        kept = [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(results)]
        self.operations.append(Operation(func, arguments, options, kept))
        return results

    def undo(self) -> None:
        for x, value in reversed(self._before):
            x.copy_(value)


class _ReadBack(TorchFunctionMode):
    """Refuses `tolist`, as CUDA does. Only checks of values, which run on the CPU alone, may call it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.tolist and sys._getframe(1).f_globals["__name__"] != "diffnet.ops.common.checks":
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class EmulatedGraph:
    """Stands in for a CUDA graph. A replay calls the recorded function again.

    A backward graph reads what its own forward graph has left in memory that all graphs of a pool share. If another
    forward graph of the pool has been replayed since, that is an error here.
    """

    replays = 0

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self.function, self.pool = self.recorded(function), pool
        self.forward = pool.recorded if function.__name__ == "backward" else self
        pool.recorded = self

    def recorded(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function

    def replay(self) -> None:
        if self.forward is self:
            self.pool.replayed = self
        assert self.pool.replayed is self.forward, "the memory of the forward graph is lost"
        EmulatedGraph.replays += 1
        # A CUDA graph knows nothing of autograd, so nothing that surrounds the call may change what happens inside.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
            self.function()


class ReplayedGraph(EmulatedGraph):
    """As a CUDA graph, it repeats the recorded operations of PyTorch, and calls no Python function.

    Kernels in Triton's interpreter are no operations of PyTorch. Functions that read values back can't be recorded.
    """

    def recorded(self, function: Callable[[], Any]) -> Callable[[], Any]:
        recorder = _Recorder()
        try:
            with recorder, _ReadBack():
                function()
        finally:
            recorder.undo()
        operations = recorder.operations

        @torch.no_grad()
        def replay() -> None:
            for function, arguments, options, results in operations:
                for old, new in zip(results, tree_leaves(function(*arguments, **options)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def network(in_channels: int = 3, **options: Any) -> DiffusionNet:
    """A small network whose blocks take gradients on the basis."""
    torch.manual_seed(0)
    small = {"width": 8, "blocks": 1, "dropout": 0.0, "gradient": "spectral"}
    return DiffusionNet(in_channels, 5, **{**small, **options})


class Foreign(nn.Module):
    """A network that ends in a function of itself, the outputs of DiffusionNet, the features and the operators."""

    def __init__(self, compute: Callable[[Any, Tensor, Tensor, Operators], Any], **attributes: Any) -> None:
        super().__init__()
        self.net = network()
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, operators: Operators) -> Any:
        return self.compute(self, self.net(x, operators), x, operators)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "lr": 1e-3, "weight_decay": 0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def with_graphs(
    network: M, device: str = "cpu", first_visits: int = 0, emulation: type[EmulatedGraph] = ReplayedGraph
) -> M:
    """A copy of a network that uses graphs, which are emulated on the CPU."""
    copied = copy.deepcopy(network).to(device)
    if device == "cpu":
        return use_graphs(copied, Settings(None, first_visits, recorder=emulation))
    return graphed(copied, first_visits=first_visits)


def counted_replays(call: Callable[[], Any]) -> int:
    """The number of graphs that a call replays on the CPU."""
    before = EmulatedGraph.replays
    call()
    return EmulatedGraph.replays - before
