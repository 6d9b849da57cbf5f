"""Targets of regression: their mean and standard deviation, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from diffnet.data.feature_names import ArrayStatistics
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.stored import remembered, with_change


def target_statistics(items: Sequence[LabeledMesh], names: Sequence[str], jobs: int | None = None) -> ArrayStatistics:
    """Mean and standard deviation of each column of the targets over the training meshes. NaN doesn't count.

    names: of the columns, for messages
    jobs: see `remembered`. Each mesh is read once, and only its sums are kept.

    The standard deviation of a constant column is given as 1. Raises DataError for targets of another shape than
    (N, C), for a column that is NaN everywhere, and for an infinite target.
    """
    sums = np.array(remembered(partial(_moments, names=list(names)), items, "target moments", list(names), jobs=jobs))
    counts, origins, means, squares = sums.astype(np.float64).transpose(1, 0, 2)  # (N, C) each
    for i, name in enumerate(names):
        if not counts[:, i].any():
            raise DataError(f"the column {name!r} is missing (NaN) in all training meshes")
    # Sums of numbers far from 0 lose their differences.
    origin = np.where(counts > 0, origins, np.inf).min(0)
    total = counts.sum(0)
    with np.errstate(invalid="ignore"):
        shifted = np.where(counts > 0, means + (origins - origin), 0)
    mean = (counts * shifted).sum(0) / total
    variance = (squares + counts * (shifted - mean) ** 2).sum(0) / total
    std = np.sqrt(np.maximum(variance, 0))
    return {"mean": (origin + mean).tolist(), "std": np.where(std > 1e-12 * np.abs(origin), std, 1.0).tolist()}


def _moments(item: LabeledMesh, names: Sequence[str]) -> list[list[float]]:
    """For each column: the count, the smallest target, the mean above it, and the sum of squares about the mean."""
    if np.ndim(item.labels) != 2 or np.shape(item.labels)[1] != len(names):
        raise DataError(f"{item.name}: targets should have shape (N, {len(names)}), got {np.shape(item.labels)}")
    rows = np.asarray(item.labels, np.float64)
    for i, name in enumerate(names):
        if np.isinf(rows[:, i]).any():
            raise DataError(f"{item.name}: the column {name!r} has an infinite target; targets should be finite or NaN")
    known = ~np.isnan(rows)
    counts = known.sum(0)
    origin = np.where(counts > 0, np.where(known, rows, np.inf).min(0, initial=np.inf), 0)
    above = np.where(known, rows - origin, 0)
    mean = above.sum(0) / np.maximum(counts, 1)
    squares = (np.where(known, above - mean, 0) ** 2).sum(0)
    return [counts.tolist(), origin.tolist(), mean.tolist(), squares.tolist()]


def standardized_targets(items: Sequence[LabeledMesh], statistics: ArrayStatistics) -> Sequence[LabeledMesh]:
    """The meshes with targets (N, C) float32 at mean 0 and standard deviation 1 over the training set."""
    return with_change(items, partial(_standardized, statistics=statistics), "standardized", statistics)


def _standardized(item: LabeledMesh, statistics: ArrayStatistics) -> LabeledMesh:
    mean, std = np.array(statistics["mean"]), np.array(statistics["std"])
    return replace(item, labels=((item.labels - mean) / std).astype(np.float32))


def original_targets(values: Tensor, statistics: ArrayStatistics) -> Tensor:
    """Standardized targets as the original numbers, (N, C) float64 on the CPU."""
    mean, std = (torch.tensor(statistics[name], dtype=torch.float64) for name in ("mean", "std"))  # type: ignore[literal-required]
    return values.detach().to("cpu", torch.float64) * std + mean


def with_columns(data: LabeledMeshes, names: Sequence[str]) -> LabeledMeshes:
    """The data set with the columns of another set or network, matched by name.

    Raises DataError for a column that the set lacks.
    """
    missing = [name for name in names if name not in data.label_names]
    if missing:
        raise DataError(
            f"the set has no column {missing[0]!r}; its columns are {', '.join(data.label_names)}. Columns of targets "
            "are matched by name"
        )
    order = [data.label_names.index(name) for name in names]
    change = partial(_in_order, order=order)
    return data.with_parts(lambda part: with_change(part, change, "columns", order), label_names=list(names))


def _in_order(item: LabeledMesh, order: Sequence[int]) -> LabeledMesh:
    return replace(item, labels=item.labels[:, order])
