"""What one training step reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from diffnet.geometry import Operators


class Batch(NamedTuple):
    """A packed batch on the device of the network.

    features: (V, C) float32
    labels: (V,), (F,) or (E,) int64
    rotations: (B, 3, 3) float32, by which the step rotates the features of each mesh, or None
    """

    features: Tensor
    labels: Tensor
    operators: Operators
    rotations: Tensor | None = None
