"""A training step: the loss, its gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.optimizers import CapturedOptimizer
from diffnet.geometry import Operators
from diffnet.weight_average import WeightAverage

Loss = Callable[[Tensor, Tensor], Tensor]


class StepBatch(NamedTuple):
    """What a step reads.

    features: (V, C)
    targets: with a row for each row of the outputs
    further: further arguments of the network, with a row for each mesh
    rows: (), the number of rows that count. None if all do.
    """

    features: Tensor
    operators: Operators
    targets: Tensor
    further: tuple[Tensor, ...] = ()
    rows: Tensor | None = None


class _Modules(nn.Module):
    """The network, and the loss if it is a module, else the function."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self.loss = loss


class PlainStep:
    """Takes a training step, kernel by kernel.

    modules: all that a step calls
    capturable: whether the optimizer takes steps that a graph can record. It always does so or never, because results
        must not depend on what is recorded.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float,
        average: WeightAverage[Any] | None,
    ) -> None:
        self.modules = _Modules(network, loss)
        self.optimizer = CapturedOptimizer(optimizer)
        self.capturable = False
        self._network, self._loss, self._clip, self._average = network, loss, clip, average

    def outputs(self, batch: StepBatch) -> Tensor:
        with _without_cached_casts(batch.features.device.type):
            outputs: Tensor = self._network(batch.features, batch.operators, *batch.further)
            return outputs

    def loss(self, batch: StepBatch) -> Tensor:
        """The loss ()."""
        return self.loss_of(self.outputs(batch), batch)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the function of the user returns: a number, or a value for each row."""
        with _without_cached_casts(outputs.device.type):
            values = self._loss(outputs, targets)
        if not isinstance(values, Tensor):
            raise TypeError(f"the loss should return a tensor, got {type(values).__name__}")
        return values

    def loss_of(self, outputs: Tensor, batch: StepBatch) -> Tensor:
        values = self.values(outputs, batch.targets)
        if values.ndim == 0:
            return values
        if batch.rows is None:
            return values.mean()
        counts = torch.arange(len(values), device=values.device) < batch.rows
        known = torch.where(counts.view(-1, *[1] * (values.ndim - 1)), values, 0)
        return known.sum() / (batch.rows * values.shape[1:].numel())

    def __call__(self, batch: StepBatch) -> Tensor:
        """Train on a batch. Returns the loss (). Gradients from before are dropped, and none are left."""
        self.clear_gradients()
        loss = self.loss(batch)
        with torch.autocast(batch.features.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
            # Gradients of several batches or processes are summed here, before their norm is taken.
            self._update(batch.features.device)
        self.clear_gradients()
        return loss.detach()

    def _update(self, device: torch.device) -> None:
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters(), self._clip)
        if self.capturable:
            self.optimizer.step(device)
        else:
            self.optimizer.optimizer.step()
        if self._average is not None:
            self._average.update()

    def clear_gradients(self) -> None:
        for p in (*self.modules.parameters(), *self.optimizer.parameters()):
            p.grad = None


def _without_cached_casts(device: str) -> torch.autocast:
    """The caller's autocast without its cache of weights. A graph would read a cached cast forever."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled, cache_enabled=False)
