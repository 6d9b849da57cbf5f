"""Files of numbers: one label, or one or several real numbers, for each element of a mesh."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import DataError, counted
from diffnet.geometry import Mesh
from diffnet.geometry.errors import IN_BRACKETS, raised_as
from diffnet.geometry.files import csv_rows
from diffnet.geometry.mesh.content import decompress
from diffnet.geometry.mesh.cortex import CortexValues, is_cortical, read_values
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.geometry.mesh.text import Line, integer, numbered_lines, real, whole_table

_INT64 = np.iinfo(np.int64)
MAX_NUMBER = 1e30  # sums of squares of smaller numbers overflow neither float64 nor, once standardized, float32


def read_labels(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """The labels of one file, unchanged: (N,) int64, N ≥ 1.

    A `.npy` file holds an array (N,) or (N, 1) of integers, whole floats or booleans. In a `.csv` file, the labels are
    the column called label, or the only one, which needs no name. Any other file is text: integers separated by line
    breaks or blanks. They may be written as floats (`1.000e+00`). Blank lines are ignored. All may be compressed by
    gzip (`.txt.gz`).

    Raises DataError for a missing or empty file, and for a value that is not a whole number or does not fit int64. The
    message names the file and the line or the value.
    """
    path = Path(path)
    values = _npy_labels(path) if mesh_suffix(path) == ".npy" else _text_labels(path)
    if not len(values):
        raise DataError(f"{path}: there are no labels in the file")
    return values


def check_vertex_numbers(mesh: Mesh | Path, file: Path, remedy: str = "Use values at faces, or meshes in") -> None:
    """Raises DataError if a file goes by the numbers of the vertices of an STL file, which has none.

    remedy: the beginning of the last sentence of the message, which ends with other formats
    """
    path = mesh.path if isinstance(mesh, Mesh) else mesh
    if path is not None and mesh_suffix(path) == ".stl":
        raise DataError(
            f"{file}: the file goes by the order of the vertices of {path}, but an STL file has no order of "
            f"vertices: it holds the corners of each face. {remedy} PLY, OBJ or OFF whose vertices have this order"
        )


def read_lines(path: Path) -> list[str]:
    """The stripped lines of a UTF-8 text file, without blank ones. Raises DataError if no line is left."""
    lines = [stripped for line in text_of(path).splitlines() if (stripped := line.strip())]
    if not lines:
        raise DataError(f"{path}: the file is empty")
    return lines


def _text_labels(path: Path) -> NDArray[np.int64]:
    is_table = mesh_suffix(path) == ".csv"
    values = whole_table([line for _, line in _label_column(path)] if is_table else text_of(path).splitlines())
    if values is not None:
        return values.reshape(-1)
    # The slower loop reads lines of different lengths and large numbers, and finds the line of an error.
    labels = array("q")
    for number, line in _label_column(path) if is_table else lines_of(path):
        for token in line.split():
            try:
                labels.append(integer(token))
            except (ValueError, OverflowError) as e:
                by_name = mesh_suffix(path) == ".txt" and token[0].isalpha()
                hint = ". Write numbers here, and the names of the classes into label_names.txt" if by_name else ""
                raise DataError(f"{path}, line {number}: {token[:40]!r} is not a whole number{hint}") from e
    return np.array(labels)


def is_label_table(path: Path) -> bool:
    """Whether a column of a `.csv` file is called label, as in a table of `diffnet predict`, or it has numbers alone.

    Only the first line is read: sets have many files, and each start asks for all of them.
    """
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            line = file.readline(1000).decode("utf-8-sig", errors="replace")
        return any(_place_of_labels(cells) is not None for cells in csv.reader([line]))
    except (OSError, EOFError, zlib.error, csv.Error):  # other content
        return False


def _place_of_labels(cells: Sequence[str]) -> tuple[int, int] | None:
    """By the first line of a table: the number of its column of labels, and that of lines before them. None without."""
    names = [cell.strip().lower() for cell in cells]
    if "label" in names and "file" not in names:  # that is a table of meshes
        return names.index("label"), 1
    with suppress(ValueError, OverflowError):
        if len(names) == 1 and integer(names[0]) is not None:
            return 0, 0
    return None


def _label_column(path: Path) -> Iterator[Line]:
    """The labels in a table with the numbers of their lines. Raises DataError for an empty cell."""
    rows = list(table_lines(path, strict=False))
    column, first = _place_of_labels(rows[0][1] if rows else []) or (0, 1)
    for number, cells in rows[first:]:
        if column >= len(cells) or not cells[column]:
            raise DataError(f"{path}, line {number}: there is no label; -1 stands for none")
        yield number, cells[column]


def table_lines(path: Path, *, strict: bool = True) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV or TSV file: their numbers from 1, and their stripped cells. Empty lines are left out.

    Cells of a `.tsv` file end at tabs.

    strict: whether wrong quotes are an error

    Raises DataError for a file that is missing or is not a table of text.
    """
    delimiter = "\t" if mesh_suffix(path) == ".tsv" else ","
    with raised_as(DataError, f"{path}: not a table of text", csv.Error, form=IN_BRACKETS):
        for number, cells in enumerate(csv_rows(io.StringIO(text_of(path)), strict=strict, delimiter=delimiter), 1):
            if cells:
                yield number, [cell.strip() for cell in cells]


def _npy_labels(path: Path) -> NDArray[np.int64]:
    array = read_array(path)
    if array.ndim != 1 and array.shape[1:] != (1,):
        raise DataError(f"{path}: labels should have shape (N,) or (N, 1), shape is {array.shape}")
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: labels should be integers, dtype is {array.dtype}")
    return as_int64(path, "labels", array.reshape(-1))


def as_int64(path: Path, what: str, values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers (N,) as int64. Raises DataError for one that is not whole or does not fit. what: for the message"""
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # float64 holds both bounds below exactly; NaN fails the comparisons
        fits = (values >= -(2.0**63)) & (values < 2.0**63)
    else:
        fits = values <= _INT64.max
    bad = np.flatnonzero(~(fits & (values == np.trunc(values))))
    if len(bad):
        raise DataError(f"{path}: {what} should be whole numbers, row {bad[0]} is {values[bad[0]]}")
    return values.astype(np.int64)


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
    if suffix == ".npy" or is_cortical(path):
        numbers = read_array(path)
        if numbers.dtype.kind not in "biuf":
            raise DataError(f"{path}: targets should be numbers, dtype is {numbers.dtype}")
        return checked_columns(path, numbers)
    is_table = suffix == ".csv"
    rows = table_lines(path) if is_table else _cells(path)
    first, names = next(rows, None), None
    if is_table and first is not None and not all(is_number(cell) for cell in first[1]):
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


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The words of the lines that are not blank, with the numbers of the lines."""
    return ((number, cells) for number, line in lines_of(path) if (cells := line.replace(",", " ").split()))


def checked_columns(path: Path, rows: NDArray[Any], names: list[str] | None = None) -> Columns:
    """Columns (N,) or (N, C) of a file. Raises DataError for an empty array, another shape and infinite numbers."""
    if rows.ndim not in (1, 2):
        raise DataError(f"{path}: expected rows of numbers, shape (N,) or (N, C), got shape {rows.shape}")
    if not rows.size:
        raise DataError(f"{path}: there are no numbers in the file")
    values = rows.reshape(len(rows), -1).astype(np.float64)
    bad = np.argwhere(np.abs(values) >= MAX_NUMBER)  # NaN is missing
    if len(bad):
        row, column = bad[0]
        raise DataError(f"{path}: row {row} has {values[row, column]}; targets should be below {MAX_NUMBER:g}, or nan")
    return Columns(values, names)


def check_names(path: Path, names: list[str], what: str = "columns") -> None:
    """Raises DataError for columns without a name, and for two of one name.

    Networks, options and scores tell columns and classes by their names.

    what: "columns", or "classes", of which each has a name
    """
    for i, name in enumerate(names):
        if not name:
            raise DataError(f"{path}: column {i + 1} has no name in the first line, {','.join(names)[:80]!r}")
        if name in names[:i]:
            raise DataError(f"{path}: two {what} are called {name[:40]!r}")


def parse_number(place: str, cell: str) -> float:
    """A number in text. Nothing is NaN, which means missing. Raises DataError, which begins with the place."""
    if not is_number(cell):
        raise DataError(f"{place}: {cell[:40]!r} is not a number")
    value = real(cell or "nan")
    if abs(value) >= MAX_NUMBER:
        raise DataError(f"{place}: {cell[:40]!r} is too large; targets should be below {MAX_NUMBER:g}, or nan")
    return value


def is_number(cell: str) -> bool:
    """Whether text is a number, or nothing."""
    try:
        real(cell or "nan")
    except ValueError:
        return False
    return True


def read_array(path: Path, purpose: str = "") -> NDArray[Any]:
    """The array in a `.npy` file, which may be compressed, or in a file of `is_cortical`.

    Raises DataError if the file holds anything else.

    purpose: words for the message, such as " for file:NAME"
    """
    if is_cortical(path):
        return cortex_values(path).values
    content, place = content_of(path), f"{path}: the file is not a NumPy array of numbers{purpose}"
    # For damaged files, NumPy raises errors of its own, of zipfile and of Python's tokenizer.
    with raised_as(DataError, place, Exception, form=IN_BRACKETS):
        array = np.load(io.BytesIO(content), allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: the file is an archive, expected a single array{purpose}")
    return array


def cortex_values(path: Path) -> CortexValues:
    """The values at the vertices of a cortex, see `is_cortical`. Raises DataError."""
    with raised_as(DataError, path, ValueError):
        return read_values(path)


def text_of(path: Path) -> str:
    """The content of a UTF-8 text file, which may be compressed. Raises DataError if it is missing or not text."""
    with raised_as(DataError, f"{path}: the file is not text", UnicodeDecodeError, form=IN_BRACKETS):
        return content_of(path).decode("utf-8-sig")


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of `text_of` a file, one at a time with their numbers from 1."""
    content = content_of(path)
    not_text = raised_as(ValueError, "the file is not text", UnicodeDecodeError, form=IN_BRACKETS)
    with raised_as(DataError, path, ValueError), not_text:
        yield from numbered_lines(content, errors="strict")


def content_of(path: Path) -> bytes:
    """The bytes of a file, which may be compressed by gzip. Raises DataError if it is missing or damaged."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    data = path.read_bytes()
    if path.suffix.lower() != ".gz":
        return data
    with raised_as(DataError, path, ValueError):
        return decompress(data)
