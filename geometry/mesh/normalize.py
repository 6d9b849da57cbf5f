"""Normalised positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", "Tensor", NDArray[np.float64])


def normalize_positions(verts: Positions) -> Positions:
    """Move the mean of the vertices to the origin and scale the farthest one to distance 1. (V, 3) → (V, 3)"""
    centered: Positions = verts - verts.mean(0)
    radius = (centered**2).sum(1).max() ** 0.5
    scaled: Positions = centered / (radius if radius > 0 else 1.0)
    return scaled
