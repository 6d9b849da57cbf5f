"""A training step: the loss, its gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import Batch
from diffnet.cuda_graphs.losses import Loss, row_loss
from diffnet.cuda_graphs.optimizers import CapturedOptimizer
from diffnet.cuda_graphs.recording import without_cached_casts
from diffnet.diffusion import LearnedTimes, keep_nonnegative
from diffnet.weight_average import WeightAverage

Weight = Callable[[Tensor], Tensor]


class StepModules(nn.Module):
    """The network, and the loss: a module or a function."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self.loss = loss


class PlainStep:
    """Takes a training step, kernel by kernel.

    modules: all that a step calls
    weight: of a batch in `add`, (), a function of its targets. None if the loss says it.
    ignore_index: the label that a loss ignores which returns a number and doesn't say what this divides by
    fuses: whether the optimizer takes steps that a graph can record. It does so in all steps or in none, because
        results must not depend on what is recorded.
    reached: the numbers of the optimizer's parameters that a batch since the last update has given a gradient
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float,
        average: WeightAverage[Any] | None,
        weight: Weight | None,
        ignore_index: int | None,
    ) -> None:
        self.modules = StepModules(network, loss)
        self.optimizer = CapturedOptimizer(optimizer)
        self.fuses = False
        self.reached: frozenset[int] = frozenset()
        self.weight = weight
        self._clip, self._average, self._ignore_index = clip, average, ignore_index
        self._sums: Tensor | None = None
        self._summed: list[Tensor] = []  # of the sums
        self._flags: dict[tuple[bool, ...], Tensor] = {}

    def __call__(self, batch: Batch, forward: Callable[..., Tensor], adds: bool) -> Tensor:
        """Train on a batch, or add its gradients to `sums`. Returns the loss ().

        Gradients from before are dropped, and none are left.

        forward: the network, or its graphs
        """
        parameters = self._weights()
        clear_gradients(parameters)
        device = batch.features.device.type
        with without_cached_casts(device):
            outputs = forward(batch.features, batch.operators, *batch.further)
            values = cast(Any, self.modules.loss)(outputs, batch.targets)
        loss = _mean(values, len(outputs))
        with torch.autocast(device, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
            by_rows = values.ndim > 0 and len(values) == len(outputs)
            self.finish(loss.detach(), self.weight_of(batch.targets, by_rows) if adds else None)
        clear_gradients(parameters)
        return loss.detach()

    def finish(self, loss: Tensor, weight: Tensor | None, is_recorded: bool = False) -> None:
        """Take the step with the gradients of the weights, or add them to `sums`.

        weight: of the batch in `sums`, (). None takes the step.
        is_recorded: whether a graph will repeat it
        """
        if weight is None:
            self._update(loss.device, self._average, is_recorded)
        else:
            self._add(loss, weight)

    def weight_of(self, targets: Any, by_rows: bool = False) -> Tensor:
        """What a batch counts in `add`, (). Raises ValueError if neither the loss nor the user says it.

        by_rows: whether the loss returns a value for each row
        """
        if self.weight is not None:
            return self.weight(targets)
        rows = torch.full((), len(targets), device=targets.device)
        loss = row_loss(self.modules.loss, targets)
        if loss is not None and loss.divisor is not None:
            return loss.divisor(targets, rows)
        if by_rows:
            return rows
        if self._ignore_index is not None:
            return cast(Tensor, (targets != self._ignore_index).sum())
        raise ValueError(
            "`add` needs to know what the loss of a batch divides by. It returns a number and is none of PyTorch's or "
            "diffnet's means: pass weight= or ignore_index= to GraphedStep, or let it return a value for each row"
        )

    def _add(self, loss: Tensor, weight: Tensor) -> None:
        sums = self.sums()
        self.reached |= self.with_gradients()
        reached = tuple([p.grad is not None for p in self._summed])
        if reached not in self._flags:  # made in a first step, because a graph can't copy it from the host
            self._flags[reached] = torch.tensor(reached, dtype=sums.dtype, device=sums.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._summed]
        weight = weight.to(sums.dtype)
        added = torch.cat([x.reshape(-1).to(sums.dtype) for x in (*grads, loss, torch.ones_like(weight))])
        sums[: len(added)].addcmul_(torch.where(weight > 0, added, 0), weight)  # a mean over nothing can be NaN
        sums[len(added) :] += self._flags[reached]

    def with_gradients(self) -> frozenset[int]:
        """The numbers of the optimizer's parameters that have a gradient."""
        return frozenset(i for i, p in enumerate(self.optimizer.parameters()) if p.grad is not None)

    def sums(self) -> Tensor:
        """(P + 2 + N,): sums over the batches of `add`.

        These are the gradients of all P weights, the loss, and 1, multiplied by the weight of the batch; then for each
        of the N parameters of the optimizer the number of batches that have given it a gradient.

        Raises RuntimeError if these parameters have changed since the first `add`, and TypeError if they are sharded.
        """
        parameters = self.optimizer.parameters()
        same = len(parameters) == len(self._summed) and all(map(is_, parameters, self._summed))
        if self._sums is None or not same or self._sums.device != parameters[0].device:
            if self.reached:
                raise RuntimeError("the optimizer's parameters have been replaced or moved between `add` and `update`")
            if any(hasattr(p, "full_tensor") for p in parameters):
                raise TypeError("`add` and `update` can't sum the gradients of sharded parameters (DTensor)")
            count = sum(p.numel() for p in parameters) + 2 + len(parameters)
            has_double = any(p.dtype == torch.float64 for p in parameters)
            dtype = torch.float64 if has_double else torch.float32
            self._sums = torch.zeros(count, dtype=dtype, device=parameters[0].device)
            self._summed, self._flags = parameters, {}
        return self._sums

    def update(self, with_others: bool) -> Tensor:
        """Take the step of the optimizer with the mean gradients of `sums`, and set these to 0. Returns the mean loss.

        A parameter that no batch has reached gets no gradient, as in one batch with all meshes.

        with_others: whether `sums` also has batches of other processes. Which parameters these have reached is known on
            the device only. So this process updates all parameters, and restores there those that no batch has reached.
        """
        sums, parameters, reached = self.sums(), self._summed, self.reached
        self.clear_gradients()
        # A forward pass sets negative times to 0, and a process without a batch has had none.
        diffusions = [m for m in self.modules.modules() if isinstance(m, LearnedTimes) and m.training]
        keep_nonnegative([m.time for m in diffusions])
        count = len(sums) - len(parameters)
        summed, counts = sums[:count], sums[count:]
        means = summed[:-1] / torch.where(summed[-1] > 0, summed[-1], 1)
        *grads, loss = torch.split(means, [*(p.numel() for p in parameters), 1])
        unsure = [i for i in range(len(parameters)) if i not in reached] if with_others else []
        for i in (*reached, *unsure):
            parameters[i].grad = grads[i].view_as(parameters[i]).to(parameters[i].dtype)
        with self._restored([(parameters[i], counts[i] > 0) for i in unsure]):
            self._update(sums.device, None if unsure else self._average, is_recorded=True)
        if unsure and self._average is not None:
            self._average.update()
        self.clear_gradients()
        sums.zero_()
        self.reached = frozenset()
        return loss.reshape(()).clone()  # a view would keep all means alive

    @contextmanager
    def _restored(self, parameters: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Restore parameters and their state after the block where a condition () is false, without reading it back.

        State that the block makes is 0 then.
        """
        state = self.optimizer.optimizer.state
        before = []
        for p, _ in parameters:
            tensors = {name: x.clone() for name, x in state.get(p, {}).items() if isinstance(x, Tensor)}
            before.append((p.detach().clone(), tensors))
        yield
        with torch.no_grad():
            for (p, changes), (value, tensors) in zip(parameters, before, strict=True):
                p.copy_(torch.where(changes, p, value))
                for name, x in state.get(p, {}).items():
                    if isinstance(x, Tensor):
                        condition = changes.to(x.device)
                        x.copy_(torch.where(condition, x, tensors.get(name, torch.zeros_like(x))))

    def _update(self, device: torch.device, average: WeightAverage[Any] | None, is_recorded: bool) -> None:
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters(), self._clip)
        if self.fuses:
            self.optimizer.step(device, average, is_recorded)
        else:
            self.optimizer.optimizer.step()
            if average is not None:
                average.update()

    def _weights(self) -> list[Tensor]:
        return [*self.modules.parameters(), *self.optimizer.parameters()]

    def clear_gradients(self) -> None:
        clear_gradients(self._weights())


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad = None


def _mean(values: Any, rows: int) -> Tensor:
    """The loss () from what the function of the user returns."""
    if not isinstance(values, Tensor):
        raise TypeError(f"the loss should return a tensor, got {type(values).__name__}")
    if values.ndim > 0 and len(values) != rows and values.numel() != 1:
        raise ValueError(
            f"the loss should return a number or {rows} rows for {rows} rows, got shape {tuple(values.shape)}"
        )
    return values.mean()
