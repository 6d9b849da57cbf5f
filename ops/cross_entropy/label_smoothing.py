"""Cross-entropy with smoothed labels, as the original implementation defines it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.checks import check_number
from diffnet.ops.cross_entropy.op import cross_entropy, row_weights, total_weight


def label_smoothing_loss(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.2,
    ignored: int = -1,
    backend: Backend = "auto",
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the mean cross-entropy with smoothed labels.

    The true class has the weight 1 − s and each other class s / (C − 1). This is `label_smoothing_log_loss` of the
    original implementation. PyTorch's `label_smoothing` also smooths the true class; s · C / (C − 1) gives the same.

    Args:
        logits: (N, C) floating point, C ≥ 2. Log-probabilities give the same loss, because their log-softmax is
            themselves.
        labels: (N,) int64 or int32 from 0 to C − 1
        smoothing: s, from 0 to 1
        ignored: a label whose rows don't count
        backend: see `cross_entropy`
        weights: (C,) the weight of each class, see `cross_entropy`. The result is then the weighted mean over the rows,
            where a row has the weight of its label. None means 1 for all.

    Returns:
        () in float32, or in float64 for float64 logits. 0 if no row counts, or all that count have weight 0.

    Raises:
        TypeError, IndexError: see `cross_entropy`.
        ValueError: see `cross_entropy`, and for fewer than 2 classes and a smoothing out of range.

    >>> label_smoothing_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), smoothing=0.2)
    tensor(0.6395)
    """
    check_number("smoothing", smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing should be from 0 to 1, got {smoothing}")
    exact = cross_entropy(logits, labels, ignored, backend, weights=weights)
    classes = logits.shape[1]
    if classes < 2:
        raise ValueError(f"label smoothing needs at least 2 classes, got logits of shape {tuple(logits.shape)}")
    counted = labels != ignored
    losses = exact
    if smoothing > 0:  # a class of probability 0 would turn 0 · ∞ into NaN
        share = smoothing * classes / (classes - 1)
        even = -F.log_softmax(logits, 1, dtype=exact.dtype).mean(1)
        if weights is not None:
            even = even * row_weights(weights, labels).to(even.dtype)
        losses = torch.where(counted, (1 - share) * exact + share * even, 0)
    return losses.sum() / total_weight(labels, ignored, weights)
