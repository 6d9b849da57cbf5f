"""The forward pass of a network as CUDA graphs that serve batches of any size."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffnet.cuda_graphs.added_rows import check_added_rows, is_known
from diffnet.cuda_graphs.buffers import NotCounted
from diffnet.cuda_graphs.calls import kind_of, may_have_graphs, rows_of, uses_graphs
from diffnet.cuda_graphs.gradients import JoinedParameters
from diffnet.cuda_graphs.graphed_class import graphed_class, plain_class
from diffnet.cuda_graphs.lane import Lane, Recorder, record_graph
from diffnet.cuda_graphs.module_state import GRAPHS, KnownStates, ModuleState, settings
from diffnet.cuda_graphs.recording import ROWS, Recording, random_state, record_network, replay_again
from diffnet.cuda_graphs.sizes import BatchSize, max_vertices, size_of
from diffnet.cuda_graphs.static_operators import Fields
from diffnet.first_call import compile_before_first_call
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.dispatch import applied
from diffnet.ops.common.precision import compute_dtype

M = TypeVar("M", bound=nn.Module)

MAX_LANES = 4  # forward passes whose backward pass is still to come
# With fewer vertices, launching the kernels one by one takes longer than the kernels of this many vertices.
LAUNCH_BOUND = 2**16
MAX_CONFIGS = 1000


def graphed(network: M, *, outputs_at: str | None = None, first_visits: int = 1) -> M:
    """Make a network launch all kernels of a forward or backward pass at once, and return it.

    On small meshes, most of the time of a step goes into launching kernels one by one. A CUDA graph launches them
    together. The graphs are recorded in the first calls. One graph serves all batches of about the same size.

    network: a module that is called with features (V, C) and `Operators`, and returns one tensor. It is changed in
        place: its parameters, its state dict and its hooks stay the same, its class becomes a subclass. To undo this,
        write `del network.forward`.
    outputs_at: "vertices", "faces", "edges" or "global_mean": the rows of the returned tensor. None takes the attribute
        of this name at each call, or "vertices".
    first_visits: how many batches of a size run before they are recorded. They run on the graphs of a larger batch if
        there are any, or else without graphs. Recording takes some ten times as long as a call, so a size that never
        comes back should not be recorded.

    Loss, optimizer and loop stay as they are; `GraphedStep` records whole steps. Several forward passes may come before
    one backward pass. Results are those of the network without graphs up to rounding; dropout draws other numbers. Wrap
    the network first and give the result to `DistributedDataParallel`.

    A call runs without graphs on the CPU, in copies by `DataParallel`, and under `torch.compile` and `torch.func`. It
    also does so in these cases, and a warning says why, once:

    - A submodule has hooks.
    - The network reads values back from the GPU, as implicit diffusion does.
    - Rows that are added to a batch change the results. Graphs read buffers that are larger than the batch. The added
      vertices have no mass, edges or eigenvectors, but count in a mean over vertices or in `BatchNorm1d`. Before a
      network with other modules than those of diffnet is recorded, it is called on buffers of two sizes, and its
      output, gradients and buffers are compared.
    - The forward pass sets attributes, draws random numbers of Python or NumPy, or uses a tensor that needs a gradient
      and is not a parameter.
    - More than four forward passes come before a backward pass.
    - The graphs don't fit into the memory.

    Batches whose kernels take longer than launching them also run without graphs, see `sizes.MAX_BYTES`. Gradients of
    gradients are not available.

    A changed network is recorded anew: modes, submodules, functions, numbers, tensors and containers in attributes. A
    number that changes in every step should be a tensor that is changed in place, because recording takes time. A graph
    doesn't notice a change of a global variable, of a variable of an enclosing function, of a NumPy array in place, or
    of an attribute of another object than a module, a dataclass or a namespace. Nor does it repeat what a forward pass
    does besides computing, such as printing. The comparison on buffers misses two faults: a branch on the number of
    vertices that takes the same path for the batch and for the buffers, and an effect of added rows that occurs for
    some features only.

    Raises TypeError for anything but a module, and ValueError for an unknown `outputs_at`.

    >>> from diffnet import DiffusionNet
    >>> network = graphed(DiffusionNet(3, 8))
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network should be a module such as DiffusionNet, got {type(network).__name__}")
    where = getattr(network, "outputs_at", "vertices") if outputs_at is None else outputs_at
    if where not in ROWS:
        raise ValueError(f"outputs_at should be one of {', '.join(ROWS)}, got {where!r}")
    return use_graphs(network, Settings(outputs_at, first_visits))


class Settings(NamedTuple):
    """The arguments of `graphed`. With another recorder than the default, graphs are also used on the CPU."""

    outputs_at: str | None = None
    first_visits: int = 1
    recorder: Recorder = record_graph


def use_graphs(network: M, settings: Settings) -> M:
    """`graphed` with checked arguments."""
    plain: Any = plain_class(network)
    network.__class__ = graphed_class(plain)
    vars(network)[GRAPHS] = GraphedForward(network, settings)
    return network


class _Lease:
    """Reserves a lane until this object is deleted."""

    def __init__(self, lane: Lane[Recording], token: Tensor) -> None:
        self._lane, self.token = lane, token
        lane.busy = True

    def __del__(self) -> None:
        self._lane.busy = False


@dataclass(eq=False)
class _Config:
    """What is known of the calls that share graphs but for the size of the batch.

    visits: how many batches of each size ran before one was recorded
    is_checked: whether added rows are known not to change the results
    counted: the counts of `BatchSize` that the network reads
    fields: of the operators that the network reads, once it has been recorded
    refused: why it runs without graphs
    """

    visits: Counter[BatchSize] = field(default_factory=Counter)
    is_checked: bool = False
    counted: frozenset[str] = frozenset()
    fields: Fields | None = None
    refused: str | None = None


class GraphedForward:
    """Takes the place of the method `forward` of a network, see `graphed`."""

    def __init__(self, network: nn.Module, settings: Settings) -> None:
        self._network, self._settings = network, settings
        self._plain = plain_class(network)
        self._parameter_names = list(inspect.signature(self._plain.forward).parameters)[1:3]
        self._states = KnownStates(network)
        self._is_known: tuple[int, bool] | None = None  # of the last state
        self._configs: dict[Hashable, _Config] = {}
        self._lanes: list[Lane[Recording]] = []
        self._joined = JoinedParameters()
        self._too_large = float("inf")
        self._met_large = False
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def of(self, network: nn.Module) -> GraphedForward:
        """This object if it belongs to the network. A copy of the network gets one of its own at its first call."""
        if network is self._network:
            return self
        own = vars(network)[GRAPHS] = GraphedForward(network, self._settings)
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        return GraphedForward(copy.deepcopy(self._network, memo), self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedForward, (self._network, self._settings)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        names = self._parameter_names[len(arguments) :]
        given = (*arguments, *[options[name] for name in names if name in options])
        if len(given) != 2 or len(given) != len(arguments) + len(options):
            if any(isinstance(x, Tensor) and uses_graphs(x, self._settings.recorder) for x in given):
                reason = "it is called with other arguments than features and operators"
                return self._explained(reason, *arguments, **options)
            return self._eager(*arguments, **options)
        features, operators = given
        if not may_have_graphs(features, operators, self._settings.recorder):
            return self._eager(features, operators)
        at = self._outputs_at()
        if at not in ROWS or (at in ("faces", "edges") and len(operators.faces) == 0):
            return self._eager(features, operators)  # the network says what is wrong
        if operators.num_vertices > self._max_vertices(features, operators):
            compile_before_first_call(self._network, features, operators)
            return self._eager(features, operators)
        state, number, is_known = self._current_state()
        if state.has_inner_hooks():
            return self._explained("a submodule has hooks, which a graph would not call", features, operators)
        kind = at, features.shape[1], features.dtype, features.requires_grad, kind_of(operators)
        # Buffers for several meshes also hold empty meshes, so they are checked on their own.
        config = self._config((number, settings(), *kind, is_known or len(operators) == 1))
        config.is_checked |= is_known
        if config.refused is not None:
            return self._explained(config.refused, features, operators)
        if operators.num_vertices >= self._too_large:
            return self._explained(f"{self._too_large} vertices don't fit into the memory", features, operators)
        size = size_of(operators).rounded()
        records = config.visits[size] >= self._settings.first_visits
        if not records:
            config.visits[size] += 1
            compile_before_first_call(self._network, features, operators)
        try:
            with self._lock:
                found = self._lane(config, at, features, operators, size, records)
                if found is not None:
                    return self._replay(*found, at, state, features, operators)
            if not records:
                return self._eager(features, operators)
            reason = f"{MAX_LANES} forward passes wait for their backward pass"
        except torch.OutOfMemoryError:
            self._too_large = operators.num_vertices
            reason = f"{self._too_large} vertices don't fit into the memory"
        except NotCapturable as error:
            reason = config.refused = str(error)
        # From here on, no error keeps the tensors of the failed call alive.
        if operators.num_vertices >= self._too_large:
            self._clear_lanes()
        return self._explained(reason, features, operators)

    def _max_vertices(self, features: Tensor, operators: Operators) -> int:
        """The vertices of the largest batch that should have a graph, see `max_vertices`.

        The graphs keep their memory while a larger batch runs, so its first call halves the limit. With
        first_visits=0 the limit stays, because results must not depend on the order of the batches.
        """
        limit = max_vertices(operators.k, compute_dtype(features, operators.evecs))
        if operators.num_vertices > limit and self._settings.first_visits:
            self._met_large = True
            self._clear_lanes(above=limit // 2)
        return limit // 2 if self._met_large else limit

    def _clear_lanes(self, above: int = -1) -> None:
        """Drop the graphs of all lanes that are not in use and hold batches of more vertices than this."""
        with self._lock:
            for lane in self._lanes:
                if not lane.busy and lane.arena.capacity.vertices > above:
                    lane.clear()

    def _eager(self, *arguments: Any, **options: Any) -> Any:
        # The caller may record a graph of its own on another stream. Autograd would wait for that of the old nodes.
        self._joined.clear()
        return self._plain.forward(self._network, *arguments, **options)

    def _explained(self, reason: str, *arguments: Any, **options: Any) -> Any:
        """Run without graphs and say why, once."""
        self._say(reason, stacklevel=7)
        return self._eager(*arguments, **options)

    def _say(self, reason: str, stacklevel: int) -> None:
        if reason not in self._said:
            self._said.add(reason)
            name = type(self._network).__name__
            warnings.warn(f"{name} runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=stacklevel)

    def _current_state(self) -> tuple[ModuleState, int, bool]:
        """The state of the network, its number, and whether `is_known` is true for it."""
        state, number, changing = self._states.current()
        known = self._is_known
        # Another thread may read this at any time.
        if known is None or known[0] != number:
            known = self._is_known = number, is_known(self._network)
        if changing:
            self._say(changing, stacklevel=8)
        return state, number, known[1]

    def _config(self, key: Hashable) -> _Config:
        if len(self._configs) > MAX_CONFIGS:
            self._clear_lanes()
            self._configs.clear()
            self._states.clear()
        if key not in self._configs:
            self._configs[key] = _Config()
        return self._configs[key]

    def _outputs_at(self) -> str:
        where: str | None = self._settings.outputs_at
        return getattr(self._network, "outputs_at", "vertices") if where is None else where

    def _lane(
        self,
        config: _Config,
        outputs_at: str,
        features: Tensor,
        operators: Operators,
        size: BatchSize,
        records: bool,
    ) -> tuple[Lane[Recording], Recording] | None:
        """A free lane with a recording that holds this batch. None if all lanes are taken.

        size: of the buffers, before anything but vertices and meshes is counted
        records: whether the batch may be recorded. If not, a recording of a larger batch serves it, or the result is
            None.
        """
        lane = next((lane for lane in self._lanes if not lane.busy and lane.device == features.device), None)
        if lane is None:
            if not records or len(self._lanes) == MAX_LANES:
                return None
            lane = Lane(features.device, self._settings.recorder)
            self._lanes.append(lane)
        lane.follow()
        while True:
            if config.counted:
                size = size_of(operators, config.counted).rounded()
            recording = lane.get((config, size))
            if recording is None and not records:
                recording = _larger(lane, config, size)
                if recording is None:
                    if lane.recorded() and not size.fits_into(lane.arena.capacity):
                        # A second batch of this size would drop these graphs. The first one needs their memory.
                        lane.clear()
                    return None
            if recording is not None:
                recording.load(features, operators)
                return lane, recording
            try:
                if not config.is_checked:
                    compile_before_first_call(self._network, features, operators)
                    check_added_rows(self._network, ROWS[outputs_at], size, config.counted, features, operators)
                    config.is_checked = True
                lane.make_room(size)
                recording = record_network(
                    self._network, outputs_at, lane, size, config.counted, features, operators, config.fields
                )
            except NotCounted as missing:
                config.counted |= {missing.args[0]}
                continue
            config.fields = recording.fields
            lane.keep((config, size), recording)
            return lane, recording

    def _replay(
        self,
        lane: Lane[Recording],
        recording: Recording,
        outputs_at: str,
        state: ModuleState,
        features: Tensor,
        operators: Operators,
    ) -> Tensor:
        rows = rows_of(outputs_at, operators)
        if recording.backward is None:
            recording.forward.replay()
            return recording.output[:rows].clone()
        lease = _Lease(lane, features)
        # PyTorch drops the lease when it frees the saved tensors of the graph: after the backward pass, or when the
        # output is deleted without one.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: lease, lambda lease: lease.token):
            joined = self._joined.get(state.tensors, state.parameters, recording.learned)
            out: Tensor = _replay(recording, state, rows, features, *joined)
        return out


class _Replay(torch.autograd.Function):
    """Replays the graphs of a recording that holds a batch."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording, state: ModuleState, rows: int, features: Tensor, *joined: Tensor
    ) -> Tensor:
        ctx.random, ctx.is_spent = random_state(features.device), False
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
        if ctx.is_spent:
            replay_again(recording, ctx.state.module, features.device, ctx.random)
        ctx.is_spent = True
        recording.output_grad.fill([grad])
        recording.backward.replay()
        features_grad = None
        if recording.features_grad is not None:
            features_grad = recording.features_grad[: features.shape[0]].clone()
        return None, None, None, features_grad, *(flat.clone() for flat in recording.gradients)


_replay = applied(_Replay)  # `may_have_graphs` has found that no transform of torch.func runs


def _larger(lane: Lane[Recording], config: _Config, size: BatchSize) -> Recording | None:
    """The smallest recording that holds a batch of this size, unless the network is faster without graphs.

    A network without graphs would also need memory of its own for the batch, besides that of the graphs.
    """
    limit = max(2 * size.vertices, LAUNCH_BOUND)
    sizes = [s for c, s in lane.recorded() if c is config and size.fits_into(s) and s.vertices <= limit]
    return lane.get((config, min(sizes, key=lambda s: s.vertices))) if sizes else None
