"""Files with one or several columns of real numbers, a row for each element of a mesh."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.folders.numbers import lines_of, read_array
from diffnet.data.labeled import DataError
from diffnet.geometry.files import csv_rows
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.geometry.mesh.text import real

MAX_TARGET = 1e30  # sums of squares of smaller numbers don't overflow float64


class Columns(NamedTuple):
    """values: (N, C) float64, NaN where missing. names: of the columns, or None if the file has none."""

    values: NDArray[np.float64]
    names: list[str] | None = None


def read_columns(path: Path) -> Columns:
    """The columns of numbers in a file.

    `.npy`: an array (N,) or (N, C) of numbers
    `.csv`: cells separated by commas, a row for each line. A first line with other text names the columns. Empty cells
        are missing.
    others: numbers separated by blanks, tabs or commas, a row for each line

    Text files may be compressed by gzip, and `nan` is a missing number in all of them.

    Raises DataError, which names the file and the row, for anything else, and for numbers that are infinite.
    """
    suffix = mesh_suffix(path)
    if suffix == ".npy":
        return checked_columns(path, _read_npy(path))
    rows = _rows(path)
    first = next(rows, None)
    names = None
    if suffix == ".csv" and first is not None and not all(_is_number(cell) for cell in first[1]):
        names = first[1]
        check_names(path, names)
        first = next(rows, None)
    width = len(names) if names is not None else len(first[1]) if first is not None else 0
    values = array("d")
    for number, cells in chain([] if first is None else [first], rows):
        if len(cells) != width:
            columns = counted(len(cells), "column", "columns")
            raise DataError(f"{path}, line {number}: {columns}, but the lines before have {width}")
        values.extend([parse_number(f"{path}, line {number}", cell) for cell in cells])
    return checked_columns(path, np.array(values).reshape(-1, max(width, 1)), names)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of the lines that are not blank, with the numbers of the lines."""
    if mesh_suffix(path) != ".csv":
        for number, line in lines_of(path):
            if cells := line.replace(",", " ").split():
                yield number, cells
        return
    try:
        for number, cells in enumerate(csv_rows((line for _, line in lines_of(path)), strict=True), 1):
            if cells:
                yield number, [cell.strip() for cell in cells]
    except csv.Error as e:
        raise DataError(f"{path}: not a table of numbers ({e})") from e


def checked_columns(path: Path, array: NDArray[np.float64], names: list[str] | None = None) -> Columns:
    """Columns (N,) or (N, C) of a file. Raises DataError for an empty array, another shape and infinite numbers."""
    if array.ndim not in (1, 2):
        raise DataError(f"{path}: expected rows of numbers, shape (N,) or (N, C), got shape {array.shape}")
    if not array.size:
        raise DataError(f"{path}: there are no numbers in the file")
    values = array.reshape(len(array), -1).astype(np.float64)
    bad = np.argwhere(np.abs(values) >= MAX_TARGET)  # NaN is missing
    if len(bad):
        row, column = bad[0]
        raise DataError(f"{path}: row {row} has {values[row, column]}; targets should be below {MAX_TARGET:g}, or nan")
    return Columns(values, names)


def check_names(path: Path, names: list[str]) -> None:
    """Raises DataError for columns without a name, and for two of one name."""
    for i, name in enumerate(names):
        if not name:
            raise DataError(f"{path}: column {i + 1} has no name in the first line, {','.join(names)[:80]!r}")
        if name in names[:i]:
            raise DataError(f"{path}: two columns are called {name[:40]!r}")


def parse_number(place: str, cell: str) -> float:
    """A number in text. Nothing is NaN, which means missing. Raises DataError, which begins with the place."""
    if not _is_number(cell):
        raise DataError(f"{place}: {cell[:40]!r} is not a number")
    value = real(cell or "nan")
    if abs(value) >= MAX_TARGET:
        raise DataError(f"{place}: {cell[:40]!r} is too large; targets should be below {MAX_TARGET:g}, or nan")
    return value


def _is_number(cell: str) -> bool:
    try:
        real(cell or "nan")
    except ValueError:
        return False
    return True


def _read_npy(path: Path) -> NDArray[np.float64]:
    array = read_array(path)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: targets should be numbers, dtype is {array.dtype}")
    return array.astype(np.float64)
