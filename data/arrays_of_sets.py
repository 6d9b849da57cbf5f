"""The user's own features in all meshes of a set: their means, whether they fit, and what their files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diffnet.data.arrays import array_files, own_arrays
from diffnet.data.feature_names import ArrayStatistics, Statistics, array_names, feature_parts
from diffnet.data.folders.index import contents_of
from diffnet.data.labeled import DataError, LabeledMesh
from diffnet.data.stored import remembered


def array_statistics(
    items: Sequence[LabeledMesh], features: str, jobs: int | None = None
) -> dict[str, ArrayStatistics]:
    """Mean and standard deviation of each channel of the own arrays, over all vertices of the training meshes.

    jobs: see `remembered`. Each mesh is read once, and only its sums are kept.

    The standard deviation of a constant channel is given as 1. A vector is not shifted, and its standard deviation is
    the root of the mean square of all three channels. Without own arrays in the features, the result is empty
    and no file is read.

    Raises DataError for two meshes with different numbers of channels, and the errors of `own_arrays`.
    """
    names = array_names(features)
    if not names or not len(items):
        return {}
    first = items[0]
    vectors = {part.array for part in feature_parts(features) if part.is_vector}
    # Moments about the first row of the set don't cancel where the mean is large.
    shifts = {
        name: [0.0] * 3 if name in vectors else array[0].tolist()
        for name, array in own_arrays(first.mesh, features, given=first.arrays).items()
    }
    work = partial(_sums, features=features, shifts=shifts, first=first.mesh.name)
    each = remembered(work, items, "array sums", features, shifts, array_states(items, features), jobs=jobs)
    statistics: dict[str, ArrayStatistics] = {}
    for i, name in enumerate(names):
        shift = np.array(shifts[name])
        total, squares, count = np.zeros(len(shift)), np.zeros(len(shift)), 0
        for own in each:
            total, squares, count = total + own[i][0], squares + own[i][1], count + own[i][2]
        if name in vectors:
            total, squares = np.zeros(3), np.full(3, squares.mean())
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        std = np.where(std > 1e-9 * (np.abs(shift + mean) + np.abs(mean)), std, 1.0)
        statistics[name] = {"mean": (shift + mean).tolist(), "std": std.tolist()}
    return statistics


def _sums(item: LabeledMesh, features: str, shifts: Mapping[str, list[float]], first: str) -> list[Any]:
    """For each own array: the sums and the sums of squares of its channels above the shift, and the number of rows."""
    found = []
    for name, array in own_arrays(item.mesh, features, given=item.arrays).items():
        shift = np.array(shifts[name])
        if len(shift) != array.shape[1]:
            raise DataError(
                f"{item.mesh.name}: the own array {name} has {array.shape[1]} channels, but that of {first} "
                f"has {len(shift)}; all meshes of a set need the same number"
            )
        moved = array - shift
        found.append([moved.sum(0).tolist(), (moved**2).sum(0).tolist(), len(array)])
    return found


def check_arrays_of_all(
    items: Sequence[LabeledMesh], features: str, statistics: Statistics | None, jobs: int | None = None
) -> None:
    """Raises DataError for an own array that is missing or has another number of channels, before anything is computed.

    jobs: see `remembered`
    """
    if array_names(features):
        work = partial(_check_item, features=features, statistics=statistics)
        about = ("arrays", features, dict(statistics or {}), array_states(items, features))
        remembered(work, items, *about, jobs=jobs)


def _check_item(item: LabeledMesh, features: str, statistics: Statistics | None) -> None:
    own_arrays(item.mesh, features, statistics, item.arrays)


def array_states(items: Sequence[LabeledMesh], features: str, jobs: int | None = 1) -> list[Any]:
    """The contents of files with own arrays beside meshes that are read when needed, whose key doesn't know them.

    For each file, the number of the mesh, the path and a hash. jobs: number of worker processes that read files
    """
    names, file = array_names(features), getattr(items, "file", lambda i: None)
    places = [
        (i, path)
        for i in range(len(items) if names else 0)
        if (source := file(i)) is not None
        for name in names
        for path in array_files(Path(source), name)
        if path.is_file()  # most of these places are empty
    ]
    if not places:
        return []
    contents = contents_of([path for _, path in places], getattr(items, "cache_dir", None), jobs)
    return [[i, str(path), content] for (i, path), content in zip(places, contents, strict=True)]
