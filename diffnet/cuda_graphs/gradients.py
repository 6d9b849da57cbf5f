"""The gradients of parameters as one tensor, which autograd splits again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import Arena
from diffnet.cuda_graphs.sizes import BatchSize

Groups = tuple[tuple[int, ...], ...]  # the numbers of parameters, in one tuple for each dtype

ALIGNED = 8  # elements. Kernels of optimizers read several at once where a tensor starts at a multiple of this.


class Run(NamedTuple):
    """Tensors that lie one after the other and have the same shape but for the first dimension.

    size: the number of elements of all of them
    shape: of all of them, stacked along the first dimension
    rows: the first dimension of each. None for a single tensor without dimensions.
    """

    size: int
    shape: tuple[int, ...]
    rows: list[int] | None


def groups_of(parameters: Sequence[Tensor], numbers: Iterable[int]) -> Groups:
    """Group parameters by dtype. Those that would shift their successors off the alignment come last."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in sorted(numbers, key=lambda i: (parameters[i].numel() % ALIGNED != 0, parameters[i].shape[1:])):
        groups.setdefault(parameters[i].dtype, []).append(i)
    return tuple(tuple(group) for group in groups.values())


def runs_of(shapes: Iterable[torch.Size]) -> list[Run]:
    """The longest runs of tensors with these shapes, which lie one after the other."""
    runs = []
    for (dims, trailing), run in groupby(shapes, key=lambda shape: (min(len(shape), 1), shape[1:])):
        if dims == 0:
            runs += [Run(1, (), None) for _ in run]
        else:
            rows = [shape[0] for shape in run]
            runs.append(Run(sum(rows) * trailing.numel(), (sum(rows), *trailing), rows))
    return runs


def split(flat: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """Split a tensor (N,) into the tensors of runs, whose sizes sum to N. They share its memory."""
    # "Unsafe" means that each part has a version of its own: autograd does not see that they share memory. They don't
    # overlap, so that is right. It takes a third of the time of a view for each part.
    parts: list[Tensor] = []
    for joined, (_, shape, rows) in zip(flat.unsafe_split_with_sizes([run.size for run in runs]), runs, strict=True):
        if rows is None:
            parts.append(joined.view(shape))
        else:
            parts += joined.view(shape).unsafe_split_with_sizes(rows)
    return parts


def gradient_buffers(arena: Arena, parameters: Sequence[Tensor], groups: Groups) -> tuple[list[Tensor], list[Tensor]]:
    """One buffer for each group of parameters, and its parts for each parameter. Recordings of all sizes share them."""
    buffers: list[Tensor] = []
    parts: list[Tensor] = []
    for group in groups:
        runs = runs_of(parameters[i].shape for i in group)
        shape, dtype = (sum(run.size for run in runs),), parameters[group[0]].dtype
        buffers.append(arena.take("gradients", BatchSize(0, 0), lambda size, shape=shape: shape, dtype))  # type: ignore[misc]
        parts += split(buffers[-1], runs)
    return buffers, parts


class _Joined(torch.autograd.Function):
    """A tensor (N,) without values that stands for parameters. Its gradient holds theirs one after the other."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.runs = runs_of(p.shape for p in parameters)
        size = sum(run.size for run in ctx.runs)
        return parameters[0].new_empty_strided((size,), (0,))  # takes the memory of one number

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(split(grad, ctx.runs))


class JoinedParameters:
    """Tensors that stand for the parameters of a module in the graphs of autograd, one for each dtype.

    A function that takes them has few inputs. One kernel copies all of its gradients, and autograd adds the gradients
    of several calls as one tensor. These tensors are made once. They save nothing, so any number of backward passes can
    run through them. Hooks, `autograd.grad` and `DistributedDataParallel` see the parameters as usual.
    """

    def __init__(self) -> None:
        self._tensors: dict[Groups, tuple[Tensor, ...]] = {}
        self._owner: tuple[object, int] | None = None

    def clear(self) -> None:
        """Forget all tensors, so that autograd makes new nodes for the parameters."""
        self._owner = None
        self._tensors.clear()

    def get(self, state: object, parameters: Sequence[Tensor], groups: Groups) -> tuple[Tensor, ...]:
        """The tensors for some groups of these parameters.

        state: an object that is another one whenever a parameter has been replaced or moved
        """
        if not groups:
            return ()
        device = parameters[groups[0][0]].device
        # Autograd runs the backward of a node on the stream on which the node was made.
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        if self._owner != (state, stream):
            self.clear()
            self._owner = state, stream
        tensors = self._tensors.get(groups)
        if tensors is None:
            tensors = tuple(_Joined.apply(*(parameters[i] for i in group)) for group in groups)  # type: ignore[no-untyped-call]
            # An in-place change would give the result of an operation another node.
            if all(parameters[i].is_leaf for group in groups for i in group):
                self._tensors[groups] = tensors
        return tensors
