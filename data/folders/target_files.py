"""The targets of one mesh: columns in a file beside it, or a property of its own file, as own features are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import COLORS, FILE_PREFIX
from diffnet.data.folders.columns import checked_columns, read_columns
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.geometry import FORMATS, load_attributes
from diffnet.geometry.mesh.formats import READERS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

_SUFFIXES = (".npy", ".txt", ".csv", ".npy.gz", ".txt.gz", ".csv.gz")


class Targets(NamedTuple):
    """Targets of one mesh. at: the elements, or None if the number of rows decides."""

    path: Path
    values: NDArray[np.float64]
    names: list[str]
    at: LabelsAt | None


def find_targets(mesh: Path, name: str) -> Path:
    """The file that holds the targets `file:NAME` of a mesh: one beside it, else the mesh itself.

    Raises DataError for several files, and if the mesh isn't a PLY file, which may have a property NAME.
    """
    places = array_files(mesh, name, _SUFFIXES)
    present = [place for place in places if place.is_file()]
    if len(present) > 1:
        raise DataError(
            f"{mesh}: more than one file for {FILE_PREFIX}{name}: {', '.join(map(str, present))}. Keep one of them"
        )
    return present[0] if present else mesh


def read_targets(file: Path, name: str) -> Targets:
    """The targets `file:NAME` in a file of `find_targets`. Raises DataError if they are missing or there twice."""
    at: LabelsAt | None = None
    if mesh_suffix(file) not in FORMATS:
        columns = read_columns(file)
    else:
        inside = arrays_in_mesh_file(file, name)
        if len(inside) > 1:
            raise DataError(f"{file}: both the vertices and the faces have the property {name!r}. Keep one of them")
        if not inside:
            places = [place for place in array_files(file, name, _SUFFIXES) if place.suffix == ".npy"]
            expected = ", ".join(dict.fromkeys(str(place.with_suffix("")) for place in places))
            raise DataError(
                f"{file}: no targets for {FILE_PREFIX}{name}. Expected one of {expected} with .npy, .txt or .csv, or "
                f"the property {name!r} of a PLY file"
            )
        array, at = inside[0]
        columns = checked_columns(file, array)
    count = columns.values.shape[1]
    names = columns.names or ([name] if count == 1 else [f"{name}_{i}" for i in range(count)])
    return Targets(file, columns.values, names, at)


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
    found: list[tuple[NDArray[Any], LabelsAt]] = []
    if name in attributes.vertices:
        found.append((attributes.vertices[name], "vertices"))
    if name in attributes.faces:
        found.append((attributes.faces[name], "faces"))
    return found
