"""Files with one or several columns of real numbers, a row for each element of a mesh."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.folders.numbers import read_array, text_of
from diffnet.data.labeled import DataError
from diffnet.geometry.mesh.mesh import mesh_suffix

LARGEST = 1e30  # sums of squares of smaller numbers don't overflow float64


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
    if suffix == ".csv":
        try:
            lines = list(csv.reader(io.StringIO(text_of(path)), strict=True))
        except csv.Error as e:
            raise DataError(f"{path}: not a table of numbers ({e})") from e
    else:
        lines = [line.replace(",", " ").split() for line in text_of(path).splitlines()]
    numbered = [(i, [cell.strip() for cell in line]) for i, line in enumerate(lines, 1) if line]
    names = None
    if suffix == ".csv" and numbered and not all(_is_number(cell) for cell in numbered[0][1]):
        names = numbered.pop(0)[1]
        check_names(path, names)
    width = len(names) if names is not None else len(numbered[0][1]) if numbered else 0
    rows = []
    for number, cells in numbered:
        if len(cells) != width:
            columns = counted(len(cells), "column", "columns")
            raise DataError(f"{path}, line {number}: {columns}, but the lines before have {width}")
        rows.append([parse_number(f"{path}, line {number}", cell) for cell in cells])
    return checked_columns(path, np.array(rows, np.float64).reshape(len(rows), width), names)


def checked_columns(path: Path, array: NDArray[np.float64], names: list[str] | None = None) -> Columns:
    """Columns (N,) or (N, C) of a file. Raises DataError for an empty array, another shape and infinite numbers."""
    if array.ndim not in (1, 2):
        raise DataError(f"{path}: expected rows of numbers, shape (N,) or (N, C), got shape {array.shape}")
    if not array.size:
        raise DataError(f"{path}: there are no numbers in the file")
    values = array.reshape(len(array), -1).astype(np.float64)
    bad = np.argwhere(np.abs(values) >= LARGEST)  # NaN is missing
    if len(bad):
        row, column = bad[0]
        raise DataError(f"{path}: row {row} has {values[row, column]}; targets should be below {LARGEST:g}, or nan")
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
    value = float(cell or "nan")
    if abs(value) >= LARGEST:
        raise DataError(f"{place}: {cell[:40]!r} is too large; targets should be below {LARGEST:g}, or nan")
    return value


def _is_number(cell: str) -> bool:
    try:
        float(cell or "nan")
    except ValueError:
        return False
    return "_" not in cell  # Python groups digits by it


def _read_npy(path: Path) -> NDArray[np.float64]:
    array = read_array(path)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: targets should be numbers, dtype is {array.dtype}")
    return array.astype(np.float64)
