"""Confusion matrices over labeled elements, sums over targets, and the scores computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The scores in metrics.csv that are shares from 0 to 1, and how people call all scores.
SHARES = ("accuracy", "balanced_accuracy", "mean_iou", "dice", "overlap_iou")
SCORE_NAMES = {
    "balanced_accuracy": "balanced accuracy",
    "mean_iou": "mean IoU",
    "dice": "mean Dice",
    "overlap_iou": "IoU of the overlap",
    "roc_auc": "ROC-AUC",
    "average_precision": "average precision",
    "r2": "R²",
}


def confusion_matrix(prediction: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Counts (C, C) int64 of labeled elements, by true class (rows) and predicted class (columns).

    prediction, truth: (N,) int64. Elements whose truth is negative are unlabeled and are not counted.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, -1]), classes=2)
    tensor([[1, 1],
            [0, 0]])
    """
    # Unlabeled elements go to an extra row that is cut off. Selecting the labeled ones would wait for the GPU, and so
    # would `bincount`.
    bins = torch.add(prediction, (truth + 1).clamp(min=0), alpha=classes)
    counts = torch.zeros((classes + 1) * classes, dtype=torch.int64, device=truth.device)
    return counts.index_add_(0, bins, torch.ones_like(bins)).reshape(classes + 1, classes)[1:]


def accuracy(matrix: Tensor) -> float:
    """The share of labeled elements that are predicted correctly. NaN if there are none.

    >>> accuracy(torch.tensor([[3, 1], [0, 4]]))
    0.875
    """
    return float(matrix.diagonal().sum().double() / matrix.sum())


class ClassScores(NamedTuple):
    """The scores of each class, (C,) each.

    elements: number of elements whose true class this is, int64
    accuracy: share of these that are predicted correctly, float64, NaN if there are none
    iou: intersection over union of truth and prediction, float64, NaN for a class that occurs in neither
    dice: twice the intersection over the sum of both, float64, NaN where `iou` is
    """

    elements: NDArray[np.int64]
    accuracy: NDArray[np.float64]
    iou: NDArray[np.float64]
    dice: NDArray[np.float64]


def class_scores(matrix: Any) -> ClassScores:
    """The scores of each class from a confusion matrix (C, C) of counts. Rows are the truth, columns the prediction.

    >>> class_scores([[3, 1], [0, 4]]).iou.tolist()
    [0.75, 0.8]
    """
    counts = np.asarray(matrix, np.int64)
    right, truth, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    union = truth + predicted - right
    with np.errstate(invalid="ignore"):
        return ClassScores(truth, right / truth, right / union, 2 * right / (truth + predicted))


def class_mean(score: str, matrix: Any) -> float:
    """The mean of a score of `ClassScores` over the classes for which it is defined. NaN if there are none.

    The mean of the accuracies is the balanced accuracy, in which a class with few elements counts as much as one with
    many. Those of "iou" and "dice" are over the classes that occur in the truth or are predicted.

    >>> class_mean("accuracy", [[3, 1], [0, 4]]), class_mean("iou", [[3, 1], [0, 4]])
    (0.875, 0.775)
    """
    return mean_score(getattr(class_scores(matrix), score))


def mean_score(values: NDArray[np.float64]) -> float:
    """The mean of the values that are not NaN. NaN if there are none."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if len(numbers) else math.nan


def number_or_none(score: float) -> float | None:
    """The score, or None for NaN, which JSON doesn't have."""
    return None if math.isnan(score) else score


def soft_accuracy(prediction: Any, accepted: Any, areas: Any) -> float:
    """The published score of MeshCNN for one mesh: the share of its area where the predicted class is accepted.

    prediction: (N,) integers. accepted: (N, C) bool, the classes whose soft label is above 0. areas: (N,), the area
    that belongs to each element, see `element_areas`. MeshCNN gives an edge a third of the area of its faces. The
    score of a test set is the mean over its meshes. NaN if the area is 0.

    Source: `seg_accuracy` in util/util.py, `read_sseg` in data/segmentation_data.py and `build_gemm` in
    models/layers/mesh_prepare.py of MeshCNN (Hanocka et al. 2019, MIT), github.com/ranahanocka/MeshCNN.

    >>> soft_accuracy([0, 1], [[True, True], [True, False]], [3.0, 1.0])
    0.75
    """
    right = np.take_along_axis(np.asarray(accepted, bool), np.asarray(prediction)[:, None], axis=1)[:, 0]
    weights = np.asarray(areas, np.float64)
    total = weights.sum()
    return float(weights[right].sum() / total) if total > 0 else math.nan


def column_scores(tally: Any) -> list[dict[str, Any]]:
    """The scores of each column of targets: count, mae, rmse and r2, which are NaN where they are not defined.

    tally: (C, 5), for each column the number of targets, their sum and their sum of squares, and the sums of absolute
        and of squared errors

    R² is 1 minus the squared errors over the squared differences from the mean of the targets. It is not defined for a
    constant column.

    >>> column_scores([[2, 4.0, 10.0, 1.0, 1.0]])  # the targets 1 and 3, of which one is missed by 1
    [{'count': 2, 'mae': 0.5, 'rmse': 0.7071067811865476, 'r2': 0.5}]
    """
    rows = []
    for count, total, squares, absolute, errors in np.asarray(tally, np.float64).tolist():
        n = count or math.nan
        spread = squares - total * total / n
        r2 = 1 - errors / spread if spread > 1e-12 * squares else math.nan
        rows.append({"count": int(count), "mae": absolute / n, "rmse": math.sqrt(errors / n), "r2": r2})
    return rows


def score_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The keys and the names of the scores in the rows of results.json, of which only fields have relative errors."""
    scores = {"mae": "MAE", "rmse": "RMSE", "r2": "R²", "relative_l2": "relative L2", "angle": "angle in degrees"}
    return {key: name for key, name in scores.items() if any(key in row for row in rows)}


def relative_l2(predictions: Any, targets: Any, areas: Any) -> NDArray[np.float64]:
    """The error of each column of a field relative to the field, √(Σ a e² / Σ a t²): (C,), NaN where the field is 0.

    predictions, targets: (N, C); a target that is NaN doesn't count. areas: (N,)

    >>> relative_l2([[2.0], [0.0]], [[1.0], [0.0]], [3.0, 1.0]).tolist()
    [1.0]
    """
    truth = np.asarray(targets, np.float64)
    weights = np.where(np.isnan(truth), 0, np.asarray(areas, np.float64)[:, None])
    errors, values = (np.nan_to_num(x) ** 2 for x in (np.asarray(predictions) - truth, truth))
    squares, size = (weights * errors).sum(0), (weights * values).sum(0)
    return np.where(size > 0, np.sqrt(squares / np.where(size > 0, size, 1)), np.nan)


def vector_scores(predictions: Any, targets: Any, areas: Any) -> tuple[float, float]:
    """The relative L2 error of a vector field, √(Σ a |e|² / Σ a |t|²), and its mean angle to the targets in degrees.

    predictions, targets: (N, 3); a target with a NaN doesn't count. areas: (N,)

    The angle is weighted by the areas, too. Where a vector is 0, it is not defined. Both are NaN without targets.

    >>> vector_scores([[0.0, 2.0, 0.0]], [[1.0, 0.0, 0.0]], [3.0])
    (2.23606797749979, 90.0)
    """
    values, truth = (np.asarray(x, np.float64) for x in (predictions, targets))
    mask = ~np.isnan(truth).any(1)
    values, truth, weights = values[mask], truth[mask], np.asarray(areas, np.float64)[mask]
    size = float(weights @ (truth**2).sum(1))
    relative = math.sqrt(float(weights @ ((values - truth) ** 2).sum(1)) / size) if size > 0 else math.nan
    across, along = np.linalg.norm(np.cross(values, truth), axis=1), (values * truth).sum(1)
    weights = np.where((across > 0) | (along != 0), weights, 0)
    angles = np.degrees(np.arctan2(across, along))
    return relative, float(weights @ angles / weights.sum()) if weights.sum() > 0 else math.nan


def mean_r2(tally: Any) -> float:
    """The mean R² of the columns in which it is defined, see `column_scores`. NaN if there are none."""
    defined = [row["r2"] for row in column_scores(tally) if not math.isnan(row["r2"])]
    return sum(defined) / len(defined) if defined else math.nan


def scores_a_test(results: Mapping[str, Any]) -> bool:
    """Whether no scored mesh is a training mesh, from results.json. False if `diffnet evaluate` doesn't know it.

    >>> scores_a_test({"scored_training_meshes": 2}), scores_a_test({})  # {} as in the results of a training run
    (False, True)
    """
    seen: int | None = results.get("scored_training_meshes", 0)
    return seen == 0


def score_text(score: str, value: float) -> str:
    """A score of metrics.csv: a share as a percentage, others as numbers.

    >>> score_text("accuracy", 0.875), score_text("r2", 0.875)
    ('87.5 %', '0.8750')
    """
    return percent(value) if score in SHARES else f"{value:.4f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share from 0 to 1 as a percentage. A dash for None and NaN.

    >>> percent(0.875), percent(None)
    ('87.5 %', '–')
    """
    return "–" if share is None or math.isnan(share) else f"{100 * share:.{digits}f} %"


def number(value: float | None) -> str:
    """A number with four digits. A dash for None and NaN."""
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"


T = TypeVar("T")


def spread_over(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, at equal distances from the first to the last.

    Neighbors in a list of meshes are often alike, so a report shows meshes from all of it.

    >>> spread_over("abcdefg", 3)
    ['a', 'd', 'g']
    """
    count = min(limit, len(items))
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]
