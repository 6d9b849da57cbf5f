"""Checks of arguments, shared by both backends.

They read shapes, strides, dtypes and devices only, so they never wait for a GPU. Values on a GPU are checked in debug
mode, with `DIFFNET_DEBUG=1` in the environment when the package is imported. Values on the CPU are always checked.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.compiler import PLAIN_TYPES, under_transforms

DEBUG = os.environ.get("DIFFNET_DEBUG", "") not in ("", "0")

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_integer(name: str, value: Any) -> int:
    """Return an integer of Python or NumPy as a Python integer. Raises TypeError for a bool, a tensor and others."""
    if not isinstance(value, (bool, Tensor)):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} should be an integer, got {value!r} of type {type(value).__name__}")


def check_count(name: str, value: Any, least: int) -> int:
    """Return what `check_integer` returns. Raises TypeError as it does, and ValueError below `least`."""
    count = check_integer(name, value)
    if count < least:
        raise ValueError(f"{name} should be at least {least}, got {count}")
    return count


def check_lengths(lengths: Any, name: str, rows: int) -> list[int]:
    """Check the lengths of packed meshes, which add up to the rows of an argument, and return them. None is one mesh.

    Raises TypeError or ValueError as `check_count` does, ValueError for another sum.
    """
    values = lengths.tolist() if isinstance(lengths, Tensor) else [rows] if lengths is None else lengths
    counts = [check_count(f"lengths[{i}]", count, 0) for i, count in enumerate(values)]
    if sum(counts) != rows:
        raise ValueError(f"lengths should add up to the {rows} rows of {name}, got {counts}")
    return counts


def check_number(name: str, value: Any) -> None:
    """Check that an argument is a real number, of Python or NumPy, or a tensor. Raises TypeError, for a bool too."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or hasattr(value, "__float__")):
        raise TypeError(f"{name} should be a number, got {value!r} of type {type(value).__name__}")


def check_dropout(value: Any) -> None:
    """Check that an argument is a probability below 1. Raises TypeError for a bool or no number, else ValueError."""
    if isinstance(value, bool):
        hint = "dropout=0.5" if value else "dropout=0.0"
        raise TypeError(f"dropout should be the probability of a zero, got {value}; write {hint}")
    check_number("dropout", value)
    if not 0 <= value < 1:
        raise ValueError(f"dropout should be at least 0 and below 1, got {value}")


def device_and_dtype(
    device: torch.device | str | torch.dtype | None, dtype: torch.dtype | None
) -> tuple[torch.device | str | None, torch.dtype | None]:
    """Sort the arguments of `.to`, whose first one may be a dtype. Raises TypeError for two dtypes."""
    if isinstance(device, torch.dtype):
        if dtype is not None:
            raise TypeError(f".to expects one dtype, got {device} and {dtype}")
        device, dtype = None, device
    return device, dtype


def not_a_tensor(name: str, value: Any) -> TypeError:
    """Return the error for an argument that is no tensor. It says how to convert a list or an array."""
    converter = {"list": "torch.tensor", "tuple": "torch.tensor", "ndarray": "torch.from_numpy"}
    kind = type(value).__name__
    hint = f"; convert it with {converter[kind]}" if kind in converter else ""
    return TypeError(f"{name} should be a tensor, got {kind}{hint}")


def check_is_tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor. Raises TypeError, see `not_a_tensor`."""
    if not isinstance(value, Tensor):
        raise not_a_tensor(name, value)


def check_tensor(name: str, tensor: Any, shape: Sequence[int | str], device: torch.device | None = None) -> None:
    """Check that an argument is a floating-point tensor of this shape, and on this device if one is given.

    A string in the shape names a free size. Nothing is broadcast: a tensor of another shape is refused.

    Raises TypeError if it is no tensor or not floating point, ValueError for another shape or device.
    """
    if not isinstance(tensor, Tensor):
        raise not_a_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} should be floating point, got {tensor.dtype}")
    dims = tensor.shape
    if dims != tuple(shape) and not _fits(dims, shape):
        sizes = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
        raise ValueError(f"{name} should have shape ({sizes}), shape is {tuple(dims)}")
    if device is not None and tensor.device != device:
        raise _elsewhere(name, tensor, device)


def _fits(dims: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(dims) != len(shape):
        return False
    for size, expected in zip(dims, shape, strict=True):  # a loop takes half the time of `all`
        if size != expected and not isinstance(expected, str):
            return False
    return True


def _elsewhere(name: str, tensor: Tensor, device: torch.device) -> ValueError:
    return ValueError(f"{name} should be on {device}, it is on {tensor.device}")


def check_operand(
    name: str, operand: Any, shape: Sequence[int | str], device: torch.device, *, floating: bool = False
) -> None:
    """Check that an operand of a pattern is a real tensor on its device, whose last dimensions have this shape.

    A string in the shape stands for any size. floating: whether integers and bools are refused, too

    Raises TypeError if it is no tensor, is complex or should be floating point, ValueError for another shape or device.
    """
    if not isinstance(operand, Tensor):
        raise not_a_tensor(name, operand)
    if not operand.is_floating_point() and (floating or operand.is_complex()):
        raise TypeError(f"{name} should be {'floating point' if floating else 'real'}, got {operand.dtype}")
    dims = operand.shape
    if len(dims) < len(shape) or not _fits(dims[len(dims) - len(shape) :], shape):
        raise ValueError(f"{name} should have shape (…, {', '.join(map(str, shape))}), shape is {tuple(dims)}")
    if operand.device != device:
        raise ValueError(f"{name} should be on {device}, where the pattern is; it is on {operand.device}")


def broadcast_shapes(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape that two shapes broadcast to.

    The first call of `torch.broadcast_shapes` imports SymPy, which takes about a second.

    Raises ValueError if they don't broadcast.
    """
    if any(n != m and 1 not in (n, m) for n, m in zip(reversed(a), reversed(b), strict=False)):
        raise ValueError(f"the batches of the factors should broadcast, they are {tuple(a)} and {tuple(b)}")
    if len(a) == 0 or len(b) == 0:
        return (*a, *b)
    scalar = torch.empty((), device="meta")  # nothing has to be computed
    return tuple(torch.broadcast_tensors(scalar.expand(*a), scalar.expand(*b))[0].shape)  # type: ignore[no-untyped-call]


def check_index(name: str, index: Any, shape: tuple[int, ...] | None, device: torch.device) -> None:
    """Check that an argument is a tensor of int32 or int64 of this shape on this device; None stands for any 1-D shape.

    Raises TypeError or ValueError as `check_tensor` does.
    """
    if not isinstance(index, Tensor):
        raise not_a_tensor(name, index)
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} should be int32 or int64, got {index.dtype}")
    if index.ndim != 1 if shape is None else index.shape != shape:
        expected = "1 dimension" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"{name} should have {expected}, shape is {tuple(index.shape)}")
    if index.device != device:
        raise _elsewhere(name, index, device)


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
    meshes = ptr.shape[0] - 1  # `len` of a tensor takes 1 µs
    if meshes < 0:
        raise ValueError("ptr should have one value more than there are meshes, got none")
    if lengths is not None and (len(lengths) != meshes or sum(lengths) != rows):
        raise ValueError(
            f"lengths should be {meshes} that add up to {rows}, got {len(lengths)} that add up to {sum(lengths)}"
        )
    if readable(ptr):
        values = ptr.tolist()
        if values[0] != 0 or values[-1] != rows or any(b < a for a, b in pairwise(values)):
            raise ValueError(
                f"ptr should ascend from 0 to the number of rows, {rows}, got {values if len(values) < 20 else ptr}"
            )
        if lengths is not None and values != list(accumulate(lengths, initial=0)):
            differences = torch.diff(ptr).tolist()
            raise ValueError(f"lengths should be the differences of ptr, {differences}, got {list(lengths)}")
    return ptr.contiguous()


def readable(index: Tensor) -> bool:
    """Return whether checks may read the values: on the CPU or in debug mode, and while nothing is traced."""
    here = DEBUG or index.device.type == "cpu"
    traced = torch.compiler.is_compiling() or under_transforms()
    return here and not traced and type(index) in PLAIN_TYPES


def check_finite(name: str, x: Tensor, least: float = -math.inf) -> None:
    """Raise ValueError for NaN, infinity and values below `least`, on the CPU and in debug mode."""
    if readable(x):
        right = x.isfinite() & (x >= least)
        if not right.all():
            at = (~right).nonzero()[0].tolist()
            expected = "finite" if least == -math.inf else f"finite and at least {least:g}"
            raise ValueError(f"{name} should be {expected}, got {x[tuple(at)].item()} at index {at}")


def nonnegative(name: str, x: Tensor) -> Tensor:
    """Return x if its values are finite and at least 0. Raises ValueError on the CPU and in debug mode.

    Elsewhere, a negative value becomes NaN, because reading it would wait for a GPU.
    """
    check_finite(name, x, least=0)
    return x if readable(x) else torch.where(x >= 0, x, torch.nan)
