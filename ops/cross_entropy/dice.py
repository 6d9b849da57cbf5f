"""Dice losses: how much predicted and true classes overlap. Each class counts as a whole, so rare ones count too."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.cross_entropy.op import check_classes


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

    Returns:
        () in float32, or in float64 for float64 logits. 0 if no row counts, or the classes that occur have weight 0.

    Raises:
        TypeError, ValueError, IndexError: see `cross_entropy`.

    >>> dice_loss(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    tensor(0.3001)
    """
    p, truth = _shares(logits, labels, ignored, weights)
    both, count = (p * truth).sum(0), truth.sum(0)
    occurs = (count > 0).to(p.dtype)
    chosen = occurs if weights is None else occurs * weights.detach().to(p.dtype)
    dice = 2 * both / ((p * p).sum(0) + count).clamp(min=1)
    total = chosen.sum()
    return ((1 - dice) * chosen).sum() / torch.where(total > 0, total, 1)


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
    known = (labels >= 0) & (labels < classes)
    share = torch.where(counted, torch.where(known, 1.0, float("nan")), 0)
    p = torch.where(counted[:, None], logits, 0).softmax(1, sum_dtype(logits))
    truth = counted[:, None] & (labels[:, None] == torch.arange(classes, device=labels.device))
    return p * share.to(p.dtype)[:, None], truth.to(p.dtype)
