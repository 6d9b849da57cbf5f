"""The targets of one mesh: columns in a file beside it, or a property of its own file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import array_files, arrays_in_mesh_file
from diffnet.data.feature_names import FILE_PREFIX
from diffnet.data.folders.columns import checked_columns, read_columns
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.geometry import FORMATS
from diffnet.geometry.mesh.mesh import mesh_suffix

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
