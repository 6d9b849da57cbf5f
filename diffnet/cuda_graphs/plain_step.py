"""A training step: the loss, its gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.optimizers import CapturedOptimizer
from diffnet.diffusion import LearnedTimeDiffusion, keep_nonnegative
from diffnet.geometry import Operators
from diffnet.implicit_diffusion import ImplicitDiffusion
from diffnet.weight_average import WeightAverage

Loss = Callable[[Tensor, Tensor], Tensor]
Weight = Callable[[Tensor], Tensor]


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
    weight: of a batch, from its targets, where the loss is a number; () for `add`
    capturable: whether the optimizer takes steps that a graph can record. It does so in all steps or in none,
        because results must not depend on what is recorded.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float,
        average: WeightAverage[Any] | None,
        weight: Weight,
    ) -> None:
        self.modules = _Modules(network, loss)
        self.optimizer = CapturedOptimizer(optimizer)
        self.capturable = False
        self._network, self._loss, self._clip, self._average, self._weight = network, loss, clip, average, weight
        self._sums: Tensor | None = None

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
        return self.mean_of(self.values(outputs, batch.targets), batch)

    def mean_of(self, values: Tensor, batch: StepBatch) -> Tensor:
        """The loss () from what the function of the user returns."""
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
            self._update(batch.features.device)
        self.clear_gradients()
        return loss.detach()

    def add(self, batch: StepBatch) -> Tensor:
        """Add the gradients of a batch to `sums`. Returns the loss ()."""
        self.clear_gradients()
        outputs = self.outputs(batch)
        values = self.values(outputs, batch.targets)
        loss = self.mean_of(values, batch)
        with torch.autocast(batch.features.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
            sums = self.sums()
            weight = self._weight_of(values, batch).to(sums.dtype)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._summed()]
            parts = [*grads, loss.detach(), torch.ones_like(weight)]
            added = torch.cat([x.reshape(-1).to(sums.dtype) for x in parts])
            sums.addcmul_(torch.where(weight > 0, added, 0), weight)  # a mean over nothing can be NaN
        self.clear_gradients()
        return loss.detach()

    def sums(self) -> Tensor:
        """(P + 2,): the gradients of all P weights, and the loss, of the batches of `add`, and the sum of weights.

        Gradients and losses are multiplied by the weight of their batch.
        """
        parameters = self._summed()
        count = sum(p.numel() for p in parameters) + 2
        if self._sums is None or len(self._sums) != count or self._sums.device != parameters[0].device:
            has_double = any(p.dtype == torch.float64 for p in parameters)
            dtype = torch.float64 if has_double else torch.float32
            self._sums = torch.zeros(count, dtype=dtype, device=parameters[0].device)
        return self._sums

    def update(self) -> Tensor:
        """Take the step of the optimizer with the mean gradients of `sums`, and set these to 0. Returns the mean loss.

        All weights of the optimizer have a gradient then, also those that no batch has reached.
        """
        sums, parameters = self.sums(), self._summed()
        self.clear_gradients()
        # A forward pass sets negative times to 0, and a process without a batch has had none.
        diffusions = [m for m in self.modules.modules() if isinstance(m, (LearnedTimeDiffusion, ImplicitDiffusion))]
        keep_nonnegative([m.time for m in diffusions if m.training])
        means = sums[:-1] / torch.where(sums[-1] > 0, sums[-1], 1)
        *grads, loss = torch.split(means, [*(p.numel() for p in parameters), 1])
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad.view_as(p).to(p.dtype)
        self._update(sums.device)
        self.clear_gradients()
        sums.zero_()
        return loss.reshape(()).clone()  # a view would keep all means alive

    def _summed(self) -> list[Tensor]:
        return [p for p in self.optimizer.parameters() if p.requires_grad]

    def _weight_of(self, values: Tensor, batch: StepBatch) -> Tensor:
        """What a batch counts in `add`, ()."""
        if values.ndim > 0 and batch.rows is not None:
            return batch.rows
        rows = torch.full((), len(batch.targets), device=values.device)
        return rows if values.ndim > 0 else self._weight(batch.targets)

    def _update(self, device: torch.device) -> None:
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters(), self._clip)
        if self.capturable:
            self.optimizer.step(device, self._average)
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
