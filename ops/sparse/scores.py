"""The scale and the bias of attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def checked_number(name: str, number: Any) -> float:
    """Return an argument that isn't a tensor if it is a real number, such as a NumPy scalar. Raises TypeError."""
    if isinstance(number, (float, int, torch.SymFloat)):
        return number  # type: ignore[return-value]
    if not isinstance(number, Real):
        raise TypeError(f"{name} should be a number or a tensor, got {type(number).__name__}")
    return float(number)


def check_broadcast(name: str, given: Sequence[int], shape: Sequence[int]) -> None:
    """Check that a tensor of the given shape broadcasts to this shape. Raises ValueError."""
    if len(given) > len(shape) or any(n not in (1, m) for n, m in zip(reversed(given), reversed(shape), strict=False)):
        raise ValueError(f"{name} should broadcast to {tuple(shape)}, shape is {tuple(given)}")


def scaled_and_biased(scores: Tensor, scale: float | Tensor, bias: Tensor | None) -> Tensor:
    """Return scale · scores + bias in float32 or wider, by PyTorch operations, which differentiate for all three."""
    sum_dtype = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(sum_dtype) * (scale.to(sum_dtype) if isinstance(scale, Tensor) else scale)
    return scores if bias is None else scores + bias.to(sum_dtype)
