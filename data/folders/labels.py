"""Label files, and the elements of a mesh that their labels belong to."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import UNLABELED, DataError, LabelsAt
from diffnet.geometry import Mesh, mesh_edges
from diffnet.geometry.mesh.content import decompress
from diffnet.geometry.mesh.mesh import mesh_suffix

_INT64 = np.iinfo(np.int64)


def read_labels(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """The labels of one file, unchanged: (N,) int64, N ≥ 1.

    A `.npy` file holds a one-dimensional array of integers or whole floats. Any other file is text: integers separated
    by line breaks or blanks. They may be written as floats (`1.000e+00`). Blank lines are ignored.
    Both may be compressed by gzip (`.txt.gz`).

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


def read_lines(path: Path) -> list[str]:
    """The stripped lines of a UTF-8 text file, without blank ones. Raises DataError if no line is left."""
    lines = [line.strip() for line in _text_of(path).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{path}: the file is empty")
    return lines


def number_classes(values: Sequence[NDArray[np.int64]], names_file: Path) -> tuple[list[NDArray[np.int64]], list[str]]:
    """Class indices (int64, shapes unchanged) and label names for the label values of a whole set.

    The sorted distinct values ≥ 0 of all arrays become classes 0 … C-1. Negative values become UNLABELED. The names are
    the lines of `names_file` if it exists, else the values in decimal.

    Raises DataError if no value is ≥ 0, and if the names file does not have one line per class.
    """
    distinct = np.unique(np.concatenate([np.unique(v) for v in values]))
    distinct = distinct[distinct >= 0]
    if not len(distinct):
        raise DataError(f"{names_file.parent}: every label is negative, which means unlabeled")
    names = [str(value) for value in distinct]
    if names_file.is_file():
        given = read_lines(names_file)
        if len(given) != len(names):
            found = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise DataError(f"{names_file}: {len(given)} names for {len(names)} distinct labels ({found})")
        names = given
    return [np.where(v < 0, UNLABELED, np.searchsorted(distinct, v)) for v in values], names


def find_labels_at(meshes: Sequence[Mesh], counts: Sequence[int], files: Sequence[Path]) -> LabelsAt:
    """Find out from the number of labels of each mesh whether a set is labeled at vertices or at faces.

    If a mesh has as many faces as vertices, its file fits both, and the other files decide.

    Raises DataError for a file that fits neither, for a set that mixes both, and if every file fits both.
    """
    decided: dict[LabelsAt, Path] = {}
    for mesh, count, file in zip(meshes, counts, files, strict=True):
        at_vertices, at_faces = _fits(mesh, count, "vertices"), _fits(mesh, count, "faces")
        if not (at_vertices or at_faces):
            raise DataError(
                f"{file}: {count} labels, but {mesh.name} has {_size(mesh, 'vertices')} and {_size(mesh, 'faces')}"
            )
        if at_vertices != at_faces:
            decided.setdefault("vertices" if at_vertices else "faces", file)
    if len(decided) == 2:
        raise DataError(
            f"{decided['vertices']} labels vertices, but {decided['faces']} labels faces: a set can have only one kind"
        )
    if not decided:
        raise DataError(
            f"{files[0]}: {counts[0]} labels fit vertices and faces: {meshes[0].name} has "
            f"{_size(meshes[0], 'vertices')} and {_size(meshes[0], 'faces')}, and no other file decides"
        )
    return next(iter(decided))


def place_labels(mesh: Mesh, labels: NDArray[np.int64], at: LabelsAt, file: Path) -> NDArray[np.int64]:
    """One label for each vertex (V,), triangle (F,) or edge (E,) of a mesh, int64.

    Labels of faces may be one per triangle, or one per polygon of the source file, which all its triangles get. Raises
    DataError if the number of labels does not fit. The message names the file and the counts.
    """
    if not _fits(mesh, len(labels), at):
        raise DataError(f"{file}: {len(labels)} labels, but {mesh.name} has {_size(mesh, at)}")
    if at == "faces" and len(labels) == mesh.polygon_count:
        return labels[mesh.polygons]
    return labels


def _fits(mesh: Mesh, count: int, at: LabelsAt) -> bool:
    if at == "vertices":
        return count == len(mesh.verts)
    if at == "edges":
        return count == len(mesh_edges(mesh.faces))
    return count in (mesh.polygon_count, len(mesh.faces))


def _size(mesh: Mesh, at: LabelsAt) -> str:
    if at == "vertices":
        return f"{len(mesh.verts)} vertices"
    if at == "edges":
        return f"{len(mesh_edges(mesh.faces))} edges"
    if mesh.polygon_count == len(mesh.faces):
        return f"{len(mesh.faces)} faces"
    return f"{mesh.polygon_count} faces ({len(mesh.faces)} triangles)"


def _read_text(path: Path) -> NDArray[np.int64]:
    text = _text_of(path)
    if "_" not in text:
        try:
            return np.array(list(map(int, text.split())), np.int64)
        except (ValueError, OverflowError):
            pass  # the slower loop below reads numbers written as floats, and finds the line of an error
    values: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for token in line.split():
            try:
                values.append(_whole_number(token))
            except ValueError as e:
                raise DataError(f"{path}, line {number}: {token[:40]!r} is not a whole number") from e
    return np.array(values, np.int64)


def _whole_number(token: str) -> int:
    """The integer that a token stands for. Raises ValueError, also for Python's grouping of digits (`1_0`)."""
    try:
        value = int(token)
    except ValueError:
        number = float(token)
        if not number.is_integer():
            raise
        value = int(number)
    if "_" in token or not _INT64.min <= value <= _INT64.max:
        raise ValueError(token)
    return value


def _read_npy(path: Path) -> NDArray[np.int64]:
    content = _content_of(path)
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as e:
        raise DataError(f"{path}: the file is not a NumPy array of numbers ({e})") from e
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: the file is an archive, expected a single array")
    if array.ndim != 1:
        raise DataError(f"{path}: labels should have shape (N,), shape is {array.shape}")
    if array.dtype.kind not in "iuf":
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


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return _content_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: the file is not text ({e})") from e


def _content_of(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix.lower() != ".gz":
        return data
    try:
        return decompress(data)
    except ValueError as e:
        raise DataError(f"{path}: {e}") from e
