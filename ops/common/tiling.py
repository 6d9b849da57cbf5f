"""Tile sizes and launches of kernels.

Tile sizes depend on the dtype, K and C, and hardly on V, so meshes of other sizes compile nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from diffnet.ops.common.compiler import constant
from diffnet.ops.common.launcher import is_known_triton

R = TypeVar("R")

# Arguments of kernels that change from batch to batch. Triton would compile a kernel again for the value 1 and for
# multiples of 16. Addresses are products with row lengths. These are constants of a kernel and show its alignment.
SIZES = (
    "rows_size",
    "meshes",
    "span",
    "spans",
    "other_span",
    "other_spans",
    "whole_spans",
    "programs",
    "plane_rows",
    "ignored",
    "threshold",
)


class Tiling(NamedTuple):
    """Tile sizes of a program and how it is launched.

    Attributes:
        v: rows, BLOCK_V
        k: eigenpairs or the inner size of a product, BLOCK_K
        c: channels, BLOCK_C
        warps: warps of a program
        stages: stages of the software pipeline
        programs: programs that are launched for each multiprocessor
    """

    v: int
    k: int
    c: int
    warps: int
    stages: int
    programs: int


MAX_PLANS = 4096  # that one function remembers


def planned(plan: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function that plans a launch: remember its results, because planning takes as long as the launch.

    plan: a function of a tensor, and of numbers and strings. Of the tensor it may use the dtype and the device
        only.
    """
    plans: dict[tuple[Any, ...], R] = {}

    @functools.wraps(plan)
    def remembered(*arguments: Any) -> R:
        like = arguments[0]
        key = like.dtype, like.get_device(), *arguments[1:]
        result = plans.get(key)
        if result is None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            result = plans[key] = plan(*arguments)
        return result

    return remembered


def cdiv(size: int, block: int) -> int:
    """Return how many blocks cover `size`. `triton.cdiv` does the same and takes 5 µs."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`. `triton.next_power_of_2` is slower, see `cdiv`."""
    return 1 << max(size - 1, 0).bit_length()


@functools.cache
def tile(size: int, largest: int) -> int:
    """Return the power of two that covers `size`, at least 16, which matrix units need, and at most `largest`."""
    return max(16, min(largest, power_of_2(size)))


def has_large_shared_memory(tensor: Tensor) -> bool:
    """Return whether a program may use 227 KB of shared memory: on data-center GPUs of Hopper and Blackwell.

    Other GPUs have 99 KB or more.
    """
    return _major(tensor.device.index) in (9, 10)


def on_blackwell(tensor: Tensor) -> bool:
    """Return whether the tensor is on a data-center GPU of Blackwell."""
    return tensor.is_cuda and _major(tensor.device.index) == 10


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Return whether the tensor's device has matrix units for bfloat16: GPUs from compute capability 8 on.

    It is true on the CPU, where Triton's interpreter multiplies.
    """
    return not tensor.is_cuda or _major(tensor.device.index) >= 8


@constant
def _major(device: int) -> int:
    """The compute capability, rounded down. AMD's numbers mean other things; their GPUs take the tiles of 8.0."""
    return _properties(device).major if torch.version.hip is None else 8


def nvidia_options(**options: Any) -> dict[str, Any]:
    """Return options of launches that only the compiler for NVIDIA's GPUs takes, or none for another one."""
    return options if torch.version.hip is None else {}


def starts_early(tensor: Tensor) -> bool:
    """Return whether a kernel may be launched before the previous kernel ends and wait for it on the GPU.

    This is programmatic dependent launch, available from Hopper on. It hides the launch of a short kernel.
    """
    return tensor.is_cuda and torch.version.hip is None and _properties(tensor.device.index).major >= 9


def on_hopper(tensor: Tensor) -> bool:
    """Return whether kernels run that are written in Gluon for Hopper's matrix units.

    Gluon still changes from version to version of Triton, so the version must be known.
    """
    return tensor.is_cuda and _runs_gluon(tensor.device.index)


@functools.cache
def _runs_gluon(device: int) -> bool:
    return torch.version.hip is None and _properties(device).major == 9 and is_known_triton()


def processors(tensor: Tensor) -> int:
    """Return the number of multiprocessors. In Triton's interpreter it is 3, so that small tests have several spans."""
    return _properties(tensor.device.index).multi_processor_count if tensor.is_cuda else 3


@functools.cache
def _properties(device: int) -> Any:
    return torch.cuda.get_device_properties(device)


def interpreted(tensor: Tensor) -> bool:
    """Return whether Triton's interpreter runs the kernels. It gets tiny tiles, so that small tests have several."""
    return not tensor.is_cuda


def small_tiling(like: Tensor, k: int, c: int) -> Tiling | None:
    """Return the tiles in Triton's interpreter and on GPUs with little shared memory, None on other GPUs.

    k, c: the inner size and the channels of a product
    """
    if interpreted(like):
        return Tiling(16, 16, 16, 4, 1, 1)
    return None if has_large_shared_memory(like) else Tiling(32, tile(k, 32), tile(c, 32), 4, 2, 4)


MAX_ROW_STRIDE = 2**23  # elements from one row to the next: offsets in a tile of 128 rows are 32-bit


def row_major(x: Tensor) -> Tensor:
    """Return x with neighboring elements in each row. Kernels accept any distance between rows up to MAX_ROW_STRIDE."""
    if x.is_contiguous():
        return x
    near = x.stride(-2) <= MAX_ROW_STRIDE
    return x if near and (x.stride(-1) == 1 or x.shape[-1] == 1) else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x with rows that start at multiples of 16 bytes, for copies that need it."""
    x = row_major(x)
    fits = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def planes_apart(x: Tensor) -> tuple[Tensor, int]:
    """Return x (planes, V, C) as `row_major` does, and how many rows lie between two planes."""
    x = row_major(x)
    if x.stride(1) == 0 or x.stride(0) % x.stride(1):
        x = x.contiguous()
    return x, x.stride(0) // max(x.stride(1), 1)


def empty_planes(like: Tensor, planes: int, rows: int, columns: int) -> tuple[Tensor, int]:
    """Return an empty (planes, rows, columns) tensor, and how many rows lie between two planes.

    Every plane starts at a multiple of 16 bytes. Kernels that read a single plane would be compiled again otherwise.
    """
    aligned = columns * like.element_size() % 16 == 0 or planes == 1
    apart = rows if aligned else -(-rows // 16) * 16
    out = like.new_empty(planes, apart, columns)
    return out if apart == rows else out[:, :rows], apart
