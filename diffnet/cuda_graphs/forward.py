"""The forward pass of a network as CUDA graphs that serve batches of any size."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffnet.cuda_graphs.buffers import Batch, Rows
from diffnet.cuda_graphs.gradients import Groups, JoinedParameters, gradient_buffers, groups_of
from diffnet.cuda_graphs.graphed_class import graphed_class, plain_class
from diffnet.cuda_graphs.lane import Graph, Lane
from diffnet.cuda_graphs.module_state import GRAPHS, ModuleState
from diffnet.cuda_graphs.modules import RowWise
from diffnet.cuda_graphs.recording import Replica, check_output, forked_random_numbers, generator_of, preserved, trial
from diffnet.cuda_graphs.runtime import (
    ROWS,
    Expected,
    GraphRuntime,
    Inputs,
    Kind,
    Settings,
    check_rows,
    inputs_of,
    may_have_graphs,
    rows_of,
    uses_graphs,
)
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.ops.common.dispatch import applied
from diffnet.ops.common.launcher import saved_as_usual
from diffnet.shared_launches import compile_before_first_call

M = TypeVar("M", bound=nn.Module)

MAX_LANES = 4  # forward passes whose backward pass is still to come


def graphed(network: M, *, outputs_at: str | None = None, first_visits: int = 1, row_wise: RowWise = ()) -> M:
    """Make a network launch all kernels of a forward or backward pass at once, and return it.

    On small meshes, most of the time of a step goes into launching kernels one by one. A CUDA graph launches them
    together. The graphs are recorded in the first calls. One graph serves all batches of about the same size.

    network: a module that is called with features (V, C), `Operators`, and possibly tensors (B, …) with a row for each
        mesh. It returns one tensor. It is changed in place: its parameters, its state dict and its hooks stay the same,
        its class becomes a subclass. To undo this, write `del network.forward`.
    outputs_at: "vertices", "faces", "edges", "global_mean" or "pairs", of two meshes that follow each other: the rows
        of the returned tensor. None takes the attribute of this name at each call, or "vertices".
    first_visits: how many batches of a size run without graphs before one is recorded. Recording takes some ten times
        as long as a call, so a size that never comes back should not be recorded.
    row_wise: classes of modules of your own that compute each row from this row alone, or exchange rows by the
        operators as those of diffnet do

    Loss, optimizer and loop stay as they are; `GraphedStep` records whole steps. Several forward passes may come before
    one backward pass. Results are those of the network without graphs up to rounding; dropout draws other numbers. Wrap
    the network first and give the result to `DistributedDataParallel`.

    Graphs read buffers that are larger than the batch. The added rows have no mass, edges or eigenvectors, so they
    change nothing in a network of the modules of diffnet and of PyTorch's that compute each row from this row alone.
    Another module may count rows, as `BatchNorm1d` does. A network with one gets a graph for each size of a batch, and
    none if there are many sizes; `row_wise` declares a class of modules to be harmless.

    A call runs without graphs on the CPU, in copies by `DataParallel`, under `torch.compile` and `torch.func`, and if
    the network has several `outputs_at`. It also does so in these cases, and a warning says why, once:

    - A submodule has hooks, or exchanges gradients as `DistributedDataParallel` does.
    - The network reads values back from the GPU, as implicit diffusion does.
    - It has a module that may compute a row from others, and there are many sizes of batches.
    - In its first call, it sets attributes, draws random numbers of Python or NumPy, or uses a tensor that needs a
      gradient and is not a parameter. Or one of its attributes changes in almost every call.
    - More than four forward passes come before a backward pass.
    - The graphs don't fit into the memory.

    Batches whose kernels take longer than launching them also run without graphs, see `sizes.MAX_BYTES`. Gradients of
    gradients are not available.

    A changed network is recorded anew: modes, submodules, functions, numbers, tensors and containers in attributes. A
    number that changes in every step should be a tensor that is changed in place, because recording takes time.

    A graph doesn't notice these, here and in `GraphedStep`:

    - A change of a global variable, of a variable of an enclosing function, of a NumPy array in place, or of an
      attribute of another object than a module, a dataclass or a namespace.
    - What a forward pass does besides computing, such as printing, and what it does in later calls only.
    - In `GraphedStep`, hooks of autograd's own nodes (`AccumulateGrad`).
    - A false declaration in `row_wise`.

    Raises TypeError for anything but a module, and ValueError for an unknown `outputs_at`.

    >>> from diffnet import DiffusionNet
    >>> network = graphed(DiffusionNet(3, 8))
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network should be a module such as DiffusionNet, got {type(network).__name__}")
    where = getattr(network, "outputs_at", "vertices") if outputs_at is None else outputs_at
    if where not in ROWS and (outputs_at is not None or not isinstance(where, tuple)):
        raise ValueError(f"outputs_at should be one of {', '.join(ROWS)}, got {where!r}")
    return use_graphs(network, Settings(outputs_at, first_visits, tuple(row_wise)))


def use_graphs(network: M, settings: Settings) -> M:
    """`graphed` with checked arguments."""
    plain: Any = plain_class(network)
    network.__class__ = graphed_class(plain)
    vars(network)[GRAPHS] = GraphedForward(network, settings)
    return network


@dataclass
class Recording:
    """The graphs of a network for one size, and the buffers that they read and write.

    forward, backward: the graphs; backward is None if nothing needs a gradient
    output, output_grad, features_grad: buffers with the rows of a batch first
    gradients: buffers for the gradients of the parameters, one for each group of `learned`
    learned: the numbers of these parameters. Unused parameters have no gradient.
    """

    inputs: Inputs
    output: Tensor
    forward: Graph
    backward: Graph | None = None
    output_grad: Rows | None = None
    features_grad: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    learned: Groups = ()


class _Lease:
    """Reserves a lane until this object is deleted."""

    def __init__(self, lane: Lane[Recording], token: Tensor) -> None:
        self._lane, self.token = lane, token
        lane.busy = True

    def __del__(self) -> None:
        self._lane.busy = False


class GraphedForward(GraphRuntime):
    """Takes the place of the method `forward` of a network, see `graphed`."""

    def __init__(
        self, network: nn.Module, settings: Settings, subject: str = "", expected: Expected | None = None
    ) -> None:
        super().__init__(network, network, settings, subject or plain_class(network).__name__, expected)
        self._plain = plain_class(network)
        self._joined = JoinedParameters()
        self._parameter_names = list(inspect.signature(self._plain.forward).parameters)[1:]

    def of(self, network: nn.Module) -> GraphedForward:
        """This object if it belongs to the network. A copy of the network gets one of its own at its first call."""
        if network is self.network:
            return self
        other = vars(network)[GRAPHS] = GraphedForward(network, self.settings)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedForward, (self.network, self.settings)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        batch = self._batch(*arguments, **options)
        if batch is None:
            if any(isinstance(x, Tensor) and uses_graphs(x, self.settings.recorder) for x in arguments):
                self.say("it is called with other arguments than features, operators and tensors")
            return self._eager(*arguments, **options)
        at = self.outputs_at()
        if not may_have_graphs(batch, at, self.settings.recorder):
            return self._eager(*arguments, **options)
        if batch.operators.num_vertices > self.max_vertices(batch):
            compile_before_first_call(self.network, batch.features, batch.operators, *batch.further)
            return self._eager(*arguments, **options)
        facts = self.facts()
        reason = facts.refused or check_rows(batch, at)
        if reason is not None:
            self.say(reason)
            return self._eager(*arguments, **options)
        kind = self.kind(batch, at, facts)
        out = self.attempt(batch, kind, partial(self._on_graphs, batch, at, facts.state, kind))
        return self._eager(*arguments, **options) if out is None else out

    def _batch(self, *arguments: Any, **options: Any) -> Batch | None:
        """The arguments in their order. None if they are others than features, operators and further tensors."""
        names = self._parameter_names[len(arguments) : len(arguments) + len(options)]
        if set(names) != options.keys():
            return None
        values = [*arguments, *[options[name] for name in names]]
        if len(values) < 2 or not all(isinstance(x, Tensor) for x in values[2:]):
            return None
        return Batch(values[0], values[1], tuple(values[2:]))

    def _on_graphs(self, batch: Batch, at: str, state: ModuleState, kind: Kind) -> Tensor | None:
        """The output by graphs. None if there are none for this batch."""
        size = kind.size_of(batch.operators)
        if kind.visits[size] < self.settings.first_visits:
            kind.visits[size] += 1
            with self.lock:
                # A second batch of this size would drop smaller graphs. The first one needs their memory.
                for each in self.lanes:
                    if not each.busy and not size.fits_into(each.arena.capacity):
                        each.clear()
            compile_before_first_call(self.network, batch.features, batch.operators, *batch.further)
            return None
        with self.lock:
            lane = self._free_lane(batch.features.device)
            if lane is None:
                return None
            recording = self.graphs(lane, kind, batch, partial(self._record, lane, kind, batch))
            recording.inputs.load(batch)
            return self._replay(lane, recording, batch, rows_of(at, batch.operators), state)

    def _eager(self, *arguments: Any, **options: Any) -> Any:
        # The caller may record a graph of its own on another stream. Autograd would wait for that of the old nodes.
        self._joined.clear()
        return self._plain.forward(self.network, *arguments, **options)

    def computed(self, replica: Replica, inputs: Inputs, kind: Kind) -> Tensor:
        out: Tensor = replica(inputs.batch.features, inputs.operators, *inputs.batch.further)
        check_output(out, getattr(inputs.buffers.size, kind.rows))
        return out

    def _free_lane(self, device: torch.device) -> Lane[Recording] | None:
        """A lane whose graphs no backward pass waits for. None if there is none."""
        lane = next((lane for lane in self.lanes if not lane.busy and lane.device == device), None)
        if lane is None:
            if len(self.lanes) == MAX_LANES:
                self.say(f"{MAX_LANES} forward passes wait for their backward pass")
                return None
            lane = Lane(device, self.settings.recorder)
            self.lanes.append(lane)
        lane.follow()
        return lane

    def _record(self, lane: Lane[Recording], kind: Kind, batch: Batch, size: BatchSize) -> Recording:
        """Record the network on buffers that hold a batch. Autocast, modes and gradients are those of the caller."""
        tape: list[Tensor] = []

        def of_output(name: str, out: Tensor) -> Tensor:
            dims = out.shape[1:]
            return lane.arena.take(name, size, lambda s: (getattr(s, kind.rows), *dims), out.dtype)

        def forward() -> None:
            out = self.computed(replica, inputs, kind)
            tape[:] = [out]
            output.copy_(out.detach())

        def backward() -> None:
            # This frees the saved tensors, and other tensors reuse their memory. A second backward pass needs another
            # forward pass, see `_Replay`.
            grads = torch.autograd.grad(tape[0], sources, output_grad)
            torch._foreach_copy_(targets, grads)

        with lane.stream(), saved_as_usual():
            inputs = inputs_of(lane.arena, size, kind, batch).with_leaf(batch.features)
            with trial(), forked_random_numbers(lane.device), lane.memory():  # loads kernels
                example, numbers = self.first_call(Replica(self.network, copies_buffers=True), inputs, kind)
            output = of_output("output", example)
            replica = Replica(self.network, copies_buffers=False)
            if not numbers:
                (graph,) = lane.record([forward])
                recording = Recording(inputs, output, graph)
            else:
                learned = groups_of(replica.parameters, [i - 1 for i in numbers if i > 0])
                gradients, targets = gradient_buffers(lane.arena, replica.parameters, learned)
                sources = [replica.parameters[i] for group in learned for i in group]
                output_grad, features_grad = of_output("output_grad", output), None
                if 0 in numbers:
                    features = inputs.batch.features
                    channels = features.shape[1]
                    features_grad = lane.arena.take(
                        "features_grad", size, lambda s: (s.vertices, channels), features.dtype
                    )
                    targets, sources = [features_grad, *targets], [features, *sources]
                first, second = lane.record([forward, backward])
                rows = Rows(output_grad)
                recording = Recording(inputs, output, first, second, rows, features_grad, gradients, learned)
            inputs.buffers.complete()
            if batch.features.is_cuda:
                tape.clear()  # the memory is free for other recordings
            return recording

    def _replay(
        self, lane: Lane[Recording], recording: Recording, batch: Batch, rows: int, state: ModuleState
    ) -> Tensor:
        if recording.backward is None:
            recording.forward.replay()
            return recording.output[:rows].clone()
        lease = _Lease(lane, batch.features)
        # PyTorch drops the lease when it frees the saved tensors of the graph: after the backward pass, or when the
        # output is deleted without one.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: lease, lambda lease: lease.token):
            joined = self._joined.get(state.tensors, state.parameters, recording.learned)
            return _replay(recording, state, rows, batch.features, *joined)


class _Replay(torch.autograd.Function):
    """Replays the graphs of a recording that holds a batch."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording, state: ModuleState, rows: int, features: Tensor, *joined: Tensor
    ) -> Tensor:
        ctx.random, ctx.is_spent = generator_of(features.device).get_state(), False
        recording.forward.replay()
        ctx.recording, ctx.state, ctx.changes = recording, state, state.changes()
        ctx.save_for_backward(features)
        return recording.output[:rows].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (features,) = ctx.saved_tensors  # raises if this is a second backward pass without retain_graph
        if ctx.changes != ctx.state.changes():
            raise RuntimeError(
                "a parameter was changed in place between the forward and the backward pass; call the network again "
                "after optimizer.step()"
            )
        recording: Recording = ctx.recording
        assert recording.backward is not None
        assert recording.output_grad is not None
        if ctx.is_spent:  # the backward graph has overwritten the tensors of the forward graph
            with preserved(ctx.state.module, features.device):
                generator_of(features.device).set_state(ctx.random)
                recording.forward.replay()
        ctx.is_spent = True
        recording.output_grad.fill([grad])
        recording.backward.replay()
        features_grad = None
        if recording.features_grad is not None:
            features_grad = recording.features_grad[: features.shape[0]].clone()
        return None, None, None, features_grad, *(flat.clone() for flat in recording.gradients)


_replay = applied(_Replay)  # `may_have_graphs` has found that no transform of torch.func runs
