"""The average of a network's weights over the steps of its training."""

from __future__ import annotations

import copy
from collections.abc import Set
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class WeightAverage(Generic[M]):
    """An exponential moving average of all parameters of a network over the steps of its training.

    A step s of t has the weight decay^(t−s), divided by the sum of all weights, so the initial weights don't count.
    `GraphedStep` updates it in each step.

    model: the network that is trained, with parameters
    decay: above 0 and below 1. The average is over about 1/(1 − decay) steps.

    network: a copy of the network, which `write` gives the average. Until then it has the initial weights.
    averages: of the parameters, not yet divided by the sum of all weights. The last entry is this sum.

    Raises ValueError for another decay. `update` and `write` raise RuntimeError if the network has got other parameters
    since, which it names, or has been moved.

    >>> from torch import nn
    >>> average = WeightAverage(nn.Linear(1, 1), decay=0.9)
    >>> average.update()    # after each step of the optimizer
    >>> average.write()
    >>> average.network     # to evaluate and to save
    Linear(in_features=1, out_features=1, bias=True)
    """

    def __init__(self, model: M, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay should be above 0 and below 1, got {decay}")
        self.network: M = copy.deepcopy(model).requires_grad_(False)
        self.decay, self._model = decay, model
        parameters = list(model.parameters())
        # The average of the constant 1 is the sum of the weights of the steps.
        tensors = [*parameters, torch.ones((), device=parameters[0].device)]
        self.averages = {tensor: torch.zeros_like(tensor, requires_grad=False) for tensor in tensors}
        self._places = [parts for module in model.modules() for parts in (module._modules, module._parameters)]
        self._parts = self._current_parts()

    @torch.no_grad()
    def update(self, done: Set[Tensor] = frozenset()) -> None:
        """Add a step. A CUDA graph can record this.

        done: the parameters whose averages have the step already
        """
        self._check_parameters()
        rest = [tensor for tensor in self.averages if tensor not in done]
        torch._foreach_lerp_([self.averages[tensor] for tensor in rest], rest, 1 - self.decay)

    @torch.no_grad()
    def write(self) -> None:
        """Give `network` the average, and the buffers of the trained network. There has to be a step.

        Parameters without a gradient are copied, because an average would round them.
        """
        self._check_parameters()
        *averages, total = self.averages.items()
        for parameter, (trained, average) in zip(self.network.parameters(), averages, strict=True):
            if trained.requires_grad:
                torch.div(average, total[1], out=parameter)
            else:
                parameter.copy_(trained)
        for buffer, trained in zip(self.network.buffers(), self._model.buffers(), strict=True):
            buffer.copy_(trained)

    def _current_parts(self) -> list[object]:
        return list(chain.from_iterable(parts.values() for parts in self._places))

    def _check_parameters(self) -> None:
        """Raise RuntimeError unless the network has the parameters of the averages. This takes some microseconds."""
        first, average = next(iter(self.averages.items()))
        if (first.device, first.dtype) != (average.device, average.dtype):
            raise RuntimeError(f"the network is now {first.dtype} on {first.device}; make another WeightAverage of it")
        parts = self._current_parts()
        if len(parts) == len(self._parts) and all(map(is_, parts, self._parts)):
            return
        before = dict(zip((name for name, _ in self.network.named_parameters()), self.averages, strict=False))
        now = dict(self._model.named_parameters())
        for name in before | now:
            if before.get(name) is not now.get(name):
                raise RuntimeError(
                    f"{name} was replaced, added or removed after WeightAverage(model, decay), so it has no average; "
                    "make another WeightAverage of the network"
                )

    def state_dict(self) -> dict[str, Any]:
        """The trained weights, the averages and their total weight. `network` has no part in it."""
        *averages, total = self.averages.values()
        names = (name for name, _ in self._model.named_parameters())
        return {
            "trained": self._model.state_dict(),
            "averages": dict(zip(names, averages, strict=True)),
            "total": {"total": total},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the trained network and the averages, in place."""
        self._model.load_state_dict(state["trained"])
        stored: dict[str, Tensor] = state["averages"]
        averages = [stored[name] for name, _ in self._model.named_parameters()]
        for average, tensor in zip(self.averages.values(), [*averages, state["total"]["total"]], strict=True):
            average.copy_(tensor)
