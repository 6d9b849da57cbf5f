"""How kernels cut their work into tiles.

Sizes are chosen by data type, K and C, and hardly by V, so that meshes of other sizes compile nothing anew.
`diffnet bench tune-…` measures others.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """Tile sizes (rows V, eigenpairs K, channels C), warps and pipeline stages of a program, and how many programs a
    multiprocessor is given."""

    v: int
    k: int
    c: int
    warps: int
    stages: int
    programs: int


def cdiv(size: int, block: int) -> int:
    """How many blocks cover `size`. `triton.cdiv` does the same, and takes 5 µs for it."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least that covers `size`; see `cdiv`."""
    return 1 << max(size - 1, 0).bit_length()


def tile(size: int, largest: int) -> int:
    """The power of two that covers `size`, within what matrix units take."""
    return max(16, min(largest, power_of_2(size)))


def roomy(tensor: Tensor) -> bool:
    """Whether a program may take the 227 KB of shared memory of Hopper's and Blackwell's data-centre GPUs; others have
    99 KB or more."""
    return _properties(tensor.device.index).major in (9, 10)


def starts_early(tensor: Tensor) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended, and wait for its results on the GPU
    (programmatic dependent launch, from Hopper on): that hides the launch of a short kernel that sums up."""
    return tensor.is_cuda and torch.version.hip is None and _properties(tensor.device.index).major >= 9


def processors(tensor: Tensor) -> int:
    """Multiprocessors that programs are spread over; Triton's interpreter has one, and gets work for several."""
    return int(_properties(tensor.device.index).multi_processor_count) if tensor.is_cuda else 3


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """As `torch.cuda.device_of`, and free where the tensor's device is the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING = contextlib.nullcontext()


@functools.cache
def _properties(device: int) -> Any:
    return torch.cuda.get_device_properties(device)


def interpreted(tensor: Tensor) -> bool:
    """Tiny tiles for Triton's interpreter, so that small tests have several of them in every direction."""
    return not tensor.is_cuda


def row_major(x: Tensor) -> Tensor:
    """Kernels take rows at any distance; within a row, elements must be neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
