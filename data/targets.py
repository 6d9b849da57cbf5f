"""Targets of regression: their mean and standard deviation, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diffnet.data.feature_names import ArrayStatistics
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes


def target_statistics(items: Sequence[LabeledMesh], names: Sequence[str]) -> ArrayStatistics:
    """Mean and standard deviation of each column of the targets over the training meshes. NaN doesn't count.

    names: of the columns, for messages

    The standard deviation of a constant column is given as 1. Raises DataError for targets of another shape than
    (N, C), for a column that is NaN everywhere, and for an infinite target.
    """
    for item in items:
        if np.ndim(item.labels) != 2 or np.shape(item.labels)[1] != len(names):
            raise DataError(f"{item.name}: targets should have shape (N, {len(names)}), got {np.shape(item.labels)}")
    rows = np.concatenate([np.asarray(item.labels, np.float64) for item in items])
    for i, name in enumerate(names):
        if np.isnan(rows[:, i]).all():
            raise DataError(f"the column {name!r} is missing (NaN) in all training meshes")
        if np.isinf(rows[:, i]).any():
            bad = next(item.name for item in items if np.isinf(np.asarray(item.labels)[:, i]).any())
            raise DataError(f"{bad}: the column {name!r} has an infinite target; targets should be finite or NaN")
    origin = np.nanmin(rows, axis=0)  # sums of numbers far from 0 lose their differences
    mean, std = np.nanmean(rows - origin, axis=0), np.nanstd(rows - origin, axis=0)
    return {"mean": (origin + mean).tolist(), "std": np.where(std > 1e-12 * np.abs(origin), std, 1.0).tolist()}


def standardized_targets(items: Sequence[LabeledMesh], statistics: ArrayStatistics) -> list[LabeledMesh]:
    """The meshes with targets (N, C) float32 at mean 0 and standard deviation 1 over the training set."""
    mean, std = np.array(statistics["mean"]), np.array(statistics["std"])
    return [replace(item, labels=((item.labels - mean) / std).astype(np.float32)) for item in items]


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
    parts = [[replace(item, labels=item.labels[:, order]) for item in part] for part in (data.train, data.test)]
    return LabeledMeshes(parts[0], parts[1], list(names), data.labels_at)
