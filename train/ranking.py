"""How well the outputs of a network order the elements: areas under ROC curves, and average precision.

Each class is ranked against the others. Of two classes, only the second one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIMIT, _BINS = 32.0, 1 << 16  # of log-odds in a tally, so they are rounded to 1/1024


def log_odds(logits: Tensor) -> Tensor:
    """The logarithm of p / (1 − p) for the probability p of each ranked class. logits: (N, C) → (N, C or 1) float64"""
    x = logits.double()
    if x.shape[1] == 2:
        return x[:, 1:] - x[:, :1]
    shares = x.log_softmax(1)
    return shares - torch.log(-torch.expm1(shares))


def new_ranking(classes: int, device: torch.device) -> Tensor:
    """Counts of nothing, see `ranking_tally`."""
    return torch.zeros(_ranked(classes), 2, _BINS, dtype=torch.int64, device=device)


def ranking_tally(logits: Tensor, truth: Tensor) -> Tensor:
    """Counts (C or 1, 2, B) int64 of labeled elements: of each ranked class, without it and with it, by log-odds.

    logits: (N, C). truth: (N,) int64, negative where unlabeled
    """
    classes = logits.shape[1]
    rows = _ranked(classes)
    bins = ((log_odds(logits) / _LIMIT + 1) * (_BINS / 2)).nan_to_num().clamp(0, _BINS - 1).long()
    numbers = torch.arange(classes, device=truth.device)[-rows:]  # the last one of two
    is_class = (truth[:, None] == numbers).long()
    places = (numbers - numbers[0]) * 2 + is_class
    places = places * _BINS + bins
    counted = (truth >= 0).long()[:, None].expand_as(places)
    counts = torch.zeros(rows * 2 * _BINS, dtype=torch.int64, device=truth.device)
    return counts.index_add_(0, places.reshape(-1), counted.reshape(-1)).reshape(rows, 2, _BINS)


def exact_rankings(odds: Sequence[NDArray[Any]], truths: Sequence[NDArray[Any]], classes: int) -> list[NDArray[Any]]:
    """Counts (2, K) as in `ranking_tally` at the K distinct log-odds, for each ranked class.

    odds, truths: of each mesh, (N, C or 1), and (N,) int64
    """
    values, truth = np.concatenate(odds), np.concatenate(truths)
    values, truth = values[truth >= 0], truth[truth >= 0]
    counts = []
    for column in range(_ranked(classes)):
        distinct, places = np.unique(values[:, column], return_inverse=True)
        is_class = truth == (1 if classes == 2 else column)
        each = [np.bincount(places[part], minlength=len(distinct)) for part in (~is_class, is_class)]
        counts.append(np.stack(each))
    return counts


def ranking_curves(counts: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The shares of false positives, of true positives, and the precision, for each threshold from the highest on.

    counts: (2, K) from the lowest log-odds on. The shares begin with 0, and the precision with 1.
    """
    sums = np.cumsum(np.asarray(counts, np.float64)[:, ::-1], axis=1)
    false, true = np.insert(sums, 0, 0, axis=1)
    total = false + true
    precision = np.divide(true, total, out=np.ones_like(true), where=total > 0)
    return false / max(false[-1], 1), true / max(true[-1], 1), precision


def roc_auc(counts: Iterable[Any]) -> float:
    """The mean area under the ROC curves of the classes that are there and not everywhere. NaN if there are none.

    counts: (2, K) of each ranked class. Elements of equal log-odds count half.

    >>> roc_auc([[[1, 1, 0], [0, 1, 2]]])
    0.9166666666666666
    """

    def area(false: NDArray[Any], true: NDArray[Any], precision: NDArray[Any]) -> float:
        return float((np.diff(false) * (true[1:] + true[:-1])).sum() / 2)

    return _mean_of_curves(counts, area)


def average_precision(counts: Iterable[Any]) -> float:
    """The mean over classes of the mean precision at each step of the recall, see `roc_auc`.

    >>> average_precision([[[1, 1, 0], [0, 1, 2]]])
    0.9166666666666666
    """
    return _mean_of_curves(counts, lambda false, true, precision: float((np.diff(true) * precision[1:]).sum()))


def _mean_of_curves(counts: Iterable[Any], area: Callable[..., float]) -> float:
    arrays = [np.asarray(each) for each in counts]
    areas = [area(*ranking_curves(each)) for each in arrays if each.sum(1).all()]
    return sum(areas) / len(areas) if areas else math.nan


def _ranked(classes: int) -> int:
    return 1 if classes == 2 else classes
