"""Training steps of batches of any size as CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.added_rows import check_added_rows, is_known
from diffnet.cuda_graphs.buffers import BatchBuffers, NotCounted
from diffnet.cuda_graphs.calls import kind_of, rows_of
from diffnet.cuda_graphs.lane import Graph, Lane, Recorder
from diffnet.cuda_graphs.loss_rows import LossRows, loss_rows
from diffnet.cuda_graphs.module_state import MAX_NEW_STATES, KnownStates, settings
from diffnet.cuda_graphs.plain_step import PlainStep, StepBatch
from diffnet.cuda_graphs.recording import ROWS, check_output, preserved, trial
from diffnet.cuda_graphs.sizes import BatchSize, MeshSizes, largest_batch, max_vertices, size_of
from diffnet.cuda_graphs.static_operators import Fields, StaticOperators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.launcher import compile_ahead
from diffnet.ops.common.precision import compute_dtype

MAX_CONFIGS = 100
NOTHING = BatchSize(0, 0)


class Expected(NamedTuple):
    """The meshes to come.

    meshes: the sizes of all of them
    batch_meshes, batch_vertices: the limits of a batch, see `largest_batch`
    """

    meshes: MeshSizes
    batch_meshes: int | None
    batch_vertices: int | None

    def largest(self, counted: frozenset[str] = frozenset(), most: int | None = None) -> BatchSize:
        """The size of the largest batch, without meshes of more vertices than `most`."""
        sizes = self.meshes.counted(counted)
        limits = [n for n in (self.batch_vertices, most) if n is not None]
        fitting = [size for size in sizes if most is None or size.vertices <= most] or [BatchSize(1, 1)]
        return largest_batch(fitting, self.batch_meshes, min(limits, default=None))


@dataclass
class _Captured:
    """The buffers of a step, and its graph once it is recorded.

    loss: a buffer ()
    """

    batch: StepBatch
    operators: StaticOperators
    loss: Tensor
    graph: Graph | None = None

    def load(self, batch: StepBatch) -> None:
        if self.batch.rows is not None:
            self.batch.rows.fill_(len(batch.targets))
        self.operators.buffers.load(batch.operators, batch.features, batch.targets, *batch.further)


@dataclass(eq=False)
class _Config:
    """Facts about steps that share graphs. They hold for batches of any size.

    rows: the count of `BatchSize` that gives the rows of the outputs
    counted: the counts of `BatchSize` that the network and the targets need
    max_vertices: of a batch that should have a graph, see the function of this name
    loss_rows: how the loss takes added rows. None until a batch has shown it.
    loss_dtype: the dtype of the loss
    fields: of the operators that the network reads, once a step has run
    largest: the size of the largest expected batch
    refused: why it runs without graphs
    adds: whether the gradients are added to those of other batches, and the optimizer takes no step
    """

    rows: str
    counted: frozenset[str]
    max_vertices: int
    adds: bool
    loss_rows: LossRows | None = None
    loss_dtype: torch.dtype = torch.float32
    fields: Fields | None = None
    largest: BatchSize = NOTHING
    refused: str | None = None


class StepGraphs:
    """Runs a training step on buffers, and replays CUDA graphs of it. One graph serves all batches of about one size.

    All kernels are compiled before the first step. The first step of a size runs kernel by kernel, and the graph is
    recorded after it. A replay runs the same kernels and draws the same random numbers. So results don't depend on the
    order in which sizes occur, if the meshes to come are known.

    network: the network of the step
    ignore_index: see `loss_rows`
    device: that of the network
    expected: the meshes to come, if they are known. The buffers are made for the largest batch of these.
    watches: whether each call looks for changes of the modules and of the optimizer, which takes time
    """

    def __init__(
        self,
        step: PlainStep,
        network: nn.Module,
        ignore_index: int | None,
        device: torch.device,
        recorder: Recorder,
        expected: Expected | None,
        watches: bool,
    ) -> None:
        self._step, self._network, self._ignore_index, self._expected = step, network, ignore_index, expected
        self._watches = watches
        self.device = device
        self._states = KnownStates(step.modules)
        self._configs: dict[Hashable, _Config] = {}
        self._lane: Lane[Any] = Lane(device, recorder)  # a _Captured for each size, and what `update` needs
        self._updates = True  # whether graphs of updates can be recorded
        self._updated: Hashable = None  # the key of the last update without a graph
        # What graphs bake in: the numbers of the modules' state and of the optimizer's options, and the settings.
        self._facts: tuple[int, int, Hashable] | None = None
        self._is_known = False  # the network of these facts
        self._options: int | None = None  # of the optimizer in the last call
        self._new_options = 0
        self._too_large = float("inf")
        self._meets_large = False
        # The most eigenpairs and vertices that are expected.
        self._known = 0, 0
        if expected is not None:
            self._known = expected.meshes.k, expected.largest().vertices

    def __call__(self, batch: StepBatch, outputs_at: str, adds: bool) -> tuple[Tensor | None, str | None]:
        """Train on a batch, or add its gradients to those of other batches, see `PlainStep.add`.

        Returns the loss (), which the next call overwrites, and why some later steps can't have a graph, if so. The
        loss is None if this step can't have one. Nothing has been changed then.
        """
        self._lane.follow()
        if self._watches or self._facts is None:
            reason = self._watched()
            if reason is not None:
                return None, reason
        self._step.optimizer.follow_rates(self.device)
        reason = self._refused(batch, outputs_at)
        if reason is not None:
            return None, reason
        config = self._config(batch, outputs_at, adds)
        if batch.operators.num_vertices > self._max_vertices(batch, config):
            return None, None
        if config.refused is None and batch.operators.num_vertices < self._too_large:
            try:
                return self._on_buffers(batch, config)
            except NotCapturable as error:
                config.refused = str(error)
            except torch.OutOfMemoryError:
                self._too_large = batch.operators.num_vertices
            if config.refused is None:  # no error keeps the tensors of the failed call alive here
                self._lane.clear()
        return None, config.refused or self._no_memory()

    def _watched(self) -> str | None:
        """Find changes of the modules and of the optimizer, and drop gradients from before the step.

        Returns why no graph can take the step, if so.
        """
        optimizer = self._step.optimizer
        reason = optimizer.refused()
        self._step.capturable = reason is None
        if reason is not None:
            return reason
        if isinstance(self._network, nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel exchanges gradients in Python"
        state, number, changing = self._states.current()
        if state.has_inner_hooks():
            return "a module has hooks, which a graph would not call"
        options = optimizer.settings()
        changing = self._changing_option(options) or changing
        if changing is not None:
            return changing
        if optimizer.has_other_state():
            self._lane.clear()
            optimizer.note_state()
        for p in state.parameters:
            if p.grad is not None:
                p.grad = None
        if self._facts is None or self._facts[0] != number:
            self._is_known = is_known(self._network)
        self._facts = number, options, settings()
        return None

    def update(self) -> Tensor | None:
        """Take the step of `PlainStep.update` by a graph. Returns the loss (), which the next call overwrites.

        The result is None if there is no graph. Nothing has been changed then. The first update runs kernel by kernel,
        and the second one is recorded.
        """
        step, optimizer = self._step, self._step.optimizer
        if not self._updates or not self._lane.recorded():
            return None
        facts: Hashable = self._facts
        if self._watches:
            if optimizer.refused() or optimizer.has_other_state():
                return None
            facts = self._states.current()[1], optimizer.settings()
        self._lane.follow()
        optimizer.follow_rates(self.device)
        key = "update", facts
        found: tuple[Graph, Tensor] | None = self._lane.get(key)
        if found is None:
            is_first, self._updated = key != self._updated, key
            if is_first:
                return None
            sums = step.sums()
            loss = self._lane.arena.take("updated", NOTHING, lambda size: (), sums.dtype)
            with self._lane.stream():
                try:
                    (graph,) = self._lane.record([lambda: loss.copy_(step.update())])
                except (NotCapturable, torch.OutOfMemoryError):
                    step.clear_gradients()  # of the recording, which have no values
                    self._updates = False
                    return None
            optimizer.note_state()
            found = graph, loss
            self._lane.keep(key, found)
        found[0].replay()
        return found[1]

    def _no_memory(self) -> str:
        return f"{self._too_large} vertices don't fit into the memory"

    def clear(self) -> None:
        """Drop all graphs, and return their memory."""
        self._lane.clear()

    def _refused(self, batch: StepBatch, outputs_at: str) -> str | None:
        """Why no graph can take this batch."""
        rows = rows_of(outputs_at, batch.operators)
        for x in (batch.targets, *batch.further):
            if not isinstance(x, Tensor) or x.shape[:1] != (rows,):
                what = "the targets" if x is batch.targets else "a further argument"
                return f"{what} should be a tensor of {rows} rows, got {_described(x)}"
            if x.device != self.device:
                return f"an argument is on {x.device}, and the features are on {self.device}"
            if x.requires_grad:
                return "the targets or a further argument need a gradient, which a graph would not compute"
            rows = len(batch.operators)
        return "the features need a gradient, which a graph would not compute" if batch.features.requires_grad else None

    def _changing_option(self, options: int) -> str | None:
        """A reason to run without graphs while the optimizer's options change in every step."""
        before, self._options = self._options, options
        changed = before is not None and options != before
        self._new_options = self._new_options + 1 if changed else 0
        if self._new_options <= MAX_NEW_STATES:
            return None
        return "an option of the optimizer besides its learning rate changes in every step, as OneCycleLR changes betas"

    def _max_vertices(self, batch: StepBatch, config: _Config) -> int:
        """The vertices of the largest batch that should have a graph, see `max_vertices`.

        The graphs keep their memory while a larger batch runs, so they serve batches of half its size then.
        """
        limit = config.max_vertices
        if not self._meets_large and max(self._known[1], batch.operators.num_vertices) > limit:
            self._meets_large = True
            if self._lane.arena.capacity.vertices > limit // 2:
                self._lane.clear()
        return limit // 2 if self._meets_large else limit

    def _config(self, batch: StepBatch, outputs_at: str, adds: bool) -> _Config:
        if len(self._configs) > MAX_CONFIGS:
            self._lane.clear()
            self._configs.clear()
            self._states.clear()
        kinds = [(x.dtype, x.shape[1:]) for x in (batch.features, batch.targets, *batch.further)]
        # Buffers for several meshes also hold empty meshes, so they are checked on their own.
        alike = self._is_known or len(batch.operators) == 1
        key = self._facts, outputs_at, adds, alike, kind_of(batch.operators), *kinds
        if key not in self._configs:
            dtype = compute_dtype(batch.features, batch.operators.evecs)
            most = max_vertices(max(self._known[0], batch.operators.k), dtype)
            self._configs[key] = _Config(ROWS[outputs_at], frozenset({outputs_at} & {"faces", "edges"}), most, adds)
        return self._configs[key]

    def _on_buffers(self, batch: StepBatch, config: _Config) -> tuple[Tensor | None, str | None]:
        """Train on a batch by its graph, which is recorded if there is none. See `__call__` for the results."""
        if config.loss_rows is None:
            config.loss_rows = self._examined(batch, config)
            if config.loss_rows is None:
                return None, None
            if self._expected is not None:
                config.largest = self._expected.largest(config.counted, self._max_vertices(batch, config)).rounded()
        size = size_of(batch.operators, config.counted).rounded()
        captured: _Captured | None = self._lane.get((config, size))
        if captured is None:
            self._lane.make_room(size.union(config.largest))
            return self._record(batch, size, config, config.loss_rows)
        captured.load(batch)
        assert captured.graph is not None
        captured.graph.replay()
        return captured.loss, None

    def _examined(self, batch: StepBatch, config: _Config) -> LossRows | None:
        """Compile all kernels, and find out what the network reads and how the loss takes added rows."""
        step, modules = self._step, self._step.modules
        while True:
            size = size_of(batch.operators, config.counted).rounded()
            self._lane.make_room(size)
            try:
                given = self._loaded(batch, size, config, LossRows(0, False)).batch  # any loss takes targets of 0
                with self._lane.stream(), preserved(modules, self.device), trial():
                    # Without gradients, other kernels would run. No step needs them, and compiling them takes long.
                    compile_ahead(lambda: step.loss(given), modules.parameters())  # noqa: B023
                    outputs = step.outputs(given)
                    check_output(outputs, getattr(size, config.rows))
                    config.loss_dtype = step.loss_of(outputs, given).dtype
                    outputs = outputs.detach()[: len(batch.targets)]
                if not self._is_known:
                    arguments = batch.features, batch.operators, batch.further
                    check_added_rows(self._network, config.rows, size, config.counted, *arguments)
                with preserved(modules, self.device):
                    return loss_rows(step.values, outputs, batch.targets, self._ignore_index)
            except NotCounted as missing:
                config.counted |= {missing.args[0]}

    def _loaded(self, batch: StepBatch, size: BatchSize, config: _Config, added: LossRows) -> _Captured:
        """Buffers that hold this batch."""
        arena = self._lane.arena
        buffers = BatchBuffers(arena, size, config.counted, batch.operators)
        operators = StaticOperators(buffers)

        def take(name: str, like: Tensor, rows: str, rest: float = 0) -> Tensor:
            return buffers.add(arena.take(name, size, lambda s: (getattr(s, rows), *like.shape[1:]), like.dtype), rest)

        given = StepBatch(
            take("features", batch.features, "vertices"),
            operators,
            take("targets", batch.targets, config.rows, added.target),
            tuple(take(f"further {i}", x, "meshes") for i, x in enumerate(batch.further)),
            arena.take("rows", size, lambda s: (), torch.int64) if added.is_each else None,
        )
        loss = arena.take("loss", NOTHING, lambda size: (), config.loss_dtype)
        captured = _Captured(given, operators, loss)
        captured.load(batch)
        return captured

    def _record(self, batch: StepBatch, size: BatchSize, config: _Config, added: LossRows) -> tuple[Tensor, str | None]:
        """Train on the first batch of its size, and record the step."""
        step, is_first = self._step, config.fields is None
        captured = self._loaded(batch, size, config, added)

        def run() -> None:
            captured.loss.copy_(step.add(captured.batch) if config.adds else step(captured.batch))

        with self._lane.stream():
            # Buffers and remembered fields of the operators outlive the step, so the graphs' memory can't hold them.
            captured.operators.read(config.fields or [])
            with nullcontext() if is_first else self._lane.memory():
                run()
            step.optimizer.note_state()
            config.fields = captured.operators.fields_read()
            if is_first and size != self._lane.arena.capacity:
                self._reserve(batch, config, added)
            try:
                (captured.graph,) = self._lane.record([run])
                captured.operators.buffers.complete()
                self._lane.keep((config, size), captured)
            except NotCapturable as error:
                config.refused = str(error)
            except torch.OutOfMemoryError:
                self._too_large = batch.operators.num_vertices
            if captured.graph is None:
                step.clear_gradients()  # of the recording, which have no values
        if captured.graph is None and config.refused is None:
            loss = captured.loss.clone()
            self._lane.clear()
            return loss, self._no_memory()
        return captured.loss, config.refused

    def _reserve(self, batch: StepBatch, config: _Config, added: LossRows) -> None:
        """Let the graphs have the memory of a step of the largest batch, before the first one is recorded.

        The memory of small steps has no room for the tensors of large ones, and it is never returned.
        """
        modules = self._step.modules
        largest = self._loaded(batch, self._lane.arena.capacity, config, added)
        largest.operators.read(config.fields or [])
        weights = [p for p in modules.parameters() if p.requires_grad]
        # If it fails, each size takes its memory when it is recorded.
        failing = suppress(NotCapturable, torch.OutOfMemoryError)
        with failing, preserved(modules, self.device), trial(), self._lane.reserving():
            torch.autograd.grad(self._step.loss(largest.batch), weights, allow_unused=True)


def _described(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
