"""Losses of classifications besides the cross-entropy: with smoothed labels, focal, and Dice losses.

Dice losses measure how much predicted and true classes overlap. Each class counts as a whole, so rare ones count too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.checks import check_number
from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.cross_entropy.op import check_classes, cross_entropy, row_weights, total_weight


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
        labels, ignored, backend: see `cross_entropy`
        smoothing: s, from 0 to 1
        weights: (C,) the weight of each class, see `cross_entropy`. The result is then the weighted mean over the rows,
            where a row has the weight of its label. None means 1 for all.

    Returns () in float32, or in float64 for float64 logits. It is 0 if no row counts, or all that count have weight 0.
    Errors are those of `cross_entropy`, and ValueError for fewer than 2 classes and a smoothing out of range.

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
        logits, labels, ignored, backend: see `cross_entropy`. Log-probabilities give the same loss.
        gamma: γ, finite and at least 0. The larger it is, the less rows count that are predicted well.
        weights: (C,) α of each class, see `cross_entropy`. None means 1 for all.

    Returns () in float32, or in float64 for float64 logits. It is 0 if no row counts, or all that count have weight 0.
    Errors are those of `cross_entropy`, and ValueError for a γ out of range.

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


def dice_loss(logits: Tensor, labels: Tensor, ignored: int = -1, *, weights: Tensor | None = None) -> Tensor:
    """Compute 1 − D, where D is the mean Dice coefficient 2 Σ p g / (Σ p² + Σ g²) of the classes.

    p is the softmax of a class, g is 1 where it is the true one and else 0, and the sums run over all rows that count.
    So the meshes of a batch are scored together, as one larger mesh. The mean is taken over the classes that occur
    among the labels. Other classes lower p of those.

    The coefficient is that of Milletari et al. 2016, V-Net (https://arxiv.org/abs/1606.04797), for several classes.

    Args:
        logits: (N, C) floating point. Log-probabilities give the same loss.
        labels: (N,) int64 or int32 from 0 to C − 1
        ignored: a label whose rows don't count
        weights: (C,) the weight of each class in the mean, see `cross_entropy`. None means 1 for all.

    Returns () in float32, or in float64 for float64 logits. It is 0 if no row counts, or the classes that occur have
    weight 0. Errors are those of `cross_entropy`.

    >>> dice_loss(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    tensor(0.3001)
    """
    p, truth = _shares(logits, labels, ignored, weights)
    both, count = (p * truth).sum(0), truth.sum(0)
    occurs = (count > 0).to(p.dtype)
    factors = occurs if weights is None else occurs * weights.detach().to(p.dtype)
    dice = 2 * both / ((p * p).sum(0) + count).clamp(min=1)
    total = factors.sum()
    return ((1 - dice) * factors).sum() / torch.where(total > 0, total, 1)


def generalized_dice_loss(logits: Tensor, labels: Tensor, ignored: int = -1) -> Tensor:
    """Compute 1 − 2 Σ_c w_c Σ p g / Σ_c w_c Σ (p + g), where w_c is one over the squared number of rows of class c.

    p, g and the rows of a batch are those of `dice_loss`. Classes that don't occur among the labels have w_c = 0.

    Source: Sudre et al. 2017, Generalised Dice overlap as a deep learning loss function for highly unbalanced
    segmentations (https://arxiv.org/abs/1707.03237)

    For the arguments, the result and the errors, see `dice_loss`.

    >>> generalized_dice_loss(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    tensor(0.3822)
    """
    p, truth = _shares(logits, labels, ignored, None)
    count = truth.sum(0)
    factors = torch.where(count > 0, count.clamp(min=1) ** -2, 0)
    whole = (factors * (p.sum(0) + count)).sum()
    overlap = 2 * (factors * (p * truth).sum(0)).sum() / torch.where(count.sum() > 0, whole, 1)
    return torch.where(count.sum() > 0, 1 - overlap, 0 * overlap)  # not 0, which would hide NaN


def _shares(logits: Tensor, labels: Tensor, ignored: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The softmax (N, C) and the truth (N, C), 0 or 1, both 0 in rows that don't count. NaN for a label out of range.

    A comparison makes the truth, because sums by class with atomics differ from run to run.
    """
    check_classes(logits, labels, ignored, weights)
    counted, classes = labels != ignored, logits.shape[1]
    is_class = (labels >= 0) & (labels < classes)
    share = torch.where(counted, torch.where(is_class, 1.0, float("nan")), 0)
    p = torch.where(counted[:, None], logits, 0).softmax(1, sum_dtype(logits))
    truth = counted[:, None] & (labels[:, None] == torch.arange(classes, device=labels.device))
    return p * share.to(p.dtype)[:, None], truth.to(p.dtype)
