"""Figures of merit of correspondences: the cumulative curve of their errors, and the area under it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# The thresholds of the literature on correspondence: errors / √area from 0 to 0.25.
THRESHOLDS = np.linspace(0.0, 0.25, 101)


def error_curve(errors: ArrayLike, thresholds: ArrayLike = THRESHOLDS) -> NDArray[np.float64]:
    """The share (T,) of errors that are at most each threshold (T,), as in Kim et al. 2011. NaNs don't count.

    Raises ValueError if there are no errors.

    >>> error_curve([0.0, 0.05, 0.3, 0.1], [0.0, 0.1, 0.2])
    array([0.25, 0.75, 0.75])
    """
    known = _known(errors)
    limits = np.asarray(thresholds, np.float64)
    return np.asarray(np.searchsorted(np.sort(known), limits, side="right") / len(known), np.float64)


def area_under_curve(errors: ArrayLike, thresholds: ArrayLike = THRESHOLDS) -> float:
    """The area under the error curve, divided by the range of thresholds. 1 if all errors are 0.

    The curve is sampled at the thresholds, which ascend, and joined by straight lines. Raises ValueError if there are
    no errors, or fewer than two thresholds.

    >>> area_under_curve([0.0, 1.0])
    0.5
    """
    limits = np.asarray(thresholds, np.float64)
    if limits.ndim != 1 or len(limits) < 2 or not (np.diff(limits) > 0).all():
        raise ValueError(f"thresholds should be at least 2 ascending numbers, got shape {limits.shape}")
    curve = error_curve(errors, limits)
    return float(((curve[1:] + curve[:-1]) / 2 * np.diff(limits)).sum() / (limits[-1] - limits[0]))


def mean_error(errors: ArrayLike) -> float:
    """The mean of the errors that are known. Raises ValueError if there are none.

    >>> mean_error([0.25, 0.75, float("nan")])
    0.5
    """
    return float(_known(errors).mean())


def _known(errors: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(errors, np.float64).reshape(-1)
    known = values[~np.isnan(values)]
    if len(known) == 0:
        raise ValueError(f"there should be at least one known error, got {len(values)} values, none of them known")
    return known
