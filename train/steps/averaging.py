"""The average of a network's weights over the steps of its training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from diffnet import DiffusionNet


class WeightAverage:
    """An exponential moving average of all parameters, as used in evaluation and saved as the network.

    A step s of t has the weight decay^(t−s), divided by the sum of all weights, so the initial weights don't count.

    network: a copy of the network, which `write` gives the average. Until then it has the initial weights.
    model: the network that is trained
    decay: above 0 and below 1. The average is over about 1/(1 − decay) steps.
    """

    def __init__(self, model: DiffusionNet, decay: float) -> None:
        self.network = copy.deepcopy(model).requires_grad_(False)
        self._decay, self._model = decay, model
        # The average of the constant 1 is the sum of the weights of the steps.
        self._tensors = [*model.parameters(), torch.ones((), device=model.last.weight.device)]
        self._averages = [torch.zeros_like(tensor, requires_grad=False) for tensor in self._tensors]

    @torch.no_grad()
    def update(self) -> None:
        """Add a step. A CUDA graph can record this."""
        torch._foreach_lerp_(self._averages, self._tensors, 1 - self._decay)

    @torch.no_grad()
    def write(self) -> None:
        """Give `network` the average. There has to be a step."""
        *averages, total = self._averages
        for parameter, average in zip(self.network.parameters(), averages, strict=True):
            torch.div(average, total, out=parameter)

    def state_dict(self) -> dict[str, Any]:
        """The entries of a checkpoint besides `network`: the trained weights, the averages and their total weight."""
        *averages, total = self._averages
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
        for average, tensor in zip(self._averages, [*averages, state["total"]["total"]], strict=True):
            average.copy_(tensor)
