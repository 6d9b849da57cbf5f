"""Labels and targets of one mesh as people store them: numbers, lists of parts, JSON, properties and colors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import AUTO_LABELS, COLORS, FILE_PREFIX, component_names
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.data.numbers import as_int64, checked_columns, cortex_values, is_number, read_columns, read_labels, text_of
from diffnet.geometry import FORMATS, Attributes, load_attributes
from diffnet.geometry.errors import IN_BRACKETS, raised_as
from diffnet.geometry.mesh.content import VTK_FORMATS
from diffnet.geometry.mesh.cortex import FREESURFER, is_cortical, value_files
from diffnet.geometry.mesh.formats import READERS, color_names
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix
from diffnet.geometry.mesh.text import integer

PART_LIST = "_labels"  # NAME_labels.txt holds lists of faces
PROPERTIES = ("label", "labels", "class", "class_id", "category", "segment", "segmentation", "part")
SCALAR = "scalar_"  # before the names of properties that CloudCompare writes
MAX_COLORS = 64
TARGETS = "targets"  # the kind of values that aren't labels
_FACES: LabelsAt = "faces"
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


def read_source(path: Path, source: str = AUTO_LABELS) -> FileValues:
    """The labels in a file: a label file, or a mesh with a property or with colors as labels.

    source: see `load_dataset`. Unless it is "auto", `path` is the file that `find_labels` gives.

    `.npy`, `.txt` and others: a number for each element, see `read_labels`
    `NAME_labels.txt`: for each part a line with its name, then a line with the numbers of its faces, from 1
    `.json`: a list of numbers, or an object with such a list "labels", or "sub_labels" for faces
    a mesh: a property of the vertices or faces whose name is in PROPERTIES; else colors of the vertices or faces. If
        both have colors, those that differ count; else those that aren't gray; else those of the vertices. Each
        distinct color is a class. Without colors, names may begin with SCALAR, and the only property with whole
        numbers counts, whatever its name is.

    Raises DataError for labels that are missing or malformed, MeshError for a mesh that can't be read. The message
    names the file.
    """
    suffix = mesh_suffix(path)
    if is_cortical(path):
        values, names, _ = cortex_values(path)
        whole = as_int64(path, "labels", checked_columns(path, values).values[:, 0])
        return FileValues(path, "numbers" if names is None else "names", whole, names, "vertices")
    if source.startswith(FILE_PREFIX):
        return _of_name(path, source.removeprefix(FILE_PREFIX))
    if suffix in FORMATS:
        return _of_mesh(path) if source == AUTO_LABELS else _of_part(path, source)
    if suffix == ".json":
        return _of_json(path)
    if suffix == ".txt" and mesh_stem(path).endswith(PART_LIST) and _begins_with_a_name(path):
        return _of_part_list(path)
    return FileValues(path, "numbers", read_labels(path))


def colors_of_classes(files: Iterable[Path], names: Sequence[str]) -> dict[str, list[int]]:
    """The colors of classes by name, from 0 to 255, in the label tables of cortices.

    files: those with labels, which are read until each class has a color, or until one has no table
    """
    colors = dict[str, list[int]]()
    for file in filter(is_cortical, files):
        values = cortex_values(file)
        if values.names is None or values.colors is None:
            break
        colors = dict(zip(values.names, values.colors.tolist(), strict=True)) | colors
        if colors.keys() >= {*names}:
            break
    return {name: colors[name] for name in names if name in colors}


def holds_labels(path: Path) -> bool:
    """Whether a label file can be read, whatever its mesh is."""
    try:
        read_source(path)
    except DataError:
        return False
    return True


def _begins_with_a_name(path: Path) -> bool:
    return not all(map(is_number, text_of(path).split(None, 1)[:1]))


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
    with raised_as(DataError, f"{path}: the file is not JSON", ValueError, RecursionError, form=IN_BRACKETS):
        content = json.loads(text_of(path))
    by_name = content if isinstance(content, dict) else {"labels": content}
    labels, at = by_name.get("labels"), None
    if labels is None and "sub_labels" in by_name:  # of SubdivNet (Hu et al. 2022)
        labels, at = by_name["sub_labels"], _FACES
    if not isinstance(labels, list) or not labels:
        raise DataError(f'{path}: expected an object with a list "labels", a number for each vertex or each face')
    bad = next((i for i, value in enumerate(labels) if not _is_whole(value)), None)
    if bad is not None:
        raise DataError(f"{path}: label {bad} is {str(labels[bad])[:40]!r}, which is not a whole number")
    return FileValues(path, "numbers", np.array([int(value) for value in labels], np.int64), at=at)


def _is_whole(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**62 and value == int(value)


def _of_mesh(path: Path) -> FileValues:
    attributes = load_attributes(path)
    properties = _properties(attributes)
    if not properties and (attributes.colors is not None or attributes.face_colors is not None):
        _check_colors(path, attributes)
    properties = properties or _properties(attributes, SCALAR)
    palette = _palette(attributes)
    if not properties and (palette is None or len(np.unique(_levels(palette[1]))) > MAX_COLORS):
        properties = _whole_properties(attributes)
    if len(properties) > 1:
        both = ", ".join(f"{name!r} of the {at}" for at, name, _ in properties)
        raise DataError(
            f"{path}: more than one property could be the labels: {both}. Choose one with --labels file:NAME"
        )
    if properties:
        at, name, values = properties[0]
        values = as_int64(path, f"the property {name!r}", values)
        return FileValues(path, f"the property {name!r} of the {at}", values, at=at)
    if palette is not None:
        return _of_colors(path, palette[1], palette[0])
    groups = "".join(f". For its {kind}, add --labels {kind}" for kind in [*attributes.face_names][:1])
    raise DataError(
        f"{path}: no labels. Expected a label file beside the mesh, a property of a PLY or VTK file "
        f"({', '.join(PROPERTIES)}, or one of whole numbers), or colors of the vertices{groups}"
    )


def _palette(attributes: Attributes) -> tuple[LabelsAt, NDArray[np.float64]] | None:
    """The colors that can be labels, (V, 3) or (P, 3), with their elements, or None."""
    colors: list[tuple[LabelsAt, NDArray[np.float64] | None]]
    colors = [("vertices", attributes.colors), ("faces", attributes.face_colors)]
    palettes = [(at, rows) for at, rows in colors if rows is not None]
    return max(palettes, key=lambda palette: _paint(palette[1]), default=None)  # of equal ones, the vertices


def _of_part(path: Path, source: str) -> FileValues:
    """The colors, the groups or the materials of a mesh file, whatever else it has."""
    attributes = load_attributes(path)
    palette = _palette(attributes)
    if source == COLORS and palette is not None:
        return _of_colors(path, palette[1], palette[0])
    if source not in attributes.face_names:
        formats = "PLY, OBJ, OFF and VTK files" if source == COLORS else "OBJ files"
        raise DataError(f"{path}: the file has no {source}. The faces of {formats} can have them")
    names = attributes.face_names[source]
    elements = np.flatnonzero(names != "")
    distinct, values = np.unique(names[elements], return_inverse=True)
    return FileValues(path, source, values.reshape(-1).astype(np.int64), distinct.tolist(), _FACES, elements)


def _of_name(path: Path, name: str) -> FileValues:
    """The labels `file:NAME` in a file of `find_values`."""
    columns = _named_columns(path, name, "labels")
    count = columns.values.shape[1]
    if count != 1:
        raise DataError(f"{path}: {FILE_PREFIX}{name} has {count} columns, and labels are one")
    kind = "numbers" if columns.at is None else f"the property {name!r} of the {columns.at}"
    return FileValues(path, kind, as_int64(path, f"{FILE_PREFIX}{name}", columns.values[:, 0]), at=columns.at)


def _properties(attributes: Attributes, prefix: str = "") -> list[tuple[LabelsAt, str, NDArray[Any]]]:
    """The properties that can be labels, by their names after a prefix."""
    return [
        entry for entry in _all_properties(attributes) if entry[1].lower() in {f"{prefix}{name}" for name in PROPERTIES}
    ]


def _all_properties(attributes: Attributes) -> Iterator[tuple[LabelsAt, str, NDArray[Any]]]:
    return (
        (at, name, values) for at, table in _tables(attributes) for name, values in table.items() if values.ndim == 1
    )


def _whole_properties(attributes: Attributes) -> list[tuple[LabelsAt, str, NDArray[Any]]]:
    """The properties with whole numbers that occur more than once: integers, and those of CloudCompare."""
    properties = []
    for at, name, values in _all_properties(attributes):
        is_paint = name in ("alpha", *color_names(dict(_tables(attributes))[at]))
        of_cloud_compare = name.lower().startswith(SCALAR) and (values == np.trunc(values)).all()
        is_whole = of_cloud_compare or values.dtype.kind in "biu"
        if is_whole and not is_paint and len(np.unique(values)) < len(values):
            properties.append((at, name, values))
    return properties


def _check_colors(path: Path, attributes: Attributes) -> None:
    """Raises DataError if another property could be the labels: several whole numbers, and a name that tells it."""
    for at, name, values in _all_properties(attributes):
        told = name.lower().startswith(SCALAR) or set(re.split("[^a-z]+", name.lower())) & {*PROPERTIES}
        if told and (values == np.trunc(values)).all() and 1 < len(np.unique(values)) <= MAX_COLORS:
            raise DataError(
                f"{path}: both the colors and the property {name!r} of the {at} could be the labels. Choose with "
                f"--labels {FILE_PREFIX}{name} or --labels colors"
            )


def _paint(colors: NDArray[np.float64]) -> tuple[bool, bool]:
    """Whether colors differ, and whether one isn't gray. Some programs write one gray for what has no color."""
    return bool((colors != colors[:1]).any()), bool((colors != colors[:, :1]).any())


def _of_colors(path: Path, colors: NDArray[np.float64], at: LabelsAt) -> FileValues:
    distinct, values = np.unique(_levels(colors), return_inverse=True)
    if len(distinct) > MAX_COLORS:
        raise DataError(
            f"{path}: {len(distinct)} distinct colors of {at}. Colors can be labels if there are at most "
            f"{MAX_COLORS}; put the labels into a file beside the mesh"
        )
    names = [f"#{color:06x}" for color in distinct.tolist()]
    return FileValues(path, "colors", values.reshape(-1).astype(np.int64), names, at)


def _levels(colors: NDArray[np.float64]) -> NDArray[np.int64]:
    """A number (N,) from 0 to 2^24 for each color (N, 3)."""
    return np.rint(colors * 255).astype(np.int64) @ np.array([65536, 256, 1])


def find_values(mesh: Path, name: str) -> Path:
    """The file that holds the labels or targets `file:NAME` of a mesh: one beside it, else the mesh itself.

    name: see `target_parts`

    Raises DataError for several files.
    """
    name = name.rpartition(":")[2]
    return only_file(mesh, array_files(mesh, name, _SUFFIXES), f"file for {FILE_PREFIX}{name}") or mesh


def _named_columns(file: Path, name: str, what: str) -> FileValues:
    """The columns NAME in a file of `find_values`.

    what: for the message of DataError, if they are missing or there twice
    """
    if mesh_suffix(file) not in FORMATS:
        return FileValues(file, TARGETS, *read_columns(file))
    inside = arrays_in_mesh_file(file, name)
    if len(inside) > 1:
        raise DataError(f"{file}: both the vertices and the faces have the property {name!r}. Keep one of them")
    if not inside:
        places = ", ".join(str(place.with_suffix("")) for place in array_files(file, name))
        attributes = load_attributes(file) if READERS[mesh_suffix(file)].properties else Attributes()
        present = [each for _, columns in _tables(attributes) for each in columns]
        raise DataError(
            f"{file}: no {what} for {FILE_PREFIX}{name}. Expected one of {places} with .npy, .txt or .csv, or "
            f"the property {name!r} of a PLY or VTK file" + (f"; it has {', '.join(present)}" if present else "")
        )
    array, at = inside[0]
    return FileValues(file, TARGETS, checked_columns(file, array).values, at=at)


def read_targets(file: Path, name: str) -> FileValues:
    """The targets of one of `target_parts` in a file of `find_values`.

    Raises DataError if they are missing or there twice, and for a vector that has not three columns.
    """
    prefix, _, name = name.rpartition(":")
    columns = _named_columns(file, name, TARGETS)
    count = columns.values.shape[1]
    if prefix and count != 3:
        raise DataError(f"{file}: {prefix}:{name} has {count} columns, and a vector has 3")
    header = None if prefix else columns.names
    return replace(columns, names=header or ([name] if count == 1 else [f"{name}_{i}" for i in range(count)]))


class Fields(NamedTuple):
    """The numbers in the field data of a mesh file, by name."""

    values: dict[str, float]


def read_fields(mesh: Path) -> Fields:
    """The single numbers in the field data of a VTK file. Other formats have none. Raises MeshError."""
    if mesh_suffix(mesh) not in VTK_FORMATS:
        return Fields({})
    fields = load_attributes(mesh).fields
    numbers = {name: x for name, x in fields.items() if x.size == 1 and x.dtype.kind in "biuf"}
    return Fields({name: float(x.item()) for name, x in numbers.items() if np.isfinite(x).all()})


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
    places = [place.with_name(place.name + suffix) for place in stems for suffix in suffixes]
    is_cortex = mesh_suffix(mesh) in (".surf.gii", *FREESURFER)
    return [*places, *(value_files(folder, stem, name) if is_cortex else [])]


def arrays_in_mesh_file(mesh: Path, name: str) -> list[tuple[NDArray[Any], LabelsAt]]:
    """The arrays NAME in a mesh file itself, with their elements: those of PLY and VTK files, or colors of vertices."""
    if name != COLORS and not READERS[mesh_suffix(mesh)].properties:
        return []
    attributes = load_attributes(mesh)
    if name == COLORS and attributes.colors is not None:
        return [(attributes.colors, "vertices")]
    inside = ((_array(table, name), at) for at, table in _tables(attributes))
    return [(array, at) for array, at in inside if array is not None]


def _array(table: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any] | None:
    """The property NAME, or the three NAME_x, NAME_y, NAME_z or NAME_0, NAME_1, NAME_2 as an array (N, 3), or None."""
    if name in table:
        return table[name]
    for names in ([f"{name}_{end}" for end in "xyz"], component_names(name)):
        if all(each in table and table[each].ndim == 1 for each in names):
            return np.stack([table[each] for each in names], 1)
    return None


def _tables(attributes: Attributes) -> tuple[tuple[LabelsAt, dict[str, NDArray[Any]]], ...]:
    return ("vertices", attributes.vertices), ("faces", attributes.faces)
