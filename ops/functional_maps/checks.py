"""Checks of arguments that the operations on functional maps share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_index, check_integer, check_tensor, readable


def check_vertices(name: str, vertices: Tensor, count: int, rows: int, device: torch.device) -> None:
    """Check vertex numbers (rows,) from 0 to count − 1. Their values are checked on the CPU and in debug mode.

    Raises TypeError or ValueError as `check_index` does, IndexError for a number out of range.
    """
    check_index(name, vertices, (rows,), device)
    if readable(vertices):
        wrong = (vertices < 0) | (vertices >= count)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise IndexError(f"{name} should be from 0 to {count - 1}, got {int(vertices[at])} at index {at}")


def eigenpair_mask(name: str, counts: Sequence[int] | None, evals: Tensor) -> Tensor | None:
    """A mask (P, K) bool of the eigenvalues that count, given their number in each pair. None if all count.

    Raises TypeError for numbers that are not integers, ValueError for another count or a number out of range.
    """
    if counts is None:
        return None
    pairs, k = evals.shape
    numbers = [check_integer(name, count) for count in counts]
    if len(numbers) != pairs or not all(1 <= number <= k for number in numbers):
        raise ValueError(f"{name} should be {pairs} integers from 1 to {k}, got {numbers}")
    return torch.arange(k, device=evals.device) < torch.tensor(numbers, device=evals.device)[:, None]


def checked_number(name: str, value: Any, device: torch.device, *, positive: bool) -> float | Tensor:
    """Check a number or a tensor of shape (): finite, and above 0 or at least 0. Return it as a float or in float64.

    Tensors on a GPU are checked in debug mode only. Raises TypeError or ValueError that names the value.
    """
    if isinstance(value, Tensor):
        check_tensor(name, value, (), device)
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"{name} should be a number or a tensor of shape (), got {value!r} of type {kind}")
    if not isinstance(value, Tensor) or readable(value):
        number = value.item() if isinstance(value, Tensor) else float(value)
        if not (number > 0 if positive else number >= 0) or number == float("inf"):
            raise ValueError(f"{name} should be finite and {'above' if positive else 'at least'} 0, got {number:g}")
    return value.double() if isinstance(value, Tensor) else float(value)
