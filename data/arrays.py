"""The user's own features: arrays beside a mesh file, its colors, and its properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import (
    COLORS,
    MASK_PREFIX,
    ArrayStatistics,
    FeaturePart,
    Statistics,
    array_names,
    feature_parts,
    mask_of,
)
from diffnet.data.folders.index import contents_of
from diffnet.data.folders.sources import array_files, arrays_in_mesh_file, only_file
from diffnet.data.labeled import DataError, LabeledMesh
from diffnet.data.numbers import MAX_NUMBER, check_vertex_numbers, read_array
from diffnet.data.stored import remembered
from diffnet.geometry import Mesh
from diffnet.geometry.errors import raised_as
from diffnet.geometry.mesh.cortex import is_cortical, read_mask
from diffnet.geometry.mesh.objects import on_host
from diffnet.geometry.options import Scale, counts_all

WHOLLY = 0.999  # from this value on, a vertex is in a mask. Variants interpolate masks.


def own_arrays(
    mesh: Mesh, features: str, statistics: Statistics | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, NDArray[np.float64]]:
    """The own arrays of a mesh that the features name, by name: (V, C) float64, one row for each vertex.

    `file:NAME`, `vector:NAME`, `scalar:NAME` and `mask:NAME` are the first of these:

    - the array NAME in `given`;
    - `STEM.NAME.npy` beside the mesh file, whose name without extension is STEM;
    - `NAME/STEM.npy`, where the folder NAME is beside the mesh file or beside the folder of the mesh files;
    - for the name colors, the colors of the vertices in the file (PLY, OBJ and OFF), three channels from 0 to 1;
    - the property NAME of the vertices in a PLY file, or the array NAME of the points in a VTK file; or three of them,
      NAME_x, NAME_y and NAME_z, or NAME_0, NAME_1 and NAME_2.

    Arrays have shape (V,) or (V, C), vectors (V, 3), masks (V,), and hold finite numbers. Files beside an STL file are
    refused, because it doesn't number its vertices. In a mask, larger numbers than 1 are 1, and negative ones and NaN
    are 0. Where it is not 1, all other arrays are 0, whatever their files have.

    statistics: of the training set. If given, the numbers of channels must be the same.

    `predict` calls this before it computes anything, so what is missing is named at once. Raises DataError for an array
    that is missing, is there twice, or has another shape. The message names the mesh, the part and what is expected.
    """
    arrays: dict[str, NDArray[np.float64]] = {}
    inside = np.ones(len(mesh.verts), np.bool_)
    for part in sorted(feature_parts(features), key=lambda part: not part.is_mask):
        name = part.array
        if name is None:
            continue
        channels = part.channels if statistics is None or name not in statistics else len(statistics[name]["mean"])
        array, source = _find(mesh, part, given or {}, channels)
        array = _checked(mesh, part.name, array, source, inside)
        if channels is not None and array.shape[1] != channels:
            expected = "a vector has 3" if part.is_vector else f"the network was trained with {channels}"
            raise DataError(f"{mesh.name}: {part.name} has {array.shape[1]} channels in {source}, {expected}")
        arrays[name] = array
        inside = array[:, 0] >= WHOLLY if part.is_mask else inside
    return arrays


def vertices_in_mask(mesh: Mesh, features: str, arrays: Mapping[str, Any] | None = None) -> NDArray[np.bool_]:
    """Which vertices (V,) of a mesh are in the mask of the features, or all. arrays: own arrays by name"""
    name = mask_of(features)
    if name is None:
        return np.ones(len(mesh.verts), np.bool_)
    return own_arrays(mesh, f"{MASK_PREFIX}{name}", given=arrays)[name][:, 0] >= WHOLLY


def counted_vertices(
    mesh: Mesh, features: str, scale: Scale, arrays: Mapping[str, Any] | None = None
) -> NDArray[np.bool_]:
    """Which vertices (V,) of a mesh count in training, statistics, scores and predictions.

    Vertices of no face are no part of a surface, unless the scale counts them, see `normalize_positions`. Of the
    others, those in the mask of the features count, or all. arrays: own arrays by name, see `own_arrays`
    """
    return vertices_in_mask(mesh, features, arrays) & (counts_all(scale) | mesh.on_surface)


def array_statistics(
    items: Sequence[LabeledMesh], features: str, jobs: int | None = None, scale: Scale = "radius"
) -> dict[str, ArrayStatistics]:
    """Mean and standard deviation of each channel of the own arrays, over the vertices of the training meshes.

    jobs: see `remembered`. Each mesh is read once, and only its sums are kept.
    scale: how positions are normalized, which decides whether vertices of no face count; see `normalize_positions`

    The standard deviation of a constant channel is given as 1. A vector is not shifted, and its standard deviation is
    the root of the mean square of all three channels. Vertices outside of a mask don't count, and a mask itself stays
    as it is. Without own arrays in the features, the result is empty and no file is read.

    Raises DataError for two meshes with different numbers of channels, and the errors of `own_arrays`.
    """
    names = array_names(features)
    if not names or not len(items):
        return {}
    first = items[0]
    vectors = {part.array for part in feature_parts(features) if part.is_vector}
    # Moments about the first row of the set don't cancel where the mean is large.
    shifts = {
        name: [0.0] * 3 if name in vectors else array[0].tolist()
        for name, array in own_arrays(first.mesh, features, given=first.arrays).items()
    }
    work = partial(_sums, features=features, shifts=shifts, first=first.mesh.name, scale=scale)
    about = features, shifts, array_states(items, features, jobs), counts_all(scale)
    each = remembered(work, items, "array sums", *about, jobs=jobs)
    statistics: dict[str, ArrayStatistics] = {}
    for i, name in enumerate(names):
        shift = np.array(shifts[name])
        total, squares, count = np.zeros(len(shift)), np.zeros(len(shift)), 0
        for sums in each:
            total, squares, count = total + sums[i][0], squares + sums[i][1], count + sums[i][2]
        if name in vectors:
            total, squares = np.zeros(3), np.full(3, squares.mean())
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        std = np.where(std > 1e-9 * (np.abs(shift + mean) + np.abs(mean)), std, 1.0)
        statistics[name] = {"mean": (shift + mean).tolist(), "std": std.tolist()}
        if name == mask_of(features):
            statistics[name] = {"mean": [0.0], "std": [1.0]}
    return statistics


def _sums(item: LabeledMesh, features: str, shifts: Mapping[str, list[float]], first: str, scale: Scale) -> list[Any]:
    """For each own array: the sums and the sums of squares of its channels above the shift, and the number of rows."""
    rows = []
    arrays = own_arrays(item.mesh, features, given=item.arrays)
    counts = counted_vertices(item.mesh, features, scale, arrays)
    for name in array_names(features):
        array = arrays[name]
        shift = np.array(shifts[name])
        if len(shift) != array.shape[1]:
            raise DataError(
                f"{item.mesh.name}: the own array {name} has {array.shape[1]} channels, but that of {first} "
                f"has {len(shift)}; all meshes of a set need the same number"
            )
        moved = array[counts] - shift
        rows.append([moved.sum(0).tolist(), (moved**2).sum(0).tolist(), len(moved)])
    return rows


def check_arrays_of_all(
    items: Sequence[LabeledMesh], features: str, statistics: Statistics | None, jobs: int | None = None
) -> None:
    """Raises DataError for an own array that is missing or has another number of channels, before anything is computed.

    jobs: see `remembered`
    """
    if array_names(features):
        work = partial(_check_item, features=features, statistics=statistics)
        about = ("arrays", features, dict(statistics or {}), array_states(items, features, jobs))
        remembered(work, items, *about, jobs=jobs)


def _check_item(item: LabeledMesh, features: str, statistics: Statistics | None) -> None:
    own_arrays(item.mesh, features, statistics, item.arrays)


def array_states(items: Sequence[LabeledMesh], features: str, jobs: int | None = 1) -> list[Any]:
    """The contents of files with own arrays beside meshes that are read when needed, whose key doesn't know them.

    For each file, the number of the mesh, the path and a hash. jobs: number of worker processes that read files
    """
    names, file = array_names(features), getattr(items, "file", lambda i: None)
    places = [
        (i, path)
        for i in range(len(items) if names else 0)
        if (source := file(i)) is not None
        for name in names
        for path in array_files(Path(source), name)
        if path.is_file()  # most of these places are empty
    ]
    if not places:
        return []
    contents = contents_of([path for _, path in places], getattr(items, "cache_dir", None), jobs)
    return [[i, str(path), content] for (i, path), content in zip(places, contents, strict=True)]


def _find(mesh: Mesh, part: FeaturePart, arrays: Mapping[str, Any], channels: int | None) -> tuple[Any, str]:
    """An own array and where it was found. Raises DataError if it is missing or there twice.

    channels: the number that a network expects, for the message
    """
    name, what = str(part.array), f"array for {part.name}"
    if name in arrays:
        return arrays[name], "the array"
    if mesh.path is None:
        raise DataError(
            f"{mesh.name}: no {what}: the mesh is not from a file, so there is none beside it. In Python, "
            f"pass arrays={{{name!r}: …}}"
        )
    path = Path(mesh.path)
    places = array_files(path, name)
    file = only_file(path, places, what)
    if file is not None:
        check_vertex_numbers(mesh, file)
        if part.is_mask and is_cortical(file):
            with raised_as(DataError, file, ValueError):
                return read_mask(file, len(mesh.verts)), str(file)
        return read_array(file, f" for {part.name}"), str(file)
    for array, at in arrays_in_mesh_file(path, name):
        if at == "vertices":
            return array, str(path)
    count = len(mesh.verts)
    shape = f"({count},) or ({count}, C)" if channels is None else f"({count}, {channels})"
    place = "the colors of the vertices (PLY, OBJ, OFF)" if name == COLORS else f"{name!r} in a PLY or VTK file"
    raise DataError(
        f"{path}: no {what}. Expected an array of shape {shape} in {' or '.join(map(str, places))}, or {place}"
    )


def _checked(mesh: Mesh, part: str, content: Any, source: str, inside: NDArray[np.bool_]) -> NDArray[np.float64]:
    """An own array (V, C), which is 0 outside of a mask, or a mask (V, 1) from 0 to 1. inside: (V,)"""
    array, count = np.asarray(on_host(content)), len(mesh.verts)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{mesh.name}: {part} should hold numbers, {source} has dtype {array.dtype}")
    if array.ndim not in (1, 2) or len(array) != count or 0 in array.shape:
        raise DataError(
            f"{mesh.name}: {part} should have shape ({count},) or ({count}, C), one row for each vertex, but {source} "
            f"has shape {array.shape}"
        )
    read = array.astype(np.float64).reshape(count, -1)
    if part.startswith(MASK_PREFIX):
        return np.nan_to_num(read).clip(0, 1)
    values = np.where(inside[:, None], read, 0)
    bad = np.flatnonzero(~(np.abs(values) < MAX_NUMBER).all(axis=1))
    if len(bad):
        raise DataError(
            f"{mesh.name}: {part} should hold finite numbers below {MAX_NUMBER:g}, but row {bad[0]} of {source} is "
            f"{values[bad[0]].tolist()}"
        )
    return values
