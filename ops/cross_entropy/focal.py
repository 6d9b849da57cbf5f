"""Focal loss, which gives elements that are predicted well less weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.checks import check_number
from diffnet.ops.cross_entropy.op import check_classes, cross_entropy, row_weights, total_weight


def focal_loss(
    logits: Tensor,
    labels: Tensor,
    gamma: float = 2.0,
    ignored: int = -1,
    backend: Backend = "auto",
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the mean of −α (1 − p)^γ log p, where p is the softmax of the true class and α its weight.

    This is the focal loss of Lin et al. 2017, Focal Loss for Dense Object Detection (https://arxiv.org/abs/1708.02002),
    for several classes. The paper divides by the number of objects. Here it is the weighted mean over the rows, so
    γ = 0 gives the mean cross-entropy.

    Args:
        logits: (N, C) floating point. Log-probabilities give the same loss.
        labels: (N,) int64 or int32 from 0 to C − 1
        gamma: γ, finite and at least 0. The larger it is, the less rows count that are predicted well.
        ignored: a label whose rows don't count
        backend: see `cross_entropy`
        weights: (C,) α of each class, see `cross_entropy`. None means 1 for all.

    Returns:
        () in float32, or in float64 for float64 logits. 0 if no row counts, or all that count have weight 0.

    Raises:
        TypeError, IndexError: see `cross_entropy`.
        ValueError: see `cross_entropy`, and for a γ out of range.

    >>> focal_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor(0.0109)
    """
    check_number("gamma", gamma)
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma should be finite and at least 0, got {gamma}")
    check_classes(logits, labels, ignored, weights)
    losses = cross_entropy(logits, labels, ignored, backend)
    if gamma > 0:
        # 1 − p, exact for p near 1. At 0, the derivative of a root would be infinite.
        missing = (-torch.expm1(-losses)).clamp(min=torch.finfo(losses.dtype).tiny)
        losses = losses * missing**gamma
    if weights is not None:
        losses = losses * row_weights(weights, labels).to(losses.dtype)
    return losses.sum() / total_weight(labels, ignored, weights)
