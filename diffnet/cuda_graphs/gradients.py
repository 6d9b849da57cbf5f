"""The gradients of parameters as one tensor, which autograd splits again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = tuple[tuple[int, ...], ...]  # the numbers of parameters, in one tuple for each dtype

ALIGNED = 8  # elements. Kernels of optimizers read several at once where a tensor starts at a multiple of this.


def groups_of(parameters: Sequence[Tensor], numbers: Iterable[int]) -> Groups:
    """Group parameters by dtype. Those that would shift their successors off the alignment come last."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in sorted(numbers, key=lambda i: parameters[i].numel() % ALIGNED != 0):
        groups.setdefault(parameters[i].dtype, []).append(i)
    return tuple(tuple(group) for group in groups.values())


def split(flat: Tensor, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Tensor]:
    """Split a tensor (N,) into tensors of these shapes, whose sizes sum to N. They share its memory."""
    # "Unsafe" means that each part has a version of its own: autograd does not see that they share memory. They don't
    # overlap, so that is right. It takes a third of the time of other ways.
    parts = flat.unsafe_split_with_sizes(sizes)
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Joined(torch.autograd.Function):
    """A tensor (N,) without values that stands for parameters. Its gradient holds theirs one after the other."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.shapes, ctx.sizes = [p.shape for p in parameters], [p.numel() for p in parameters]
        return parameters[0].new_empty_strided((sum(ctx.sizes),), (0,))  # takes the memory of one number

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(split(grad, ctx.shapes, ctx.sizes))


class JoinedParameters:
    """Tensors that stand for the parameters of a module in the graphs of autograd, one for each dtype.

    A function that takes them has few inputs. One kernel copies all of its gradients, and autograd adds the gradients
    of several calls as one tensor. These tensors are made once. They save nothing, so any number of backward passes can
    run through them. Hooks, `autograd.grad` and `DistributedDataParallel` see the parameters as usual.
    """

    def __init__(self) -> None:
        self._known: dict[Groups, tuple[Tensor, ...]] = {}
        self._made_for: tuple[object, int] | None = None

    def clear(self) -> None:
        """Forget all tensors, so that autograd makes new nodes for the parameters."""
        self._made_for = None
        self._known.clear()

    def get(self, state: object, parameters: Sequence[Tensor], groups: Groups) -> tuple[Tensor, ...]:
        """The tensors for some groups of these parameters.

        state: an object that is another one whenever a parameter has been replaced or moved
        """
        if not groups:
            return ()
        device = parameters[groups[0][0]].device
        # Autograd runs the backward of a node on the stream on which the node was made.
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        if self._made_for != (state, stream):
            self.clear()
            self._made_for = state, stream
        found = self._known.get(groups)
        if found is None:
            found = tuple(_Joined.apply(*(parameters[i] for i in group)) for group in groups)  # type: ignore[no-untyped-call]
            # An in-place change would give the result of an operation another node.
            if all(parameters[i].is_leaf for group in groups for i in group):
                self._known[groups] = found
        return found
