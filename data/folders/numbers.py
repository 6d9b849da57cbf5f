"""Label files that hold one number for each element."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import DataError
from diffnet.geometry import Mesh
from diffnet.geometry.files import csv_rows
from diffnet.geometry.mesh.content import decompress
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.geometry.mesh.text import Line, integer, numbered_lines, table, whole

_INT64 = np.iinfo(np.int64)
_INTEGERS = re.compile(rb"[0-9 \t\r\n-]*")  # most label files, for which `table` takes longer


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
    if not path.is_file():
        raise DataError(f"{path}: no such label file")
    values = _read_npy(path) if mesh_suffix(path) == ".npy" else _read_text(path)
    if not len(values):
        raise DataError(f"{path}: there are no labels in the file")
    return values


def check_vertex_numbers(mesh: Mesh, file: Path, remedy: str = "Use values at faces, or meshes in") -> None:
    """Raises DataError if a file goes by the numbers of the vertices of an STL file, which has none.

    remedy: the beginning of the last sentence of the message, which ends with other formats
    """
    if mesh.path is not None and mesh_suffix(mesh.path) == ".stl":
        raise DataError(
            f"{file}: the file goes by the order of the vertices of {mesh.path}, but an STL file has no order of "
            f"vertices: it holds the corners of each face. {remedy} PLY, OBJ or OFF whose vertices have this order"
        )


def read_lines(path: Path) -> list[str]:
    """The stripped lines of a UTF-8 text file, without blank ones. Raises DataError if no line is left."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{path}: the file is empty")
    return lines


def _read_text(path: Path) -> NDArray[np.int64]:
    is_table = mesh_suffix(path) == ".csv"
    if not is_table and _INTEGERS.fullmatch(content := content_of(path)):
        try:
            return np.array([int(token) for token in content.split()], np.int64)
        except (ValueError, OverflowError):
            pass  # the loop below finds the line of the error
    values = table(line for _, line in _label_lines(path, is_table))
    if values is not None and whole(values):
        return values.astype(np.int64).reshape(-1)
    # The slower loop reads lines of different lengths and large numbers, and finds the line of an error.
    labels = array("q")
    for number, line in _label_lines(path, is_table):
        for token in line.split():
            try:
                labels.append(integer(token))
            except (ValueError, OverflowError) as e:
                raise DataError(f"{path}, line {number}: {token[:40]!r} is not a whole number") from e
    return np.array(labels)


def _label_lines(path: Path, is_table: bool) -> Iterator[Line]:
    """The lines of a text file. Those of a table have its first column alone, without the name of the column."""
    return _label_column(path) if is_table else lines_of(path)


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
    return (0, 0) if len(names) == 1 and re.fullmatch(r"[-+]?[0-9]+(\.0*)?", names[0]) else None


def _label_column(path: Path) -> Iterator[Line]:
    """The labels in a table with the numbers of their lines."""
    try:
        rows = list(csv_rows(io.StringIO(text_of(path))))
    except csv.Error as e:
        raise DataError(f"{path}: not a table of text ({e})") from e
    column, first = _place_of_labels(rows[0] if rows else []) or (0, 1)
    return ((i, row[column].strip() if column < len(row) else "") for i, row in enumerate(rows[first:], first + 1))


def _read_npy(path: Path) -> NDArray[np.int64]:
    array = read_array(path)
    if array.ndim != 1 and array.shape[1:] != (1,):
        raise DataError(f"{path}: labels should have shape (N,) or (N, 1), shape is {array.shape}")
    array = array.reshape(-1)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: labels should be integers, dtype is {array.dtype}")
    if array.dtype.kind == "f":
        array = array.astype(np.float64)  # float64 holds both bounds below exactly; NaN fails the comparisons
        fits = (array >= -(2.0**63)) & (array < 2.0**63)
    else:
        fits = array <= _INT64.max
    bad = np.flatnonzero(~(fits & (array == np.trunc(array))))
    if len(bad):
        raise DataError(f"{path}: label {bad[0]} is {array[bad[0]]}, which is not a whole number that fits int64")
    labels: NDArray[np.int64] = array.astype(np.int64)
    return labels


def read_array(path: Path, purpose: str = "") -> NDArray[Any]:
    """The array in a `.npy` file, which may be compressed. Raises DataError if the file holds anything else.

    purpose: words for the message, such as " for file:NAME"
    """
    content = content_of(path)
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as e:  # for damaged files, NumPy raises errors of its own, of zipfile and of Python's tokenizer
        raise DataError(f"{path}: the file is not a NumPy array of numbers{purpose} ({e})") from e
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: the file is an archive, expected a single array{purpose}")
    return array


def text_of(path: Path) -> str:
    """The content of a UTF-8 text file, which may be compressed. Raises DataError if it is missing or not text."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return content_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: the file is not text ({e})") from e


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a UTF-8 text file, which may be compressed, one at a time with their numbers from 1.

    Raises DataError if it is missing or not text.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    data = content_of(path)
    try:
        yield from numbered_lines(data, errors="strict")
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: the file is not text ({e})") from e
    except ValueError as e:
        raise DataError(f"{path}: {e}") from e


def content_of(path: Path) -> bytes:
    """The bytes of a file, which may be compressed by gzip. Raises DataError if the compression is damaged."""
    data = path.read_bytes()
    if path.suffix.lower() != ".gz":
        return data
    try:
        return decompress(data)
    except ValueError as e:
        raise DataError(f"{path}: {e}") from e
