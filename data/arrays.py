"""The user's own features: arrays beside a mesh file, its colors, and its properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import COLORS, ArrayStatistics, FeaturePart, Statistics, feature_parts
from diffnet.data.folders.numbers import check_vertex_numbers, read_array
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.geometry import Mesh, load_attributes
from diffnet.geometry.mesh.attributes import COLOR_FORMATS, VTK_FORMATS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix


def own_arrays(
    mesh: Mesh, features: str, statistics: Statistics | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, NDArray[np.float64]]:
    """The own arrays of a mesh that the features name, by name: (V, C) float64, one row for each vertex.

    `file:NAME`, `vector:NAME` and `scalar:NAME` are the first of these:

    - the array NAME in `given`;
    - `STEM.NAME.npy` beside the mesh file, whose name without extension is STEM;
    - `NAME/STEM.npy`, where the folder NAME is beside the mesh file or beside the folder of the mesh files;
    - for the name colors, the colors of the vertices in the file (PLY, OBJ and OFF), three channels from 0 to 1;
    - the property NAME of the vertices in a PLY file, or the array NAME of the points in a VTK file.

    Arrays have shape (V,) or (V, C), vectors (V, 3), and hold finite numbers. Files beside an STL file are refused,
    because it doesn't number its vertices.

    statistics: of the training set. If given, the numbers of channels must be the same.

    `predict` calls this before it computes anything, so what is missing is named at once. Raises DataError for an array
    that is missing, is there twice, or has another shape. The message names the mesh, the part and what is expected.
    """
    found = {}
    for part in feature_parts(features):
        name = part.array
        if name is None:
            continue
        channels = part.channels if statistics is None or name not in statistics else len(statistics[name]["mean"])
        array, source = _find(mesh, part, given or {}, channels)
        array = _checked(mesh, part.name, array, source)
        if channels is not None and array.shape[1] != channels:
            expected = "a vector has 3" if part.is_vector else f"the network was trained with {channels}"
            raise DataError(f"{mesh.name}: {part.name} has {array.shape[1]} channels in {source}, {expected}")
        found[name] = array
    return found


def standardized(array: NDArray[np.float64], statistics: ArrayStatistics) -> NDArray[np.float64]:
    """The array (V, C) with its channels at mean 0 and standard deviation 1 over the training set."""
    scaled: NDArray[np.float64] = (array - np.array(statistics["mean"])) / np.array(statistics["std"])
    return scaled


def array_files(mesh: Path, name: str, suffixes: Sequence[str] = (".npy",)) -> list[Path]:
    """The files that can hold the array NAME of a mesh file, whether they exist or not."""
    stem, folder = mesh_stem(mesh), mesh.parent
    stems = [folder / f"{stem}.{name}", folder / name / stem, folder.parent / name / stem]
    return [place.with_name(place.name + suffix) for place in stems for suffix in suffixes]


def arrays_in_mesh_file(mesh: Path, name: str) -> list[tuple[NDArray[Any], LabelsAt]]:
    """The arrays NAME in a mesh file itself, with their elements: those of PLY and VTK files, or colors of vertices."""
    suffix = mesh_suffix(mesh)
    if suffix not in (".ply", *VTK_FORMATS) and (name != COLORS or suffix not in COLOR_FORMATS):
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


def _find(mesh: Mesh, part: FeaturePart, given: Mapping[str, Any], channels: int | None) -> tuple[Any, str]:
    """An own array and where it was found. Raises DataError if it is missing or there twice.

    channels: the number that a network expects, for the message
    """
    name, what = str(part.array), f"array for {part.name}"
    if name in given:
        return given[name], "the array"
    if mesh.path is None:
        raise DataError(
            f"{mesh.name}: no {what}: the mesh is not from a file, so there is none beside it. In Python, "
            f"pass arrays={{{name!r}: …}}"
        )
    path = Path(mesh.path)
    places = array_files(path, name)
    present = [place for place in places if place.is_file()]
    if len(present) > 1:
        raise DataError(f"{path}: more than one {what}: {', '.join(map(str, present))}. Keep one of them")
    if present:
        check_vertex_numbers(mesh, present[0])
        return read_array(present[0], f" for {part.name}"), str(present[0])
    for array, at in arrays_in_mesh_file(path, name):
        if at == "vertices":
            return array, str(path)
    count = len(mesh.verts)
    shape = f"({count},) or ({count}, C)" if channels is None else f"({count}, {channels})"
    own = "the colors of the vertices (PLY, OBJ, OFF)" if name == COLORS else f"{name!r} in a PLY or VTK file"
    raise DataError(
        f"{path}: no {what}. Expected an array of shape {shape} in {' or '.join(map(str, places))}, or {own}"
    )


def _checked(mesh: Mesh, part: str, given: Any, source: str) -> NDArray[np.float64]:
    array, count = np.asarray(given), len(mesh.verts)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{mesh.name}: {part} should hold numbers, {source} has dtype {array.dtype}")
    if array.ndim not in (1, 2) or len(array) != count or 0 in array.shape:
        raise DataError(
            f"{mesh.name}: {part} should have shape ({count},) or ({count}, C), one row for each vertex, but {source} "
            f"has shape {array.shape}"
        )
    values = array.astype(np.float64).reshape(count, -1)
    bad = np.flatnonzero(~(np.abs(values) < _MAX_VALUE).all(axis=1))
    if len(bad):
        raise DataError(
            f"{mesh.name}: {part} should hold finite numbers below {_MAX_VALUE:g}, but row {bad[0]} of {source} is "
            f"{values[bad[0]].tolist()}"
        )
    return values


_MAX_VALUE = 1e30  # sums of squares overflow neither float64 nor, once standardized, float32
