"""Random numbers that don't depend on the sizes of tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.cuda_graphs.dispatch_mode import DispatchMode
from diffnet.ops.common.cuda_graph import NotCapturable

_aten = torch.ops.aten


class SameRandomNumbers(DispatchMode):
    """Random operations of PyTorch give the same numbers in every such block.

    Those with one number for each element compute it from its place in the tensor and from the count of operations
    before. If a tensor has more rows than in another block, the first rows are equal, so dropout is equal there. Other
    operations start with the same seed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self._count += 1
        if func is _aten.native_dropout.default:
            x, p, train = args
            kept = self._uniform(x) >= (p if train else 0)
            return x * kept / (1 - p) if p < 1 else x * 0, kept
        torch.manual_seed(self._count)
        out = func(*args, **kwargs)
        draw = _DRAWS.get(func.overloadpacket)
        if draw is not None:
            out.copy_(draw(self._uniform(out), *args))
        return out

    def _uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1, 1 excluded, for each place of a tensor. float64"""
        mixed = torch.full((), self._count, dtype=torch.int64, device=like.device)
        for dim, size in enumerate(like.shape):
            places = torch.arange(size, device=like.device).view(-1, *[1] * (like.ndim - dim - 1))
            mixed = _mix(mixed * 0x2545F491 + places)
        return (_mix(mixed) & (2**52 - 1)).double() / 2**52


def _mix(x: Tensor) -> Tensor:
    """Change all bits of numbers by all their bits, as the finalizer of MurmurHash3. int64 products wrap around."""
    x = (x ^ (x >> 33)) * -49064778989728563
    x = (x ^ (x >> 33)) * -4265267296055464877
    return x ^ (x >> 33)


def _normal(u: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * u.clamp(1e-12, 1 - 1e-12) - 1)


# From numbers between 0 and 1, and the arguments of an operation, to its result.
_DRAWS: dict[Any, Callable[..., Tensor]] = {
    _aten.bernoulli: lambda u, x, p=None: u < (x if p is None else p),
    _aten.bernoulli_: lambda u, x, p=0.5: u < p,
    _aten.exponential_: lambda u, x, rate=1.0: -torch.log1p(-u) / rate,
    _aten.normal_: lambda u, x, mean=0.0, std=1.0: _normal(u) * std + mean,
    _aten.rand: lambda u, *_: u,
    _aten.rand_like: lambda u, *_: u,
    _aten.randn: lambda u, *_: _normal(u),
    _aten.randn_like: lambda u, *_: _normal(u),
    _aten.uniform_: lambda u, x, low=0.0, high=1.0: low + (high - low) * u,
}


@contextmanager
def forked_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy after the block."""
    before = _states()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002 - the state that old code uses


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Give the block the same random numbers as every such block, and leave all generators as they were.

    Raises NotCapturable if the block draws random numbers of Python or NumPy: a graph would repeat them.
    """
    with forked_random_numbers(device):
        before = _states()
        with SameRandomNumbers():
            yield
        if not all(map(_equal, _states(), before)):
            raise NotCapturable("its forward pass draws random numbers of Python or NumPy, which a graph would repeat")


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
