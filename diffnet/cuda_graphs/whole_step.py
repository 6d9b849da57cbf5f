"""Training steps of batches of any size as CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import Batch
from diffnet.cuda_graphs.lane import Graph, Lane
from diffnet.cuda_graphs.losses import RowLoss, is_known, row_loss
from diffnet.cuda_graphs.module_state import MAX_NEW_STATES, settings
from diffnet.cuda_graphs.plain_step import PlainStep, StepModules, clear_gradients
from diffnet.cuda_graphs.recording import Replica, check_output, forked_random_numbers, trial, without_cached_casts
from diffnet.cuda_graphs.runtime import (
    NOTHING,
    Expected,
    Facts,
    GraphRuntime,
    Inputs,
    Kind,
    Settings,
    check_rows,
    inputs_of,
)
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.ops.common.cuda_graph import NotCapturable


@dataclass
class _Program:
    """A step on buffers of one size.

    loss, weight: buffers (); the weight is that of the batch in `add`
    reached: the numbers of the optimizer's parameters that get a gradient
    graph: None if it can't be recorded
    """

    inputs: Inputs
    loss: Tensor
    weight: Tensor
    reached: frozenset[int] = frozenset()
    graph: Graph | None = None

    def load(self, batch: Batch, weight: Tensor | None) -> None:
        self.inputs.load(batch)
        if weight is not None:
            self.weight.copy_(weight)


class StepGraphs(GraphRuntime):
    """Runs a training step on buffers, and replays CUDA graphs of it. One graph serves all batches of about one size.

    A graph holds the forward pass, a known loss, the backward pass, and the step of a known optimizer.

    All kernels are compiled before the first step. The first step of a size runs kernel by kernel, and the graph is
    recorded after it. A replay runs the same kernels and draws the same random numbers. So results don't depend on the
    order in which sizes occur, if the meshes to come are known.
    """

    def __init__(self, step: PlainStep, settings: Settings, device: torch.device, expected: Expected | None) -> None:
        super().__init__(step.modules, step.modules.network, settings, "training", expected)
        self.device = device
        self._step = step
        self._lane: Lane[Any] = Lane(device, settings.recorder)  # a program for each kind and size, and updates
        self.lanes.append(self._lane)
        self._has_known_loss = is_known(step.modules.loss)
        self._holds: dict[tuple[int, bool], bool] = {}  # for states of the modules, and for labels and numbers
        self._updates = True  # whether graphs of updates can be recorded
        self._updated: Hashable = None  # the key of the last update without a graph
        self._options: int | None = None  # of the optimizer in the last call
        self._new_options = 0

    def step_facts(self, targets: Any) -> Facts | None:
        """The facts if one graph may hold a step with such targets: the loss and the optimizer are known.

        No parameter may have hooks, and no option of the optimizer besides its learning rate may change in every step.
        """
        if not self._has_known_loss or not isinstance(targets, Tensor) or self._stable_options() is None:
            return None
        facts = self.facts()
        key = facts.number, targets.is_floating_point()
        if key not in self._holds:
            self._holds[key] = row_loss(self._step.modules.loss, targets) is not None
        hooks = [p for p in facts.state.parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        return None if hooks or not self._holds[key] else facts

    def __call__(self, batch: Batch, at: str, facts: Facts, adds: bool) -> Tensor | None:
        """Train on a batch, or add its gradients to those of other batches. `step_facts` has given the facts.

        Returns the loss (), which the next call overwrites. None if this step can't have a graph. Nothing has been
        changed then, and a warning has said why if later steps can't have one, either.
        """
        reason = facts.refused or check_rows(batch, at)
        if batch.features.requires_grad:
            reason = "the features need a gradient, which a graph would not compute"
        if reason is not None:
            self.say(reason)
            return None
        if batch.operators.num_vertices > self.max_vertices(batch):
            return None
        self._lane.follow()
        if self.watches:
            clear_gradients(facts.state.parameters)
        kind = self.kind(batch, at, facts, self._options, adds)
        return self.attempt(batch, kind, partial(self._trained, batch, kind, adds))

    def update(self, with_others: bool) -> Tensor | None:
        """Take the step of `PlainStep.update` by a graph. Returns the loss (), which the next call overwrites.

        The result is None if there is no graph. Nothing has been changed then. The first update runs kernel by kernel,
        and the second one is recorded.
        """
        step, options = self._step, self._stable_options()
        if not self._updates or options is None or not self._lane.recorded():
            return None
        self._lane.follow()
        key = "update", self.facts().number, options, settings(), step.reached, with_others
        graph_and_loss: tuple[Graph, Tensor] | None = self._lane.get(key)
        if graph_and_loss is None:
            is_first, self._updated = key != self._updated, key
            if is_first:
                return None
            sums, reached = step.sums(), step.reached
            loss = self._lane.arena.take("updated", NOTHING, lambda size: (), sums.dtype)
            with self._lane.stream():
                try:
                    (graph,) = self._lane.record([lambda: loss.copy_(step.update(with_others))])
                except (NotCapturable, torch.OutOfMemoryError):
                    step.clear_gradients()  # of the recording, which have no values
                    self._updates = False
                    return None
                finally:
                    step.reached = reached
            step.optimizer.note_state()
            graph_and_loss = graph, loss
            self._lane.keep(key, graph_and_loss)
        graph_and_loss[0].replay()
        step.reached = frozenset()
        return graph_and_loss[1]

    def loss_of(self, batch: Batch) -> RowLoss:
        return _row_loss(self._step.modules, batch)

    def computed(self, replica: Replica, inputs: Inputs, kind: Kind) -> Tensor:
        batch, modules = inputs.batch, cast(StepModules, replica.network)
        with without_cached_casts(self.device.type):
            outputs = modules.network(batch.features, inputs.operators, *batch.further)
            check_output(outputs, getattr(inputs.buffers.size, kind.rows))
            loss = _row_loss(modules, batch)(outputs, cast(Tensor, batch.targets), batch.rows)
        kind.dtype = loss.dtype
        return loss

    def _stable_options(self) -> int | None:
        """A number for what graphs of updates bake in of the optimizer. None if they can't hold its step.

        They can't if it is not known, or if an option besides its learning rate changes in every step.
        """
        optimizer = self._step.optimizer
        if not self._step.fuses:
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

    def _trained(self, batch: Batch, kind: Kind, adds: bool) -> Tensor:
        """Train on a batch by its graph, which is recorded after a first step if there is none."""
        step = self._step
        # A function of the user counts targets outside of the graph, where there are no added rows.
        from_user = adds and (step.weight is not None or self.loss_of(batch).divisor is None)
        weight = step.weight_of(cast(Tensor, batch.targets)) if from_user else None
        program: _Program | None = self._lane.get((kind, kind.size_of(batch.operators)))
        if program is None:
            program = self.graphs(self._lane, kind, batch, partial(self._record, batch, kind, adds, weight))
            if program.graph is None:
                loss = program.loss.clone()
                self._lane.clear()
                return loss
        else:
            program.load(batch, weight)
            assert program.graph is not None
            program.graph.replay()
            step.reached |= program.reached
        return program.loss

    def _record(self, batch: Batch, kind: Kind, adds: bool, weight: Tensor | None, size: BatchSize) -> _Program:
        """Train on the first batch of its size, and record the step.

        weight: of the batch in `add`, (). None if the loss says it.
        """
        step, lane, arena = self._step, self._lane, self._lane.arena
        loss = self.loss_of(batch)
        divisor: Any = loss.divisor
        inputs = inputs_of(arena, size, kind, batch, loss)
        dtype = step.sums().dtype if adds else torch.float32
        program = _Program(
            inputs,
            arena.take("loss", NOTHING, lambda size: (), kind.dtype),
            arena.take("weight", NOTHING, lambda size: (), dtype),
        )
        program.load(batch, weight)
        replica = Replica(step.modules, copies_buffers=False)
        learned = [
            (p, x) for p, x in zip(step.modules.parameters(), replica.parameters, strict=True) if x.requires_grad
        ]

        def train() -> None:
            value = self.computed(replica, inputs, kind)
            program.loss.copy_(value.detach())
            if adds and weight is None:
                program.weight.copy_(divisor(inputs.batch.targets, inputs.batch.rows))
            grads = torch.autograd.grad(value, [x for _, x in learned], allow_unused=True)
            for (p, _), grad in zip(learned, grads, strict=True):
                p.grad = grad
            program.reached = step.with_gradients() if adds else frozenset()
            with torch.autocast(self.device.type, enabled=False):
                step.finish(program.loss, program.weight if adds else None, is_recorded=True)
            step.clear_gradients()

        is_first = not any(key[0] is kind for key in lane.recorded())
        with lane.stream():
            with lane.memory():
                train()
            step.optimizer.note_state()
            if is_first and size != arena.capacity:
                self._reserve(batch, kind)
            try:
                (program.graph,) = lane.record([train])
                inputs.buffers.complete()
            except NotCapturable as error:
                kind.refused = str(error)
            except torch.OutOfMemoryError:
                self.too_large = batch.operators.num_vertices
            if program.graph is None:
                step.clear_gradients()  # of the recording, which have no values
        return program

    def _reserve(self, batch: Batch, kind: Kind) -> None:
        """Let the graphs have the memory of a step of the largest batch, before the first one is recorded.

        The memory of small steps has no room for the tensors of large ones, and it is never returned.
        """
        largest = inputs_of(self._lane.arena, self._lane.arena.capacity, kind, batch, self.loss_of(batch))
        # If it fails, each size takes its memory when it is recorded.
        failing = suppress(NotCapturable, torch.OutOfMemoryError)
        with failing, forked_random_numbers(self.device), trial(), self._lane.reserving():
            self.first_call(Replica(self._step.modules, copies_buffers=True), largest, kind)


def _row_loss(modules: StepModules, batch: Batch) -> RowLoss:
    assert batch.targets is not None
    loss = row_loss(modules.loss, batch.targets)
    assert loss is not None, "only known losses have graphs"
    return loss
