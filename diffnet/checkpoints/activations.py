"""Functions that a network can end in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Activation: TypeAlias = Callable[[Tensor], Tensor]


def log_softmax(x: Tensor) -> Tensor:
    """Log-probabilities over the last dimension."""
    return F.log_softmax(x, dim=-1)


# The functions that a file can name. All others are code, which a file doesn't hold.
NAMED_ACTIVATIONS: dict[str, Activation] = {"log_softmax": log_softmax, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
