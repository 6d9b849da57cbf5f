"""Launches of kernels as another process can compile them: with names in place of kernels, and without tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.launcher import LaunchedKernel, launches_given_to


@dataclass(frozen=True)
class Pointer:
    """Stands in for a tensor. Triton asks a tensor for its dtype and for the alignment of its address.

    address: the tensor's address modulo 16
    """

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel. It can be pickled.

    module, name: where the kernel is found
    variant: tells the compiled kernel apart from all others: the hash of the kernel's source and of the functions that
        it calls, and what `LaunchedKernel.key` returns, without the device
    """

    module: str
    name: str
    variant: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile the kernel for Triton's active target, unless Triton's cache has it."""
        getattr(import_module(self.module), self.name).compile(self.arguments, self.options)


@contextmanager
def collected_launches() -> Iterator[dict[Hashable, Launch]]:
    """Collect the launches of the block, one for each compiled kernel that they need. None runs.

    Launches of kernels without `launched` run as usual. See `launches_given_to` for what else holds.
    """
    found: dict[Hashable, Launch] = {}

    def take(
        launched: LaunchedKernel, key: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if (launched, key) not in found:
            variant, given = f"{launched.source_hash()} {key[1:]}", without_tensors(arguments)
            found[launched, key] = Launch(launched.kernel.fn.__module__, launched.__name__, variant, given, options)

    with launches_given_to(take):
        yield found


def without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(without_tensors, value))
    return Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else value
