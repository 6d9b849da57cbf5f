"""The buffers that a network reads while a CUDA graph is recorded and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.geometry import Operators

Read = Callable[[Operators], Tensor]
Shape = Callable[[BatchSize], Sequence[int]]
Rest = float | None | Callable[[Any], float]
Field = tuple[Read, torch.dtype | None, bool]  # where the values of a buffer come from, see `BatchBuffers.rows`
MAX_PLANS = 64  # `_Copies` that buffers remember; each size of a batch has one


class Arena:
    """Named buffers. A smaller batch uses the front of a buffer, so all sizes share one piece of memory.

    capacity: the largest batch that the buffers hold
    """

    def __init__(self, device: torch.device, capacity: BatchSize) -> None:
        self.device, self.capacity = device, capacity
        self._flat: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def take(self, name: str, size: BatchSize, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The buffer of this name for batches of this size. A new buffer holds zeros.

        shape: the shape of the buffer, given the size of the batch
        """
        needed, dims = math.prod(shape(self.capacity)), tuple(shape(size))
        key = name, dtype, needed
        if key not in self._flat:
            with torch.inference_mode(False):  # a buffer of inference mode could not be written in training
                self._flat[key] = torch.zeros(needed, dtype=dtype, device=self.device)
        return self._flat[key][: math.prod(dims)].view(dims)


class Batch(NamedTuple):
    """What a network and a loss read.

    features: (V, C)
    further: further arguments of the network, with a row for each mesh
    targets: with a row for each row of the outputs. None without a loss.
    rows: (), the number of rows of the batch, on buffers with more rows
    """

    features: Tensor
    operators: Operators
    further: tuple[Tensor, ...] = ()
    targets: Tensor | None = None
    rows: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors but those of the operators."""
        return [self.features, *self.further, *(() if self.targets is None else (self.targets,))]


class NotCounted(Exception):
    """A network reads a field whose size was not counted. The argument is the name of the count in `BatchSize`."""


class _Copies(NamedTuple):
    """Where rows go: the parts of buffers for their values and for the other rows.

    copies: for each dtype, parts of buffers, the numbers of the values that go there, and further values
    zeros: for each dtype, parts that are set to 0
    others: parts that are set to another number, and this number
    """

    copies: list[tuple[list[Tensor], list[int], list[Tensor]]]
    zeros: list[list[Tensor]]
    others: list[tuple[Tensor, float | Callable[[Any], float]]]


class Rows:
    """Buffers that are filled together. Each gets values (n, …) in its first rows, and a number in the others."""

    def __init__(self, *buffers: Tensor, rest: Rest = 0) -> None:
        self._destinations = [(buffer, rest) for buffer in buffers]
        self._plans: dict[tuple[int, ...], _Copies] = {}  # because slicing takes time

    def add(self, buffer: Tensor, rest: Rest = 0) -> Tensor:
        """Add a buffer, and return it.

        rest: the number for the other rows; with None, these get their indices
        """
        self._destinations.append((buffer, rest))
        return buffer

    def fill(self, values: Sequence[Tensor], source: Operators | None = None) -> None:
        """Copy values for each buffer, with few kernels: one for each dtype, and one to set the rest to 0.

        source: the argument of functions that give a number
        """
        counts = tuple([x.shape[0] for x in values])
        plan = self._plans.get(counts)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[counts] = _copies_of(self._destinations, counts)
        with torch.no_grad():
            for parts, numbers, further in plan.copies:
                torch._foreach_copy_(parts, [values[i] for i in numbers] + further)
            for parts in plan.zeros:
                torch._foreach_zero_(parts)
            for part, rest in plan.others:
                part.fill_(rest(source) if callable(rest) else rest)


class BatchBuffers:
    """Buffers for the operators of any batch up to a size.

    arena: where the buffers lie
    size: of the buffers
    counted: the names of the counts of `size` that are known, see `size_of`
    example: a batch that fits. New buffers are filled with it.

    ptr: (B+1,) int64, where each mesh begins
    lengths: (B,) int64, the vertices of each mesh, without added ones
    """

    def __init__(self, arena: Arena, size: BatchSize, counted: frozenset[str], example: Operators) -> None:
        self.arena, self.size, self.counted = arena, size, counted
        self._example: Operators | None = example
        self._filled: dict[str, Tensor] = {}
        self._rows = Rows()
        self._fields: list[Field] = []
        # They are small, so they have memory of their own.
        with torch.inference_mode(False):
            self._extents = torch.zeros(2 * size.meshes + 1, dtype=torch.int64, device=arena.device)
        self.ptr, self.lengths = self._extents[: size.meshes + 1], self._extents[size.meshes + 1 :]
        self._load_extents(example)

    @property
    def example(self) -> Operators:
        """The batch in the buffers."""
        assert self._example is not None, "no buffer can be made after `complete`"
        return self._example

    def add(self, buffer: Tensor, rest: float = 0) -> Tensor:
        """Let `load` fill another buffer, too, see `Rows`. Call it before any field is read. Returns the buffer."""
        return self._rows.add(buffer, rest)

    def need(self, count: str) -> int:
        """The value of this name in `size`. Raises NotCounted if it is not known. Meshes and vertices always are."""
        if count not in ("meshes", "vertices", *self.counted):
            raise NotCounted(count)
        return getattr(self.size, count)

    def complete(self) -> None:
        """Keep no batch alive from now on. No buffer can be made afterwards."""
        self._example = None

    def rows(
        self,
        name: str,
        read: Read,
        shape: Shape,
        *,
        needs: str,
        rest: Rest = 0,
        basis: torch.dtype | None = None,
        planes: bool = False,
    ) -> Tensor:
        """The buffer of this name. It is made and filled when it is asked for the first time.

        read: reads the values (n, …), or (planes, n, …), from the operators of a batch
        shape: the shape of the buffer, with at least as many rows
        needs: the count of `BatchSize` that gives the number of rows
        rest: see `Rows`
        basis: of the operators that are read, see `prepared`; None for the operators of the batch as they are
        planes: whether the values are (planes, n, …), with a buffer for each plane

        Raises NotCounted if `needs` names a count that is not known.
        """
        self.need(needs)
        if name not in self._filled:
            field = read, basis, planes
            values = _values_of([field], self.example)
            tensor = self.arena.take(name, self.size, shape, values[0].dtype)
            self._filled[name] = tensor
            self._fields.append(field)
            buffers = tensor.unbind() if planes else [tensor]
            for buffer in buffers:
                self._rows.add(buffer, rest)
            Rows(*buffers, rest=rest).fill(values, self.example)
        return self._filled[name]

    def load(self, source: Operators, *others: Tensor) -> None:
        """Copy the operators of a batch into all buffers that have been asked for, and values for those of `add`."""
        if self._example is not None:
            self._example = source
        if self.size.meshes > 1 or self.size.longest:  # else the only mesh has all rows
            self._load_extents(source)
        self._rows.fill([*others, *_values_of(self._fields, source)], source)

    def _load_extents(self, source: Operators) -> None:
        """In `ptr`, the last mesh of the batch owns all further rows. Further meshes are empty."""
        meshes, vertices = self.size.meshes, self.size.vertices
        ends = [*accumulate(source.lengths[:-1], initial=0), *[vertices] * (meshes + 1 - len(source))]
        lengths = [*source.lengths, *[0] * (meshes - len(source))]
        self._extents.copy_(torch.tensor(ends + lengths), non_blocking=True)


def _values_of(fields: Sequence[Field], source: Operators) -> list[Tensor]:
    """The values of fields for each buffer."""
    by_basis: dict[torch.dtype | None, Operators] = {None: source}
    values: list[Tensor] = []
    for read, basis, planes in fields:
        if basis is not None and basis not in by_basis:
            by_basis[basis] = source.prepared(basis)
        value = read(by_basis[basis])
        if planes:
            values += value.unbind()
        else:
            values.append(value)
    return values


def _copies_of(buffers: Sequence[tuple[Tensor, Rest]], counts: Sequence[int]) -> _Copies:
    """Find the parts of buffers for values of `counts` rows, and group them by dtype."""
    copies: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    indices: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    zeros: dict[torch.dtype, list[Tensor]] = {}
    others: list[tuple[Tensor, float | Callable[[Any], float]]] = []
    for number, ((buffer, rest), count) in enumerate(zip(buffers, counts, strict=True)):
        size = buffer.shape[0]
        if count > 0:
            parts, numbers = copies.setdefault(buffer.dtype, ([], []))
            parts.append(buffer[:count] if count < size else buffer)
            numbers.append(number)
        if count == size:
            continue
        remaining = buffer[count:]
        if rest is None:
            places = torch.arange(count, size, dtype=buffer.dtype, device=buffer.device)
            indices.setdefault(buffer.dtype, []).append((remaining, places))
        elif rest == 0:
            zeros.setdefault(buffer.dtype, []).append(remaining)
        else:
            others.append((remaining, rest))
    grouped = []
    for dtype in {**copies, **indices}:
        parts, numbers = copies.get(dtype, ([], []))
        further = indices.get(dtype, [])
        grouped.append(([*parts, *(part for part, _ in further)], numbers, [values for _, values in further]))
    return _Copies(grouped, [*zeros.values()], others)
