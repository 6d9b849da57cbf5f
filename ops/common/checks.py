"""Checks of arguments, shared by both backends.

They read shapes, strides, dtypes and devices only, so they never wait for a GPU. Values on a GPU are checked in debug
mode, with `DIFFNET_DEBUG=1` in the environment when the package is imported. Values on the CPU are always checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

DEBUG = os.environ.get("DIFFNET_DEBUG", "") not in ("", "0")

_INDEX_DTYPES = (torch.int32, torch.int64)
_WITH_VALUES = (Tensor, torch.nn.Parameter)  # subclasses stand in for tensors while a tracer runs, without values


def check_tensor(name: str, tensor: Any, shape: Sequence[int], device: torch.device | None = None) -> None:
    """Check that an argument is a floating-point tensor of exactly this shape, and on this device if one is given.

    Nothing is broadcast: a tensor of another shape is refused.

    Raises TypeError if it is no tensor or not floating point, ValueError for another shape or device.
    """
    _check_floating(name, tensor)
    if tensor.shape != tuple(shape):
        raise ValueError(f"{name} should have shape {tuple(shape)}, shape is {tuple(tensor.shape)}")
    if device is not None:
        _check_device(name, tensor, device)


def check_rank(name: str, tensor: Any, shape: str, rank: int) -> None:
    """Check that an argument is a floating-point tensor with this number of dimensions; `shape` describes it in errors.

    Raises TypeError or ValueError as `check_tensor` does.
    """
    _check_floating(name, tensor)
    if tensor.ndim != rank:
        raise ValueError(f"{name} should have shape {shape}, shape is {tuple(tensor.shape)}")


def check_matrix(name: str, tensor: Any, rows: int | str, columns: int | str, device: torch.device) -> None:
    """Check that an argument is a floating-point matrix of this shape on this device. A string names a free size.

    Raises TypeError or ValueError as `check_tensor` does.
    """
    _check_floating(name, tensor)
    shape = tensor.shape
    if (
        len(shape) != 2
        or (shape[0] != rows and not isinstance(rows, str))
        or (shape[1] != columns and not isinstance(columns, str))
    ):
        raise ValueError(f"{name} should have shape ({rows}, {columns}), shape is {tuple(shape)}")
    _check_device(name, tensor, device)


def _check_floating(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} should be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} should be floating point, got {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} should be on {device}, it is on {tensor.device}")


def check_index(name: str, index: Any, shape: tuple[int, ...] | None, device: torch.device) -> None:
    """Check that an argument is a tensor of int32 or int64 of this shape on this device; None stands for any 1-D shape.

    Raises TypeError or ValueError as `check_tensor` does.
    """
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} should be a tensor, got {type(index).__name__}")
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} should be int32 or int64, got {index.dtype}")
    if index.ndim != 1 if shape is None else index.shape != shape:
        expected = "1 dimension" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"{name} should have {expected}, shape is {tuple(index.shape)}")
    _check_device(name, index, device)


def check_ptr(ptr: Any, rows: int, lengths: Sequence[int] | None, device: torch.device) -> Tensor:
    """Check the extents of a packed batch and return `ptr` as kernels read it, contiguous.

    Args:
        ptr: (B+1,) int32 or int64, ascending from 0 to `rows`. Its values are checked on the CPU and in debug mode.
        rows: V
        lengths: the same extents as Python integers, or None. Their number and their sum are always checked.
        device: of the rows

    Raises TypeError or ValueError that names the value.
    """
    check_index("ptr", ptr, None, device)
    if len(ptr) == 0:
        raise ValueError("ptr should have one value more than there are meshes, got none")
    if lengths is not None and (len(lengths) != len(ptr) - 1 or sum(lengths) != rows):
        raise ValueError(
            f"lengths should be {len(ptr) - 1} that add up to {rows}, got {len(lengths)} that add up to {sum(lengths)}"
        )
    if readable(ptr):
        _check_ptr_values(ptr, rows, lengths)
    contiguous: Tensor = ptr.contiguous()
    return contiguous


def readable(index: Tensor) -> bool:
    """Return whether checks may read the values: on the CPU or in debug mode, and while nothing is traced."""
    here = DEBUG or index.device.type == "cpu"
    return here and not torch.compiler.is_compiling() and type(index) in _WITH_VALUES


def _check_ptr_values(ptr: Tensor, rows: int, lengths: Sequence[int] | None) -> None:
    values = ptr.tolist()
    if values[0] != 0 or values[-1] != rows or any(b < a for a, b in pairwise(values)):
        raise ValueError(
            f"ptr should ascend from 0 to the number of rows, {rows}, got {values if len(values) < 20 else ptr}"
        )
    if lengths is not None and values != list(accumulate(lengths, initial=0)):
        raise ValueError(f"lengths should be the differences of ptr, {torch.diff(ptr).tolist()}, got {list(lengths)}")
