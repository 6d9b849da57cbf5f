"""Confusion matrices over labelled elements."""

from __future__ import annotations

import torch
from torch import Tensor


def confusion_matrix(prediction: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Counts (C, C) int64, rows the truth, columns the prediction; unlabelled (negative) truth doesn't count.

    prediction, truth: (N,) int64
    """
    # Unlabelled elements go to one more bin that is cut off: no read-back, which selecting them would need.
    bins = torch.where(truth >= 0, truth * classes + prediction, classes * classes)
    return torch.bincount(bins, minlength=classes * classes + 1)[:-1].reshape(classes, classes)


def accuracy(matrix: Tensor) -> float:
    """The share of labelled elements predicted right; NaN where there are none."""
    return float(matrix.diagonal().sum().double() / matrix.sum())
