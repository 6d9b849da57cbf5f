"""What a recorded graph of a module depends on, besides its inputs."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn


class ModuleState:
    """The parameters, buffers and submodules of a module, in lists that are quick to compare in every call."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self._children = [(m._modules, name, child) for m in self.modules for name, child in m._modules.items()]
        self._tensors = [
            (store, name, tensor)
            for m in self.modules
            for store in (m._parameters, m._buffers)
            for name, tensor in store.items()
        ]
        self._sizes = [(store, len(store)) for m in self.modules for store in (m._modules, m._parameters, m._buffers)]
        self._hooks = [
            hooks
            for m in self.modules[1:]  # hooks of the module itself are called around the graph
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._dropouts = [m for m in self.modules if isinstance(m, nn.modules.dropout._DropoutNd)]

    def is_current(self) -> bool:
        """Whether the module still has the same submodules, parameters and buffers."""
        return (
            all(len(store) == size for store, size in self._sizes)
            and all(store.get(name) is child for store, name, child in self._children)
            and all(store.get(name) is tensor for store, name, tensor in self._tensors)
        )

    def has_inner_hooks(self) -> bool:
        """Whether a submodule has hooks. A replayed graph would not call them."""
        return any(map(len, self._hooks))

    def key(self) -> Hashable:
        """Everything that a graph of the module bakes in: modes, addresses and settings of PyTorch."""
        tensors = [tensor for _, _, tensor in self._tensors if tensor is not None]
        return (
            tuple(m.training for m in self.modules),
            tuple(m.p for m in self._dropouts),
            tuple(t.data_ptr() for t in tensors),
            tuple(t.requires_grad for t in tensors),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.backends.cuda.matmul.fp32_precision,
            torch.are_deterministic_algorithms_enabled(),
        )

    def versions(self) -> list[int]:
        """The number of in-place changes of each parameter."""
        return [p._version for p in self.parameters]
