"""The buffers that a network reads while a CUDA graph is recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.cuda_graphs.arena import Arena, Shape
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.geometry import Operators

Read = Callable[[Operators], Tensor]
Rest = Callable[[Operators], float]
# A buffer, its first rows and its other rows, by the id of the buffer and the number of first rows.
Parts = dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]

MAX_PARTS = 512  # parts that the buffers remember; each size of a batch has about ten


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
        self._filled: dict[str, tuple[Tensor, list[_Buffer]]] = {}
        self._parts: Parts = {}
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
            self._filled[name] = tensor, buffers
            fill([_rows(buffer, self.example) for buffer in buffers])
        return self._filled[name][0]

    def load(self, source: Operators, *others: Rows) -> None:
        """Copy the operators of a batch into all buffers that have been asked for, and other rows into theirs."""
        if self._example is not None:
            self._example = source
        if self.size.meshes > 1:
            self._load_extents(source)
        buffers = [buffer for _, each in self._filled.values() for buffer in each]
        self.fill([*(_rows(buffer, source) for buffer in buffers), *others])

    def fill(self, all_rows: Iterable[Rows]) -> None:
        """Copy rows into buffers that live as long as this object, which remembers their parts: slicing takes time."""
        if len(self._parts) > MAX_PARTS:
            self._parts.clear()
        fill(all_rows, self._parts)

    def _load_extents(self, source: Operators) -> None:
        """The last mesh of the batch owns all further rows, and further meshes are empty."""
        meshes, vertices = self.size.meshes, self.size.vertices
        ends = [*accumulate(source.lengths[:-1], initial=0), *[vertices] * (meshes + 1 - len(source))]
        self.ptr.copy_(torch.tensor(ends), non_blocking=True)


def _rows(buffer: _Buffer, source: Operators) -> Rows:
    return Rows(buffer.tensor, buffer.read(source), None if buffer.rest is None else buffer.rest(source))


@torch.no_grad()
def fill(all_rows: Iterable[Rows], parts: Parts | None = None) -> None:
    """Copy rows into buffers, with few kernels: one for each dtype, and one to set the rest to 0.

    parts: parts of these buffers that are known. New ones are added.
    """
    parts = {} if parts is None else parts
    copies: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    zeros: dict[torch.dtype, list[Tensor]] = {}
    for buffer, values, rest in all_rows:
        count, size = values.shape[0], buffer.shape[0]
        into, given = copies.setdefault((values.dtype, values.device), ([], []))
        if count == size:
            into.append(buffer)
            given.append(values)
            continue
        place = id(buffer), count
        if place not in parts:
            parts[place] = buffer, buffer[:count], buffer[count:]
        _, rows, remaining = parts[place]
        if count > 0:
            into.append(rows)
            given.append(values)
        if rest is None:
            into.append(remaining)
            given.append(torch.arange(count, size, dtype=buffer.dtype, device=buffer.device))
        elif rest == 0:
            zeros.setdefault(buffer.dtype, []).append(remaining)
        else:
            remaining.fill_(rest)
    for into, given in copies.values():
        torch._foreach_copy_(into, given)
    for each in zeros.values():
        torch._foreach_zero_(each)
