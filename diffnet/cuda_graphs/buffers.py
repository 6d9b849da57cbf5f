"""The buffers that a network reads while a CUDA graph is recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.cuda_graphs.arena import Arena, Shape
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.geometry import Operators

Read = Callable[[Operators], Tensor]
Rest = Callable[[Operators], float]
MAX_KNOWN = 64  # `_Copies` that the buffers remember; each size of a batch has one or two


class NotCounted(Exception):
    """A network reads a field whose size was not counted. The argument is the name of the count in `BatchSize`."""


class _Buffer(NamedTuple):
    tensor: Tensor
    read: Read
    rest: Rest | None


class Rows(NamedTuple):
    """Values (n, …) for the first rows of a buffer, and a number for the others. With None, these get their indices."""

    buffer: Tensor
    values: Tensor
    rest: float | None = 0


class _Copies(NamedTuple):
    """Where rows go: the parts of buffers for their values and for the other rows.

    buffers: keeps alive the buffers whose ids are in the key
    copies: for each dtype, parts of buffers, the numbers of the values that go there, and further values
    zeros: for each dtype, parts that are set to 0
    others: parts that are set to another number, and the number of the rows that gives it
    """

    buffers: list[Tensor]
    copies: list[tuple[list[Tensor], list[int], list[Tensor]]]
    zeros: list[list[Tensor]]
    others: list[tuple[Tensor, int]]


class BatchBuffers:
    """Buffers for the operators of any batch up to a size.

    arena: where the buffers lie
    size: of the buffers
    counted: the names of the counts of `size` that are known, see `size_of`
    example: a batch that fits. New buffers are filled with it.
    """

    def __init__(self, arena: Arena, size: BatchSize, counted: frozenset[str], example: Operators) -> None:
        self.arena, self.size, self.counted = arena, size, counted
        self._example: Operators | None = example
        self._filled: dict[str, Tensor] = {}
        self._sources: list[_Buffer] = []
        self._known: dict[Hashable, _Copies] = {}
        # It is small, so it has memory of its own. If there is one mesh, its values never change.
        with torch.inference_mode(False):
            self.ptr = torch.zeros(size.meshes + 1, dtype=torch.int64, device=arena.device)
        self._load_extents(example)

    @property
    def example(self) -> Operators:
        """The batch in the buffers."""
        assert self._example is not None, "no buffer can be made after `complete`"
        return self._example

    def complete(self) -> None:
        """Keep no batch alive from now on. No buffer can be made afterwards."""
        self._example = None

    def rows(
        self,
        name: str,
        read: Read,
        shape: Shape,
        *,
        needs: str = "",
        rest: Rest | None = lambda _: 0,
        planes: bool = False,
    ) -> Tensor:
        """The buffer of this name. It is made and filled when it is asked for the first time.

        read: reads the values (n, …), or (planes, n, …), from the operators of a batch
        shape: the shape of the buffer, with at least as many rows
        needs: the count of `BatchSize` that gives the number of rows, if it is neither vertices nor meshes
        rest: the number for the other rows; with None, these get their indices

        Raises NotCounted if `needs` names a count that is not known.
        """
        if needs and needs not in self.counted:
            raise NotCounted(needs)
        if name not in self._filled:
            tensor = self.arena.take(name, self.size, shape, read(self.example).dtype)
            buffers = [_Buffer(tensor, read, rest)]
            if planes:
                buffers = [_Buffer(plane, lambda o, i=i: read(o)[i], rest) for i, plane in enumerate(tensor)]  # type: ignore[misc]
            self._filled[name] = tensor
            self._sources += buffers
            fill([_rows(buffer, self.example) for buffer in buffers])
        return self._filled[name]

    def load(self, source: Operators, *others: Rows) -> None:
        """Copy the operators of a batch into all buffers that have been asked for, and other rows into theirs."""
        if self._example is not None:
            self._example = source
        if self.size.meshes > 1:
            self._load_extents(source)
        self.fill([*[_rows(buffer, source) for buffer in self._sources], *others])

    def fill(self, all_rows: Iterable[Rows]) -> None:
        """Copy rows into buffers, and remember their parts, because slicing takes time."""
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        fill(all_rows, self._known)

    def _load_extents(self, source: Operators) -> None:
        """The last mesh of the batch owns all further rows, and further meshes are empty."""
        meshes, vertices = self.size.meshes, self.size.vertices
        ends = [*accumulate(source.lengths[:-1], initial=0), *[vertices] * (meshes + 1 - len(source))]
        self.ptr.copy_(torch.tensor(ends), non_blocking=True)


def _rows(buffer: _Buffer, source: Operators) -> Rows:
    return Rows(buffer.tensor, buffer.read(source), None if buffer.rest is None else buffer.rest(source))


@torch.no_grad()
def fill(all_rows: Iterable[Rows], known: dict[Hashable, _Copies] | None = None) -> None:
    """Copy rows into buffers, with few kernels: one for each dtype, and one to set the rest to 0.

    known: the parts of buffers for some numbers of rows. New ones are added.
    """
    given = [*all_rows]
    key = tuple([(id(buffer), values.shape[0], rest == 0) for buffer, values, rest in given])
    found = None if known is None else known.get(key)
    if found is None:
        found = _copies_of(given)
        if known is not None:
            known[key] = found
    for parts, numbers, further in found.copies:
        torch._foreach_copy_(parts, [given[i].values for i in numbers] + further)
    for parts in found.zeros:
        torch._foreach_zero_(parts)
    for part, number in found.others:
        rest = given[number].rest
        assert rest is not None
        part.fill_(rest)


def _copies_of(given: Sequence[Rows]) -> _Copies:
    """Find the parts of buffers for rows, and group them by dtype."""
    copies: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    indices: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    zeros: dict[torch.dtype, list[Tensor]] = {}
    others: list[tuple[Tensor, int]] = []
    for number, (buffer, values, rest) in enumerate(given):
        count, size = values.shape[0], buffer.shape[0]
        if count > 0:
            parts, numbers = copies.setdefault(buffer.dtype, ([], []))
            parts.append(buffer[:count] if count < size else buffer)
            numbers.append(number)
        if count == size:
            continue
        remaining = buffer[count:]
        if rest is None:
            own = torch.arange(count, size, dtype=buffer.dtype, device=buffer.device)
            indices.setdefault(buffer.dtype, []).append((remaining, own))
        elif rest == 0:
            zeros.setdefault(buffer.dtype, []).append(remaining)
        else:
            others.append((remaining, number))
    grouped = []
    for dtype in {**copies, **indices}:
        parts, numbers = copies.get(dtype, ([], []))
        further = indices.get(dtype, [])
        grouped.append(([*parts, *(part for part, _ in further)], numbers, [values for _, values in further]))
    return _Copies([rows.buffer for rows in given], grouped, [*zeros.values()], others)
