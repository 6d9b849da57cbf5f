"""Labels and targets of one mesh as people store them: numbers, lists of parts, JSON, properties and colors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import COLORS, FILE_PREFIX
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.data.numbers import checked_columns, read_columns, read_labels, text_of
from diffnet.geometry import FORMATS, Attributes, load_attributes
from diffnet.geometry.mesh.formats import READERS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix
from diffnet.geometry.mesh.text import integer, real

PART_LIST = "_labels"  # NAME_labels.txt holds lists of faces
PROPERTIES = ("label", "labels", "class", "class_id", "category", "segment", "segmentation", "part")
SCALAR = "scalar_"  # before the names of properties that CloudCompare writes
MAX_COLORS = 64
TARGETS = "targets"  # the kind of values that aren't labels
_SUFFIXES = (".npy", ".txt", ".csv", ".npy.gz", ".txt.gz", ".csv.gz")  # of files of targets


@dataclass(frozen=True)
class FileValues:
    """The labels in one file, before the classes of the set are numbered, or columns of targets.

    path: the file
    kind: what the labels are, for messages, or TARGETS
    values: labels (N,) int64, numbers as in the file, or indices into `names`; or targets (N, C) float64, NaN where
        missing
    names: names of classes, or None for numbers; or the names of the columns
    at: the elements that have values, or None if the number of values decides
    elements: (N,) the numbers of the elements that have values, from 0, if the file names them. None means all, in
        order.
    """

    path: Path
    kind: str
    values: NDArray[Any]
    names: list[str] | None = None
    at: LabelsAt | None = None
    elements: NDArray[np.int64] | None = None


def read_source(path: Path) -> FileValues:
    """The labels in a file: a label file, or a mesh with a property or with colors as labels.

    `.npy`, `.txt` and others: a number for each element, see `read_labels`
    `NAME_labels.txt`: for each part a line with its name, then a line with the numbers of its faces, from 1
    `.json`: an object with a list "labels", a number for each vertex
    a mesh: a property of the vertices or faces of a PLY file whose name is in PROPERTIES; else colors of the vertices
        or faces. If both have colors, those that differ count; else those that aren't gray; else those of the vertices.
        Each distinct color is a class. Without colors, names may begin with
        SCALAR.

    Raises DataError for labels that are missing or malformed, MeshError for a mesh that can't be read. The message
    names the file.
    """
    suffix = mesh_suffix(path)
    if suffix in FORMATS:
        return _of_mesh(path)
    if suffix == ".json":
        return _of_json(path)
    if suffix == ".txt" and mesh_stem(path).endswith(PART_LIST) and _begins_with_a_name(path):
        return _of_part_list(path)
    return FileValues(path, "numbers", read_labels(path))


def holds_labels(path: Path) -> bool:
    """Whether a label file can be read, whatever its mesh is."""
    try:
        read_source(path)
    except DataError:
        return False
    return True


def _begins_with_a_name(path: Path) -> bool:
    words = text_of(path).split(None, 1)
    try:
        real(words[0] if words else "0")
    except ValueError:
        return True
    return False


def _of_part_list(path: Path) -> FileValues:
    """Blank lines don't count. A part may have several pairs of lines. Raises DataError for a face in two parts."""
    lines = [(number, line.strip()) for number, line in enumerate(text_of(path).split("\n"), 1) if line.strip()]
    if len(lines) % 2:
        raise DataError(f"{path}, line {lines[-1][0]}: part {lines[-1][1][:40]!r} has no line of faces after its name")
    names: list[str] = []
    faces: list[NDArray[np.int64]] = []
    values: list[NDArray[np.int64]] = []
    for (_, name), (number, line) in zip(lines[::2], lines[1::2], strict=True):
        if name not in names:
            names.append(name)
        try:
            numbers = np.array([integer(word) for word in line.replace(",", " ").split()], np.int64)
        except (ValueError, OverflowError) as e:
            raise DataError(
                f"{path}, line {number}: expected the numbers of the faces of {name[:40]!r}, got {line[:40]!r}"
            ) from e
        if len(numbers) and numbers.min() < 1:
            raise DataError(f"{path}, line {number}: faces are numbered from 1, got {numbers.min()}")
        faces.append(numbers - 1)
        values.append(np.full(len(numbers), names.index(name)))
    listed, part = np.concatenate(faces), np.concatenate(values)
    order = np.argsort(listed, kind="stable")
    again = np.flatnonzero((np.diff(listed[order]) == 0) & (np.diff(part[order]) != 0))
    if len(again):
        first, second = order[again[0]], order[again[0] + 1]
        raise DataError(
            f"{path}: face {listed[first] + 1} is in two parts, {names[part[first]]!r} and {names[part[second]]!r}"
        )
    return FileValues(path, "names", part, names, "faces", listed)


def _of_json(path: Path) -> FileValues:
    try:
        content = json.loads(text_of(path))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: the file is not JSON ({e})") from e
    labels = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(labels, list) or not labels:
        raise DataError(f'{path}: expected an object with a list "labels", a number for each vertex')
    bad = next((i for i, value in enumerate(labels) if not _is_whole(value)), None)
    if bad is not None:
        raise DataError(f"{path}: label {bad} is {str(labels[bad])[:40]!r}, which is not a whole number")
    return FileValues(path, "numbers", np.array([int(value) for value in labels], np.int64), at="vertices")


def _is_whole(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**62 and value == int(value)


def _of_mesh(path: Path) -> FileValues:
    attributes = load_attributes(path)
    properties = _properties(attributes)
    if not properties and (attributes.colors is not None or attributes.face_colors is not None):
        _check_colors(path, attributes)
    properties = properties or _properties(attributes, SCALAR)
    if len(properties) > 1:
        both = ", ".join(f"{name!r} of the {at}" for at, name, _ in properties)
        raise DataError(f"{path}: more than one property could be the labels: {both}. Keep one of them")
    if properties:
        at, name, values = properties[0]
        return FileValues(path, f"the property {name!r}", _whole_numbers(path, name, values), at=at)
    colors: list[tuple[LabelsAt, NDArray[np.float64] | None]]
    colors = [("vertices", attributes.colors), ("faces", attributes.face_colors)]
    palettes = [(at, rows) for at, rows in colors if rows is not None]
    if palettes:
        at, rows = max(palettes, key=lambda palette: _paint(palette[1]))  # of equal ones, the vertices
        return _of_colors(path, rows, at)
    raise DataError(
        f"{path}: no labels. Expected a label file beside the mesh, a property of a PLY file "
        f"({', '.join(PROPERTIES)}), or colors of the vertices"
    )


def _properties(attributes: Attributes, prefix: str = "") -> list[tuple[LabelsAt, str, NDArray[Any]]]:
    """The properties that can be labels, by their names after a prefix."""
    return [
        entry for entry in _all_properties(attributes) if entry[1].lower() in {f"{prefix}{name}" for name in PROPERTIES}
    ]


def _all_properties(attributes: Attributes) -> Iterator[tuple[LabelsAt, str, NDArray[Any]]]:
    return (
        (at, name, values) for at, table in _tables(attributes) for name, values in table.items() if values.ndim == 1
    )


def _check_colors(path: Path, attributes: Attributes) -> None:
    """Raises DataError if another property could be the labels: several whole numbers, and a name that tells it."""
    for at, name, values in _all_properties(attributes):
        told = name.lower().startswith(SCALAR) or set(re.split("[^a-z]+", name.lower())) & {*PROPERTIES}
        if told and (values == np.trunc(values)).all() and 1 < len(np.unique(values)) <= MAX_COLORS:
            raise DataError(
                f"{path}: both the colors and the property {name!r} of the {at} could be the labels. Rename the "
                "property to label, or remove the colors"
            )


def _whole_numbers(path: Path, name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    real = values.astype(np.float64)
    bad = np.flatnonzero(~((np.abs(real) < 2**53) & (real == np.trunc(real))))
    if len(bad):
        raise DataError(f"{path}: the property {name!r} should be whole numbers, row {bad[0]} is {values[bad[0]]}")
    return values.astype(np.int64)


def _paint(colors: NDArray[np.float64]) -> tuple[bool, bool]:
    """Whether colors differ, and whether one isn't gray. Some programs write one gray for what has no color."""
    return bool((colors != colors[:1]).any()), bool((colors != colors[:, :1]).any())


def _of_colors(path: Path, colors: NDArray[np.float64], at: LabelsAt) -> FileValues:
    levels = np.rint(colors * 255).astype(np.int64)
    distinct, values = np.unique(levels @ [65536, 256, 1], return_inverse=True)
    if len(distinct) > MAX_COLORS:
        raise DataError(
            f"{path}: {len(distinct)} distinct colors of {at}. Colors can be labels if there are at most "
            f"{MAX_COLORS}; put the labels into a file beside the mesh"
        )
    names = [f"#{color:06x}" for color in distinct.tolist()]
    return FileValues(path, "colors", values.reshape(-1).astype(np.int64), names, at)


def find_targets(mesh: Path, name: str) -> Path:
    """The file that holds the targets `file:NAME` of a mesh: one beside it, else the mesh itself.

    Raises DataError for several files.
    """
    return only_file(mesh, array_files(mesh, name, _SUFFIXES), f"file for {FILE_PREFIX}{name}") or mesh


def read_targets(file: Path, name: str) -> FileValues:
    """The targets `file:NAME` in a file of `find_targets`. Raises DataError if they are missing or there twice."""
    at: LabelsAt | None = None
    if mesh_suffix(file) not in FORMATS:
        columns = read_columns(file)
    else:
        inside = arrays_in_mesh_file(file, name)
        if len(inside) > 1:
            raise DataError(f"{file}: both the vertices and the faces have the property {name!r}. Keep one of them")
        if not inside:
            places = ", ".join(str(place.with_suffix("")) for place in array_files(file, name))
            raise DataError(
                f"{file}: no targets for {FILE_PREFIX}{name}. Expected one of {places} with .npy, .txt or .csv, or "
                f"the property {name!r} of a PLY file"
            )
        array, at = inside[0]
        columns = checked_columns(file, array)
    count = columns.values.shape[1]
    names = columns.names or ([name] if count == 1 else [f"{name}_{i}" for i in range(count)])
    return FileValues(file, TARGETS, columns.values, names, at)


def only_file(mesh: Path, places: Sequence[Path], what: str) -> Path | None:
    """The place that is a file, or None. Raises DataError for several. what: for the message"""
    present = [place for place in places if place.is_file()]
    if len(present) > 1:
        raise DataError(f"{mesh}: more than one {what}: {', '.join(map(str, present))}. Keep one of them")
    return present[0] if present else None


def array_files(mesh: Path, name: str, suffixes: Sequence[str] = (".npy",)) -> list[Path]:
    """The files that can hold the array NAME of a mesh file, whether they exist or not."""
    stem, folder = mesh_stem(mesh), mesh.parent
    stems = [folder / f"{stem}.{name}", folder / name / stem, folder.parent / name / stem]
    return [place.with_name(place.name + suffix) for place in stems for suffix in suffixes]


def arrays_in_mesh_file(mesh: Path, name: str) -> list[tuple[NDArray[Any], LabelsAt]]:
    """The arrays NAME in a mesh file itself, with their elements: those of PLY and VTK files, or colors of vertices."""
    reader = READERS.get(mesh_suffix(mesh))
    if reader is None or reader.attributes is None or not (reader.properties or name == COLORS):
        return []
    attributes = load_attributes(mesh)
    if name == COLORS and attributes.colors is not None:
        return [(attributes.colors, "vertices")]
    return [(table[name], at) for at, table in _tables(attributes) if name in table]


def _tables(attributes: Attributes) -> tuple[tuple[LabelsAt, dict[str, NDArray[Any]]], ...]:
    return ("vertices", attributes.vertices), ("faces", attributes.faces)
