"""What the graphs of forward passes and those of whole training steps have in common."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import Arena, Batch, BatchBuffers, NotCounted
from diffnet.cuda_graphs.lane import Lane, Recorder, record_graph
from diffnet.cuda_graphs.losses import RowLoss
from diffnet.cuda_graphs.module_state import KnownStates, ModuleState, settings
from diffnet.cuda_graphs.modules import RowWise, gradient_exchange, reads_other_rows
from diffnet.cuda_graphs.recording import Replica, forked_random_numbers, host_random_states, trial, with_gradients
from diffnet.cuda_graphs.sizes import BatchSize, MeshSizes, largest_batch, max_vertices, size_of
from diffnet.cuda_graphs.static_operators import Fields, StaticOperators
from diffnet.geometry import Operators
from diffnet.geometry.fields import FIELDS
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.cuda_graph import NotCapturable, is_recorded
from diffnet.ops.common.launcher import compile_ahead, saved_as_usual
from diffnet.ops.common.precision import compute_dtype

T = TypeVar("T")

# The count of `BatchSize` that gives the rows of the output.
ROWS = {"vertices": "vertices", "faces": "faces", "edges": "edges", "global_mean": "meshes", "pairs": "pairs"}
ELEMENTS = frozenset({"faces", "edges"})
NOTHING = BatchSize(0, 0)
MAX_KINDS = 1000
MAX_EXACT_SIZES = 32  # of batches that have graphs of their own, because no rows may be added


class Settings(NamedTuple):
    """The arguments of `graphed`. With another recorder than the default, graphs are also used on the CPU."""

    outputs_at: str | None = None
    first_visits: int = 1
    row_wise: RowWise = ()
    recorder: Recorder = record_graph


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


class Facts(NamedTuple):
    """What is known of modules in their present state.

    number: of the state
    other_rows: the class of a module that may compute a row from other rows, see `reads_other_rows`
    refused: why they can't have graphs
    """

    state: ModuleState
    number: int
    other_rows: str | None
    refused: str | None


@dataclass(eq=False)
class Kind:
    """What is known of batches that share graphs but for their size.

    rows: the count of `BatchSize` that gives the rows of the outputs
    counted: the counts of `BatchSize` that the network and the targets need
    other_rows: see `Facts`. Rows may be added to a batch if it is None.
    visits: the number of batches of each size
    fields: of the operators that the network reads, once it has run on buffers
    largest: the size of the largest expected batch
    refused: why it runs without graphs
    dtype: of what its graphs compute
    """

    rows: str
    counted: frozenset[str]
    other_rows: str | None
    visits: Counter[BatchSize] = field(default_factory=Counter)
    fields: Fields | None = None
    largest: BatchSize = NOTHING
    refused: str | None = None
    dtype: torch.dtype = torch.float32

    def size_of(self, operators: Operators) -> BatchSize:
        """The size of the buffers for a batch."""
        return self.rounded(size_of(operators, self.counted))

    def rounded(self, size: BatchSize) -> BatchSize:
        """The size of the buffers for batches of a size. No pairs are added, because they would count in losses."""
        if self.other_rows:
            return size
        return size.rounded()._replace(meshes=size.meshes) if self.rows == "pairs" else size.rounded()


class Inputs(NamedTuple):
    """A batch in buffers, whose `operators` are static."""

    buffers: BatchBuffers
    batch: Batch

    @property
    def operators(self) -> StaticOperators:
        return cast(StaticOperators, self.batch.operators)

    def load(self, batch: Batch) -> None:
        """Copy another batch of about this size into the buffers."""
        if self.batch.rows is not None and batch.targets is not None:
            self.batch.rows.fill_(len(batch.targets))
        self.buffers.load(batch.operators, *batch.tensors())

    def with_leaf(self, features: Tensor) -> Inputs:
        """The same with the features as a leaf, which gets a gradient if those of the batch do."""
        leaf = self.batch.features.detach().requires_grad_(features.requires_grad and torch.is_grad_enabled())
        return self._replace(batch=self.batch._replace(features=leaf))


def inputs_of(arena: Arena, size: BatchSize, kind: Kind, batch: Batch, loss: RowLoss | None = None) -> Inputs:
    """Buffers that hold a batch. Those of the fields that networks of this kind read outlive the first call.

    So this is called outside of `Lane.memory`, where the memory is that of the graphs.

    loss: of the targets. It says which ones added rows get, and whether it reads the number of rows.
    """
    ignored = None if loss is None else loss.ignored
    buffers = BatchBuffers(arena, size, kind.counted, batch.operators)

    def take(name: str, like: Tensor, rows: str, rest: float = 0) -> Tensor:
        return buffers.add(arena.take(name, size, lambda s: (getattr(s, rows), *like.shape[1:]), like.dtype), rest)

    inputs = Batch(
        take("features", batch.features, "vertices"),
        StaticOperators(buffers),
        tuple([take(f"further {i}", x, "meshes") for i, x in enumerate(batch.further)]),
        None if batch.targets is None else take("targets", batch.targets, kind.rows, ignored or 0),
        arena.take("rows", size, lambda s: (), torch.int64) if loss is not None and loss.reduction else None,
    )
    result = Inputs(buffers, inputs)
    result.load(batch)
    result.operators.read(kind.fields or [])
    return result


class GraphRuntime:
    """Decides which calls of modules have graphs, and on buffers of which size.

    modules: all that the graphs call
    network: the one among them that gets the features
    subject: who runs without graphs, in warnings
    expected: the meshes to come, if they are known. The buffers are made for the largest batch of these.

    watches: whether each call looks for changes of the modules, which takes time
    """

    def __init__(
        self, modules: nn.Module, network: nn.Module, settings: Settings, subject: str, expected: Expected | None = None
    ) -> None:
        self.modules, self.network, self._subject, self._expected = modules, network, subject, expected
        self.settings = settings
        self.watches = True
        self._states = KnownStates(modules)
        # The most eigenpairs and vertices that are expected.
        self._most = (0, 0) if expected is None else (expected.meshes.k, expected.largest().vertices)
        self._facts: Facts | None = None
        self._kinds: dict[Hashable, Kind] = {}
        self.lanes: list[Lane[Any]] = []
        self.too_large = float("inf")
        self._meets_large = False
        self._said: set[str] = set()
        self.lock = threading.RLock()

    def clear(self, above: int = -1) -> None:
        """Drop the graphs of lanes that hold batches of more vertices than this, and return their memory."""
        with self.lock:
            for lane in self.lanes:
                if not lane.busy and lane.arena.capacity.vertices > above:
                    lane.clear()

    def say(self, reason: str) -> None:
        """Warn that something runs without graphs, once for each reason."""
        if reason not in self._said:
            self._said.add(reason)
            warn_caller(f"{self._subject} runs without CUDA graphs: {reason}")

    def outputs_at(self) -> str:
        where = self.settings.outputs_at
        return getattr(self.network, "outputs_at", "vertices") if where is None else where

    def facts(self) -> Facts:
        """The state of the modules, and what follows from it."""
        facts = self._facts
        if facts is not None and not self.watches:
            return facts
        state, number, changing = self._states.current()
        if facts is None or facts.number != number:
            name = gradient_exchange(self.modules)
            refused = None if name is None else f"{name} exchanges gradients in Python"
            if state.generator:
                refused = f"the attribute {state.generator!r} draws random numbers, which a graph would repeat"
            facts = Facts(state, number, reads_other_rows(self.network, self.settings.row_wise), refused)
        facts = self._facts = facts._replace(state=state)  # another thread may read it at any time
        if state.has_inner_hooks():
            return facts._replace(refused="a module has hooks, which a graph would not call")
        return facts._replace(refused=changing) if changing and not facts.refused else facts

    def kind(self, batch: Batch, at: str, facts: Facts, *others: Hashable) -> Kind:
        """What is known of batches such as this one.

        others: further facts on which the graphs depend
        """
        tensors = [(x.dtype, x.shape[1:], x.requires_grad) for x in batch.tensors()]
        o = batch.operators  # a recording depends on all of their properties but the size
        missing = [getattr(o, name) is None for name, kind in FIELDS.items() if kind.optional]
        of_operators = o.k, o.mass.dtype, o.evecs.dtype, o.device, *missing
        key = facts.number, settings(), at, of_operators, *tensors, *others
        if len(self._kinds) > MAX_KINDS:
            self.clear()
            self._kinds.clear()
            self._states.clear()
        if key not in self._kinds:
            self._kinds[key] = Kind(ROWS[at], ELEMENTS & {at}, facts.other_rows)
        return self._kinds[key]

    def max_vertices(self, batch: Batch) -> int:
        """The vertices of the largest batch that should have a graph, see the function of this name.

        The graphs keep their memory while a larger batch runs, so its first call halves the limit. With first_visits=0
        the limit stays, because results must not depend on the order of the batches.
        """
        operators, (k, vertices) = batch.operators, self._most
        limit = max_vertices(max(k, operators.k), compute_dtype(batch.features, operators.evecs))
        is_large = max(vertices, operators.num_vertices) > limit
        if is_large and not self._meets_large and self.settings.first_visits:
            self._meets_large = True
            self.clear(above=limit // 2)
        return limit // 2 if self._meets_large else limit

    def _refusal(self, batch: Batch, kind: Kind) -> str | None:
        """Why this batch has no graph. None if it may have one. It counts as a visit."""
        if kind.refused is None and kind.other_rows:
            kind.visits[size_of(batch.operators, kind.counted)] += 0
            if len(kind.visits) > MAX_EXACT_SIZES:
                self.clear()
                kind.refused = (
                    f"a {kind.other_rows} may compute a row from other rows, so each size of a batch has a graph, and "
                    f"more than {MAX_EXACT_SIZES} sizes have come. If it computes each row from this row alone, pass "
                    f"row_wise=[{kind.other_rows}]"
                )
        if batch.operators.num_vertices >= self.too_large:
            return kind.refused or f"{self.too_large} vertices don't fit into the memory"
        return kind.refused

    def attempt(self, batch: Batch, kind: Kind, call: Callable[[], T | None]) -> T | None:
        """Call a function that may record graphs. If there are none for this batch, None, and a warning says why."""
        result, failed, reason = None, False, self._refusal(batch, kind)
        if reason is None:
            try:
                result = call()
            except torch.OutOfMemoryError:
                self.too_large, failed = batch.operators.num_vertices, True
            except NotCapturable as error:
                kind.refused = str(error)
            if failed:  # no error keeps the tensors of the call alive here
                self.clear()
            reason = self._refusal(batch, kind)
        if reason is not None:
            self.say(reason)
        return result

    def graphs(self, lane: Lane[T], kind: Kind, batch: Batch, record: Callable[[BatchSize], T]) -> T:
        """The graphs of this kind and size in a lane. They are recorded if there are none.

        record: makes the graphs for buffers of a size
        """
        while True:
            size = kind.size_of(batch.operators)
            graphs = lane.get((kind, size))
            if graphs is not None:
                return graphs
            try:
                if kind.fields is None:
                    lane.make_room(size)
                    kind.fields = self._fields(lane, kind, batch, size)
                    if self._expected is not None:
                        largest = self._expected.largest(kind.counted, self.max_vertices(batch))
                        kind.largest = kind.rounded(largest)
                lane.make_room(size.union(kind.largest))
                graphs = record(size)
            except NotCounted as missing:
                kind.counted |= {missing.args[0]}
                continue
            lane.keep((kind, size), graphs)
            return graphs

    def loss_of(self, batch: Batch) -> RowLoss | None:
        """How a graph holds the loss. None if it holds no loss."""
        return None

    def computed(self, replica: Replica, inputs: Inputs, kind: Kind) -> Tensor:
        """What a graph computes from a batch in buffers: the output of the network, or the loss."""
        raise NotImplementedError

    def first_call(self, replica: Replica, inputs: Inputs, kind: Kind) -> tuple[Tensor, list[int]]:
        """Run both passes. Returns a result without memory, and the numbers of the inputs that get a gradient."""
        out = self.computed(replica, inputs, kind)
        return out.detach().to("meta"), with_gradients(out, [inputs.batch.features, *replica.parameters])

    def _fields(self, lane: Lane[Any], kind: Kind, batch: Batch, size: BatchSize) -> Fields:
        """Compile all kernels by a first call on buffers. Returns the fields of the operators that it reads.

        Raises NotCapturable for what a graph would repeat or leave out: an attribute that the call sets, random numbers
        of Python or NumPy, and the gradient of a tensor that is no parameter.
        """
        with lane.stream(), saved_as_usual(), trial(), forked_random_numbers(lane.device):
            inputs = inputs_of(lane.arena, size, kind, batch, self.loss_of(batch)).with_leaf(batch.features)
            replica = Replica(self.modules, copies_buffers=True)
            compile_ahead(lambda: self.computed(replica, inputs, kind), [inputs.batch.features, *replica.parameters])
            inputs.load(batch)  # compilation leaves other values
            before = host_random_states()
            self.first_call(replica, inputs, kind)
            replica.check_attributes()
            if before != host_random_states():
                raise NotCapturable("it draws random numbers of Python or NumPy, which a graph would repeat")
            return inputs.operators.fields_read()


def uses_graphs(x: Tensor, recorder: Recorder) -> bool:
    """Whether graphs of calls with this tensor can be recorded. On the CPU, tests emulate them."""
    return x.is_cuda or recorder is not record_graph


def may_have_graphs(batch: Batch, at: str, recorder: Recorder) -> bool:
    """Whether the arguments are right and on a GPU. If not, the network itself says what is wrong."""
    features, operators = batch[:2]
    return (
        isinstance(features, Tensor)
        and uses_graphs(features, recorder)
        and not under_transforms()
        and isinstance(operators, Operators)
        and not isinstance(operators, StaticOperators)
        and features.is_floating_point()
        and features.ndim == 2
        and features.device == operators.device
        and len(features) == operators.num_vertices > 0
        and at in ROWS
        and not (at in ELEMENTS and len(operators.faces) == 0)
        and not (operators.mass.requires_grad or operators.evals.requires_grad or operators.evecs.requires_grad)
        and not (features.is_cuda and is_recorded())
    )


def check_rows(batch: Batch, at: str) -> str | None:
    """Why a graph can't read the targets or the further arguments. None if it can."""
    rows, device = len(batch.operators), batch.features.device
    named = [("a further argument", x, rows) for x in batch.further]
    if batch.targets is not None:
        named.append(("the targets", batch.targets, rows_of(at, batch.operators)))
    for name, x, count in named:
        if not isinstance(x, Tensor) or x.shape[:1] != (count,):
            shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            return f"{name} should be a tensor of {count} rows, got {shape}"
        if x.device != device:
            return f"an argument is on {x.device}, and the features are on {device}"
        if x.requires_grad:
            return "the targets or a further argument need a gradient, which a graph would not compute"
    return None


def rows_of(outputs_at: str, operators: Operators) -> int:
    """The rows of the output for a batch."""
    return getattr(size_of(operators, ELEMENTS & {outputs_at}), ROWS[outputs_at])


def warn_caller(message: str) -> None:
    """Warn at the line outside of diffnet and PyTorch from which the call came."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("diffnet", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
