"""The state of a module that a recorded graph depends on."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_training, _requires_grad, _changes = attrgetter("training"), attrgetter("requires_grad"), attrgetter("_version")


class ModuleState:
    """The submodules, parameters and buffers of a module. Comparing all of them takes some microseconds per call."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        stores: list[dict[str, Any]] = []
        for m in self.modules:
            stores += [m._modules, m._parameters, m._buffers]
        self._values = [store.values() for store in stores]  # views, which follow every change of a store
        self._members = self._ids()
        tensors = [x for values in self._values for x in values if isinstance(x, Tensor)]
        self._is_complete = not any(map(is_lazy, tensors))  # a lazy parameter has no memory before its first use
        self._tensors = tensors if self._is_complete else []
        self._addresses = self._current_addresses()
        self._memory = [x.detach() for x in self._tensors]  # nothing else gets these addresses meanwhile
        self._hooks = [
            hooks
            for m in self.modules[1:]  # hooks of the module itself are called around the graph
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._dropouts = [m for m in self.modules if isinstance(m, nn.modules.dropout._DropoutNd)]

    def _ids(self) -> tuple[int, ...]:
        return tuple(map(id, chain.from_iterable(self._values)))

    def _current_addresses(self) -> tuple[int, ...]:
        return tuple(map(Tensor.data_ptr, self._tensors))

    def is_current(self) -> bool:
        """Whether the module still has the same submodules, parameters and buffers, at the same addresses."""
        if not self._is_complete:
            return False
        return self._ids() == self._members and self._current_addresses() == self._addresses

    def has_inner_hooks(self) -> bool:
        """Whether a submodule has hooks. A replayed graph would not call them."""
        return any(self._hooks)

    def key(self) -> Hashable:
        """Everything that a graph of the module bakes in: modes, addresses and settings of PyTorch."""
        return (
            *map(_training, self.modules),
            *map(attrgetter("p"), self._dropouts),
            self._addresses,
            *map(_requires_grad, self._tensors),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.backends.cuda.matmul.fp32_precision,
            torch.are_deterministic_algorithms_enabled(),
        )

    def changes(self) -> list[int]:
        """The number of in-place changes of each parameter."""
        return list(map(_changes, self.parameters))
