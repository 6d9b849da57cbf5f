"""Training steps of batches of any size as CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import Batch
from diffnet.cuda_graphs.gradients import Groups, JoinedParameters, gradient_buffers, groups_of
from diffnet.cuda_graphs.lane import Graph, Lane
from diffnet.cuda_graphs.losses import RowLoss, row_loss
from diffnet.cuda_graphs.module_state import MAX_NEW_STATES, settings
from diffnet.cuda_graphs.plain_step import PlainStep, StepModules, without_cached_casts
from diffnet.cuda_graphs.recording import check_output, forked_random_numbers, trial, with_gradients
from diffnet.cuda_graphs.replica import Replica
from diffnet.cuda_graphs.runtime import NOTHING, Expected, Facts, GraphRuntime, Kind, Loaded, Settings, loaded
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.ops.common.cuda_graph import NotCapturable


@dataclass
class _Program:
    """A step on buffers of one size.

    loss, weight: buffers (); the weight is that of the batch in `add`
    gradients, learned: see `Recording`. They are empty if the graph holds the update.
    reached: the numbers of the optimizer's parameters that get a gradient
    graph: None if it can't be recorded
    """

    inputs: Loaded
    loss: Tensor
    weight: Tensor
    gradients: list[Tensor] = field(default_factory=list)
    learned: Groups = ()
    reached: frozenset[int] = frozenset()
    graph: Graph | None = None

    def load(self, batch: Batch, weight: Tensor | None) -> None:
        self.inputs.load(batch)
        if weight is not None:
            self.weight.copy_(weight)


class StepGraphs(GraphRuntime):
    """Runs a training step on buffers, and replays CUDA graphs of it. One graph serves all batches of about one size.

    A graph holds the forward pass, the loss and the backward pass. It also holds the update of the weights if the
    optimizer is known and no parameter has hooks. If not, the gradients reach the parameters by autograd after each
    replay, and the step of the optimizer follows.

    All kernels are compiled before the first step. The first step of a size runs kernel by kernel, and the graph is
    recorded after it. A replay runs the same kernels and draws the same random numbers. So results don't depend on the
    order in which sizes occur, if the meshes to come are known.
    """

    def __init__(self, step: PlainStep, settings: Settings, device: torch.device, expected: Expected | None) -> None:
        super().__init__(step.modules, step.modules.network, settings, "training", expected)
        self.device = device
        self._step = step
        self._lane: Lane[Any] = Lane(
            device, settings.recorder
        )  # programs of each kind and size, and graphs of `update`
        self._lanes.append(self._lane)
        self._joined = JoinedParameters()
        self._updates = True  # whether graphs of updates can be recorded
        self._updated: Hashable = None  # the key of the last update without a graph
        self._options: int | None = None  # of the optimizer in the last call
        self._new_options = 0

    def __call__(self, batch: Batch, at: str, facts: Facts, adds: bool) -> Tensor | None:
        """Train on a batch, or add its gradients to those of other batches.

        Returns the loss (), which the next call overwrites. None if this step can't have a graph. Nothing has been
        changed then, and a warning has said why if later steps can't have one, either.
        """
        options = self._stable_options()
        updates = options is not None and not _have_hooks(facts.state.parameters)
        if self.watches:
            for p in facts.state.parameters:
                if p.grad is not None:
                    p.grad = None
        self._lane.follow()
        kind = self.kind(batch, at, facts, updates and options, updates, adds)
        if batch.operators.num_vertices > self.max_vertices(batch):
            return None
        value, reason = None, self.refusal(batch, kind)
        if reason is None:
            value = self.attempt(batch, kind, partial(self._trained, batch, kind, facts, updates, adds))
            reason = self.refusal(batch, kind)
        if reason is not None:
            self.say(reason)
        return value

    def update(self, exchanged: bool) -> Tensor | None:
        """Take the step of `PlainStep.update` by a graph. Returns the loss (), which the next call overwrites.

        The result is None if there is no graph. Nothing has been changed then. The first update runs kernel by kernel,
        and the second one is recorded.
        """
        step = self._step
        options = self._stable_options()
        if not self._updates or options is None or not self._lane.recorded():
            return None
        self._lane.follow()
        key = "update", self.facts().number, options, settings(), step.reached, exchanged
        graph_and_loss: tuple[Graph, Tensor] | None = self._lane.get(key)
        if graph_and_loss is None:
            is_first, self._updated = key != self._updated, key
            if is_first:
                return None
            sums, reached = step.sums(), step.reached
            loss = self._lane.arena.take("updated", NOTHING, lambda size: (), sums.dtype)
            with self._lane.stream():
                try:
                    (graph,) = self._lane.record([lambda: loss.copy_(step.update(exchanged))])
                except (NotCapturable, torch.OutOfMemoryError):
                    step.clear_gradients()  # of the recording, which have no values
                    step.reached = reached
                    self._updates = False
                    return None
            step.optimizer.note_state()
            graph_and_loss = graph, loss
            self._lane.keep(key, graph_and_loss)
        graph_and_loss[0].replay()
        step.reached = frozenset()
        return graph_and_loss[1]

    def computed(self, replica: Replica, inputs: Loaded, kind: Kind) -> Tensor:
        batch, modules = inputs.batch, cast(StepModules, replica.network)
        with without_cached_casts(self.device.type):
            outputs = modules.network(batch.features, inputs.operators, *batch.further)
            check_output(outputs, getattr(inputs.buffers.size, kind.rows))
            loss = _row_loss(modules, batch)(outputs, cast(Tensor, batch.targets), cast(Tensor, batch.rows))
        kind.dtype = loss.dtype
        return loss

    def _stable_options(self) -> int | None:
        """A number for what graphs of updates bake in of the optimizer. None if they can't hold its step.

        They can't if it is not known, or if an option besides its learning rate changes in every step.
        """
        step, optimizer = self._step, self._step.optimizer
        if not step.fuses:
            return None
        if self.watches or self._options is None:
            before, self._options = self._options, optimizer.settings()
            changed = before is not None and self._options != before
            self._new_options = self._new_options + 1 if changed else 0
            if optimizer.has_other_state():
                self._lane.clear()
                optimizer.note_state()
        optimizer.follow_rates(self.device)
        return None if self._new_options > MAX_NEW_STATES else self._options

    def _trained(self, batch: Batch, kind: Kind, facts: Facts, updates: bool, adds: bool) -> Tensor:
        """Train on a batch by its graph, which is recorded if there is none.

        updates: whether the graph holds the update of the weights, or of the sums of `add`
        """
        step, is_done = self._step, False
        # The function of the user counts targets outside of the graph, without those of added rows.
        from_user = adds and (step.weight is not None or _row_loss(step.modules, batch).divisor is None)
        weight = step.weight_of(cast(Tensor, batch.targets)) if from_user else None
        program: _Program | None = self._lane.get((kind, kind.size_of(batch.operators)))
        if program is None:
            program = self.graphs(self._lane, kind, batch, partial(self._record, batch, kind, updates, adds, weight))
            is_done = updates
            if program.graph is None:
                loss = program.loss.clone()
                self._lane.clear()
                return loss
        if not is_done:
            program.load(batch, weight)
            assert program.graph is not None
            program.graph.replay()
            step.reached |= program.reached
        if not updates:
            joined = self._joined.get(facts.state.tensors, facts.state.parameters, program.learned)
            torch.autograd.backward(joined, [flat.clone() for flat in program.gradients])
            step.finish(program.loss.clone(), program.weight.clone() if adds else None)
        return program.loss

    def _record(
        self, batch: Batch, kind: Kind, updates: bool, adds: bool, weight: Tensor | None, size: BatchSize
    ) -> _Program:
        """Record the step on buffers that hold a batch. If the graph holds the update, train on the batch first."""
        step, lane, arena = self._step, self._lane, self._lane.arena
        loss = _row_loss(step.modules, batch)
        divisor: Any = loss.divisor
        inputs = loaded(arena, size, kind, batch, loss.ignored)
        # Buffers and remembered fields of the operators outlive the step, so the graphs' memory can't hold them.
        inputs.operators.read(kind.fields or [])
        kind_of_weight = step.sums().dtype if adds else torch.float32
        program = _Program(
            inputs,
            arena.take("loss", NOTHING, lambda size: (), kind.dtype),
            arena.take("weight", NOTHING, lambda size: (), kind_of_weight),
        )
        program.load(batch, weight)
        replica = Replica(step.modules, copies_buffers=False)
        parameters = list(step.modules.parameters())

        def compute(needed: list[int]) -> tuple[Tensor | None, ...]:
            """The gradients of some parameters."""
            value = self.computed(replica, inputs, kind)
            program.loss.copy_(value.detach())
            if adds and weight is None:
                program.weight.copy_(divisor(inputs.batch.targets, inputs.batch.rows))
            return torch.autograd.grad(value, [replica.parameters[i] for i in needed], allow_unused=True)

        def train() -> None:
            needed = [i for i, p in enumerate(replica.parameters) if p.requires_grad]
            for i, grad in zip(needed, compute(needed), strict=True):
                parameters[i].grad = grad
            program.reached = step.with_gradients() if adds else program.reached
            with torch.autocast(self.device.type, enabled=False):
                step.finish(program.loss, program.weight if adds else None)

        def differentiate() -> None:
            grads = compute([i for group in program.learned for i in group])
            torch._foreach_copy_(targets, grads)

        with lane.stream():
            is_first = not any(key[0] is kind for key in lane.recorded())
            with trial() if not updates else nullcontext(), lane.memory():
                if updates:
                    train()
                else:
                    numbers = self._first_call(inputs, kind)
            if updates:
                step.optimizer.note_state()
            else:
                program.learned = groups_of(replica.parameters, numbers)
                program.gradients, targets = gradient_buffers(arena, replica.parameters, program.learned)
            if is_first and size != arena.capacity:
                self._reserve(batch, kind, loss.ignored)
            try:
                (program.graph,) = lane.record([train if updates else differentiate])
                inputs.buffers.complete()
            except (NotCapturable, torch.OutOfMemoryError) as error:
                step.clear_gradients()  # of the recording, which have no values
                if not updates:
                    raise
                if isinstance(error, NotCapturable):
                    kind.refused = str(error)
                else:
                    self._too_large = batch.operators.num_vertices
        return program

    def _first_call(self, inputs: Loaded, kind: Kind) -> list[int]:
        """Run both passes. Returns the numbers of the parameters that get a gradient."""
        with forked_random_numbers(self.device):
            replica = Replica(self._step.modules, copies_buffers=True)
            return with_gradients(self.computed(replica, inputs, kind), replica.parameters)

    def _reserve(self, batch: Batch, kind: Kind, ignored: float | None) -> None:
        """Let the graphs have the memory of a step of the largest batch, before the first one is recorded.

        The memory of small steps has no room for the tensors of large ones, and it is never returned.
        """
        largest = loaded(self._lane.arena, self._lane.arena.capacity, kind, batch, ignored)
        largest.operators.read(kind.fields or [])
        # If it fails, each size takes its memory when it is recorded.
        with suppress(NotCapturable, torch.OutOfMemoryError), trial(), self._lane.reserving():
            self._first_call(largest, kind)


def _row_loss(modules: StepModules, batch: Batch) -> RowLoss:
    assert batch.targets is not None
    loss = row_loss(modules.loss, batch.targets)
    assert loss is not None, "only known losses have graphs"
    return loss


def _have_hooks(parameters: Iterable[Tensor]) -> bool:
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
