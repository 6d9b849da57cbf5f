"""Training steps of batches of any size as CUDA graphs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import BatchBuffers, NotCounted, Rows
from diffnet.cuda_graphs.lane import Graph, Lane, Recorder, record_graph
from diffnet.cuda_graphs.recording import preserved, trial
from diffnet.cuda_graphs.sizes import BatchSize, largest_batch, max_vertices, size_of
from diffnet.cuda_graphs.static_operators import Fields, StaticOperators
from diffnet.data import UNLABELED, TargetsAt
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.launcher import compile_ahead
from diffnet.train.batches import Batch
from diffnet.train.device import matmul_dtype
from diffnet.train.options import TrainOptions


@dataclass
class _Captured:
    """The buffers of a step and its graph. Without a graph, the step runs on the buffers kernel by kernel."""

    batch: Batch
    operators: StaticOperators
    buffers: BatchBuffers
    graph: Graph | None = None

    def load(self, batch: Batch) -> None:
        missing = math.nan if batch.labels.is_floating_point() else UNLABELED
        rows = [Rows(self.batch.features, batch.features), Rows(self.batch.labels, batch.labels, missing)]
        if batch.rotations is not None and self.batch.rotations is not None:
            rows.append(Rows(self.batch.rotations, batch.rotations))
        self.buffers.load(batch.operators, *rows)


class CapturedSteps:
    """Runs a training step on buffers, and replays CUDA graphs of it. One graph serves all batches of about one size.

    All kernels are compiled before the first step. The first step of a size runs kernel by kernel, and the graph is
    recorded after it. A replay runs the same kernels and draws the same random numbers, so results don't depend on the
    order in which sizes occur. A batch with more vertices than `max_captured` runs without buffers and graphs.

    loss: the loss of the network on a batch, without side effects
    step: a training step. It reads and writes tensors that stay in place, and never waits for the GPU. It may call
        backward and an optimizer made with `capturable=True` whose learning rate is a tensor. Returns the loss ().
    network: the network that is trained
    labels_at: the elements that have labels, or "meshes"
    meshes: the operators of all training meshes. The buffers are made for the largest batch of these.
    options: of the run, for the limits of a batch and the precision
    """

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        step: Callable[[Batch], Tensor],
        network: nn.Module,
        labels_at: TargetsAt,
        meshes: Sequence[Operators],
        options: TrainOptions,
        device: torch.device,
        recorder: Recorder = record_graph,
    ) -> None:
        self._loss_of, self._step, self._network, self._labels_at = loss, step, network, labels_at
        self._meshes, self._batch_meshes, self._batch_vertices = meshes, options.batch_meshes, options.batch_vertices
        largest = largest_batch([size_of(o) for o in meshes], options.batch_meshes, options.batch_vertices).vertices
        limit = max_vertices(max(o.k for o in meshes), matmul_dtype(options.precision, device))
        # The graphs keep their memory while a larger batch runs, so they serve batches of half its size then.
        self._max_captured = limit if largest <= limit else limit // 2
        self._lane: Lane[_Captured] = Lane(device, recorder)
        self._counted: frozenset[str] | None = None
        self._fields: Fields | None = None  # that the network reads, once a step has run
        self._said: set[str] = set()

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch. Returns the loss, which the next call may overwrite.

        Raises NotCapturable if the network can't be captured. Nothing has been changed then.
        """
        if batch.operators.num_vertices > self._max_captured:
            return self._step(batch)
        if self._counted is None:
            self._counted = self._count(batch)
            sizes = [size_of(o, self._counted) for o in self._meshes]
            fitting = [size for size in sizes if size.vertices <= self._max_captured]
            most = min(self._batch_vertices or self._max_captured, self._max_captured)
            self._lane.make_room(largest_batch(fitting, self._batch_meshes, most).rounded())
        size = size_of(batch.operators, self._counted).rounded()
        self._lane.make_room(size)
        captured = self._lane.get(size)
        if captured is None:
            self._record(batch, size, self._counted)
        else:
            captured.load(batch)
            if captured.graph is None:
                self._run(captured.batch)
            else:
                captured.graph.replay()
        return self._loss()

    def _count(self, batch: Batch) -> frozenset[str]:
        """Run the network once to find the counts of `BatchSize` that it needs."""
        counted = frozenset({self._labels_at} & {"faces", "edges"})
        while True:
            size = size_of(batch.operators, counted).rounded()
            self._lane.make_room(size)
            try:
                on_buffers = self._on_buffers(batch, size, counted).batch
                with self._lane.stream(), preserved(self._network, self._lane.device), trial():
                    # Without gradients, other kernels would run. No step needs them, and compiling them takes long.
                    if not compile_ahead(lambda: self._loss_of(on_buffers), self._network.parameters()):  # noqa: B023
                        with torch.no_grad():
                            self._loss_of(on_buffers)
                return counted
            except NotCounted as missing:
                counted |= {missing.args[0]}

    def _on_buffers(self, batch: Batch, size: BatchSize, counted: frozenset[str]) -> _Captured:
        """Buffers that hold this batch."""
        arena, channels, at = self._lane.arena, batch.features.shape[1], self._labels_at
        buffers = BatchBuffers(arena, size, counted, batch.operators)
        features = arena.take("features", size, lambda s: (s.vertices, channels), batch.features.dtype)
        labels = arena.take("labels", size, lambda s: (getattr(s, at), *batch.labels.shape[1:]), batch.labels.dtype)
        rotations = None
        if batch.rotations is not None:
            rotations = arena.take("rotations", size, lambda s: (s.meshes, 3, 3), batch.rotations.dtype)
        operators = StaticOperators(buffers)
        captured = _Captured(Batch(features, labels, operators, rotations), operators, buffers)
        captured.load(batch)
        return captured

    def _record(self, batch: Batch, size: BatchSize, counted: frozenset[str]) -> None:
        """Train on the first batch of its size, and record the step."""
        captured = self._on_buffers(batch, size, counted)
        self._loss()  # memory that is allocated in a recording would belong to the graph
        with self._lane.stream():
            self._network.zero_grad()  # gradients are made in each step
            # Buffers and remembered fields of the operators outlive the step, so the graphs' memory can't hold them.
            captured.operators.read(self._fields or [])
            with nullcontext() if self._fields is None else self._lane.memory():
                self._run(captured.batch)
                self._network.zero_grad()
            is_first, self._fields = self._fields is None, captured.operators.fields_read()
            if is_first and size != self._lane.arena.capacity:
                self._reserve(batch, counted, self._fields)
            try:
                (captured.graph,) = self._lane.record([lambda: self._run(captured.batch)])
                captured.buffers.complete()
            except (NotCapturable, torch.OutOfMemoryError) as error:
                reason = str(error).splitlines()[0]
                if reason not in self._said:
                    self._said.add(reason)
                    warnings.warn(
                        f"some training steps run without CUDA graphs: {reason}", RuntimeWarning, stacklevel=4
                    )
            self._lane.keep(size, captured)

    def _reserve(self, batch: Batch, counted: frozenset[str], fields: Fields) -> None:
        """Let the graphs have the memory of a step of the largest batch, before the first one is recorded.

        The memory of small steps has no room for the tensors of large ones, and it is never returned.
        """
        largest = self._on_buffers(batch, self._lane.arena.capacity, counted)
        largest.operators.read(fields)
        weights = [p for p in self._network.parameters() if p.requires_grad]
        # If it fails, each size takes its memory when it is recorded.
        failing = suppress(NotCapturable, torch.OutOfMemoryError)
        with failing, preserved(self._network, self._lane.device), trial(), self._lane.reserving():
            torch.autograd.grad(self._loss_of(largest.batch), weights, allow_unused=True)

    def _run(self, batch: Batch) -> None:
        self._loss().copy_(self._step(batch))

    def _loss(self) -> Tensor:
        return self._lane.arena.take("loss", BatchSize(0, 0), lambda size: (), torch.float32)
