"""Files of vertex indices, whose first vertex is 0 or 1: template vertices of a mesh, and point-to-point maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import DataError
from diffnet.data.numbers import read_labels

Ints: TypeAlias = NDArray[np.int64]
Base: TypeAlias = Literal["auto", "0", "1"]


class IndexFile(NamedTuple):
    """A file of vertex indices.

    path: the file
    vertices: the number of vertices of the mesh that the indices belong to
    name: of this mesh, for messages
    """

    path: Path
    vertices: int
    name: str


def read_indices(files: Sequence[IndexFile], base: Base = "auto") -> list[Ints]:
    """The indices (N,) in each file of a set, counted from 0.

    base: the number of the first vertex, "0" or "1". All files of a set have the same. "auto" finds it: an index 0
        means 0, and an index equal to the number of vertices means 1.

    Raises DataError for a file that is missing or holds anything but whole numbers; for an index out of range; for a
    negative index or NaN, which marks a missing point; for files that contradict each other; and if "auto" fits both.
    """
    values = [_read(file) for file in files]
    first = _first_number(files, values) if base == "auto" else int(base)
    for file, array in zip(files, values, strict=True):
        outside = np.flatnonzero((array < first) | (array >= file.vertices + first))
        if len(outside):
            raise DataError(
                f"{file.path}: entry {outside[0] + 1} is {array[outside[0]]}, but the vertices of {file.name} are "
                f"numbered from {first} to {file.vertices + first - 1}"
            )
    return [array - first for array in values]


def _read(file: IndexFile) -> Ints:
    values = read_labels(file.path)
    missing = np.flatnonzero(values < 0)
    if len(missing):
        raise DataError(
            f"{file.path}: entry {missing[0] + 1} is {values[missing[0]]}, which marks a missing point, as on a "
            "partial shape. Partial shapes are not supported: every point needs a vertex"
        )
    return values


def _first_number(files: Sequence[IndexFile], values: Sequence[Ints]) -> int:
    zero = next((file for file, array in zip(files, values, strict=True) if array.min() == 0), None)
    one = next((file for file, array in zip(files, values, strict=True) if array.max() == file.vertices), None)
    for file, array in zip(files, values, strict=True):
        if array.max() > file.vertices:
            raise DataError(
                f"{file.path}: entry {array.argmax() + 1} is {array.max()}, but {file.name} has {file.vertices} "
                "vertices"
            )
    if zero is not None and one is not None:
        raise DataError(
            f"{zero.path} has the index 0, but {one.path} has the index {one.vertices}, and {one.name} has "
            f"{one.vertices} vertices: all files should count from 0, or all from 1. If 0 marks missing points, the "
            "shape is partial, which is not supported"
        )
    if zero is None and one is None:
        raise DataError(
            f"{files[0].path}: the indices could count from 0 or from 1: no file of the set has the index 0, or the "
            "number of vertices of its mesh. Say which: base 0 or 1"
        )
    return 0 if one is None else 1
