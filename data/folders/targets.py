"""Data sets for regression on disk: numbers at vertices, faces or edges, or for each mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import array_files, arrays_in_mesh_file
from diffnet.data.counts import counted
from diffnet.data.feature_names import FILE_PREFIX
from diffnet.data.folders.columns import check_names, checked_columns, parse_number, read_columns
from diffnet.data.folders.files import find_parts, parts_at_random
from diffnet.data.folders.labels import fits, shown_size
from diffnet.data.folders.numbers import check_vertex_numbers
from diffnet.data.folders.tables import TableMeshes, read_table
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.data.shards.reading import labeled_shards
from diffnet.data.target_names import TABLE, target_parts
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem

_SUFFIXES = (".npy", ".txt", ".csv", ".npy.gz", ".txt.gz", ".csv.gz")


class _Targets(NamedTuple):
    """Targets of one mesh. at: the elements, or None if the number of rows decides."""

    path: Path
    values: NDArray[np.float64]
    names: list[str]
    at: LabelsAt | None


def load_targets(
    path: str | os.PathLike[str],
    targets: str | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
) -> LabeledMeshes:
    """Read all of a data set for regression.

    targets: where they are.
        "file:NAME", or several such parts joined by +: numbers at vertices, faces or edges. `path` is a folder, divided
        into training and test meshes as `load_dataset` divides the layout "folder". For each mesh STEM, NAME is
        `STEM.NAME.npy`, `.txt` or `.csv` beside the mesh; or `NAME/STEM.npy`, `.txt` or `.csv`, where the folder NAME
        is beside the mesh or beside its folder; or the property NAME of the vertices or faces of a PLY file. Files have
        one or several columns and a row for each element. The number of rows decides which elements these are. A first
        line in a `.csv` file names the columns.
        None: numbers for each mesh, in a table. `path` is the table, or a folder with `targets.csv`. The first line is
        `file,COLUMN,…` or `file,COLUMN,…,split`, where the split is train or test. Files are relative to the table.
        Without a split, a random share of `test_fraction`, drawn with `seed`, is the test part.

    `path` may also be shards with targets, see `load_shards`. Their meshes are read when they are needed.

    NaN, and an empty cell of a table, is a missing target. Targets of faces may be one per polygon of the source file,
    or one per triangle.

    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, the training part may be missing, as for an evaluation, see `load_dataset`

    Returns meshes with labels (N, C) float64. `label_names` are the names of the columns. `labels_at` is "vertices",
    "faces", "edges" or "meshes". Raises DataError for a folder, file or value that is missing, malformed or
    contradictory, naming the file, and for a column that is missing in all training meshes; OptionError for targets of
    another form; and MeshError for a mesh that can't be read.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train, "targets")) is not None:
        return shards
    root = Path(path)
    names = None if targets is None else target_parts(targets)
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction should be between 0 and 1, got {test_fraction}")
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    if names is None:
        data = _load_table(root, test_fraction, seed, cache_dir, needs_train)
    elif not root.is_dir():
        raise DataError(f"{root}: a folder is needed for the targets {targets}, and this is a file")
    else:
        data = _load_files(root, names, test_fraction, seed, cache_dir, needs_train)
    if needs_train:
        known = np.zeros(len(data.label_names), bool)
        for item in data.train:
            known |= ~np.isnan(item.labels).all(axis=0)
        if not known.all():
            empty = data.label_names[int(known.argmin())]
            raise DataError(f"{root}: the column {empty!r} is missing (NaN) in all training meshes")
    return data


def _load_files(
    root: Path,
    names: Sequence[str],
    test_fraction: float,
    seed: int,
    cache_dir: str | os.PathLike[str] | None,
    needs_train: bool,
) -> LabeledMeshes:
    """Targets come first: they load fast, so their faults show before minutes of reading meshes."""
    parts = find_parts(root, test_fraction, seed, needs_train)
    paths = [path for part in parts for path in part]
    sources = [[_find(path, name) for name in names] for path in paths]
    columns = [name for source in sources[0] for name in source.names]
    check_names(sources[0][-1].path, columns)
    for source in sources:
        for one, first in zip(source, sources[0], strict=True):
            if len(one.names) != len(first.names):
                own = counted(len(one.names), "column", "columns")
                raise DataError(
                    f"{one.path}: {own}, but {first.path} has {len(first.names)}; all meshes of a "
                    "set need the same columns"
                )
            if one.names != first.names:
                raise DataError(f"{one.path}: the columns are {one.names}, but those of {first.path} are {first.names}")
    meshes = [load_mesh(path, cache_dir) for path in paths]
    at = _find_elements(meshes, sources)
    items = [
        LabeledMesh(mesh_stem(path), mesh, np.hstack([_placed(mesh, one, at) for one in source]))
        for path, mesh, source in zip(paths, meshes, sources, strict=True)
    ]
    return LabeledMeshes(items[: len(parts[0])], items[len(parts[0]) :], columns, at)


def _find(mesh: Path, name: str) -> _Targets:
    """The targets `file:NAME` of a mesh. Raises DataError if they are missing or there twice."""
    part = FILE_PREFIX + name
    places = array_files(mesh, name, _SUFFIXES)
    present = [place for place in places if place.is_file()]
    inside = [] if present else arrays_in_mesh_file(mesh, name)
    if len(present) > 1:
        raise DataError(f"{mesh}: more than one file for {part}: {', '.join(map(str, present))}. Keep one of them")
    if len(inside) > 1:
        raise DataError(f"{mesh}: both the vertices and the faces have the property {name!r}. Keep one of them")
    if present:
        columns, at = read_columns(present[0]), None
    elif inside:
        array, at = inside[0]
        columns = checked_columns(mesh, array)
    else:
        expected = ", ".join(dict.fromkeys(str(place.with_suffix("")) for place in places if place.suffix == ".npy"))
        raise DataError(
            f"{mesh}: no targets for {part}. Expected one of {expected} with .npy, .txt or .csv, or the property "
            f"{name!r} of a PLY file"
        )
    count = columns.values.shape[1]
    names = columns.names or ([name] if count == 1 else [f"{name}_{i}" for i in range(count)])
    return _Targets(present[0] if present else mesh, columns.values, names, at)


def _find_elements(meshes: Sequence[Mesh], sources: Sequence[Sequence[_Targets]]) -> LabelsAt:
    """The elements that have targets in the whole set: those in the files, else those whose number fits.

    Raises DataError for a file that fits none, for a set that mixes several, and if every file fits two.
    """
    decided: dict[LabelsAt, Path] = {}
    for mesh, source in zip(meshes, sources, strict=True):
        for one in source:
            rows = len(one.values)
            if one.at is not None:
                decided.setdefault(one.at, one.path)
                continue
            found: list[LabelsAt] = [at for at in _SURE if fits(mesh, rows, at)]
            if not found and not mesh.is_point_cloud and fits(mesh, rows, "edges"):
                found = ["edges"]
            if not found:
                sizes: list[LabelsAt] = ["vertices"] if mesh.is_point_cloud else [*_SURE, "edges"]
                raise DataError(
                    f"{one.path}: {rows} rows, but {mesh.name} has {_listed([shown_size(mesh, at) for at in sizes])}"
                )
            if len(found) == 1:
                decided.setdefault(found[0], one.path)
    if len(decided) > 1:
        (first, file), (second, other) = list(decided.items())[:2]
        raise DataError(
            f"{file} has targets at {first}, but {other} has targets at {second}: a set can have only one kind"
        )
    if not decided:
        raise DataError(
            f"{sources[0][0].path}: {len(sources[0][0].values)} rows fit vertices and faces: {meshes[0].name} has "
            f"{shown_size(meshes[0], 'vertices')} and {shown_size(meshes[0], 'faces')}, and no other file decides"
        )
    return next(iter(decided))


_SURE: tuple[LabelsAt, LabelsAt] = ("vertices", "faces")  # counting edges takes longer, so they come last


def _placed(mesh: Mesh, one: _Targets, at: LabelsAt) -> NDArray[np.float64]:
    """A row (N, C) for each vertex, triangle or edge.

    Raises DataError if the number of rows does not fit, and for vertices of an STL file.
    """
    if not fits(mesh, len(one.values), at):
        raise DataError(f"{one.path}: {len(one.values)} rows, but {mesh.name} has {shown_size(mesh, at)}")
    if at == "vertices":
        check_vertex_numbers(mesh, one.path)
    if at == "faces" and len(one.values) == mesh.polygon_count:
        return one.values[mesh.polygons]
    return one.values


def _load_table(
    root: Path, test_fraction: float, seed: int, cache_dir: str | os.PathLike[str] | None, needs_train: bool
) -> LabeledMeshes:
    table = root if root.is_file() else root / TABLE
    if not table.is_file():
        raise DataError(
            f"{root}: no targets. Expected a table {TABLE} with a line for each mesh, or --targets file:NAME for "
            "targets at vertices, faces or edges"
        )
    lines = read_table(table, "file,COLUMN,…")
    header = lines[0][1] if lines else []
    has_split = bool(header) and header[-1].lower() == "split"
    names = header[1 : -1 if has_split else None]
    if not names or header[0].lower() != "file":
        raise DataError(
            f"{table}: the first line should be file,COLUMN,… or file,COLUMN,…,split, got {','.join(header)[:80]!r}"
        )
    check_names(table, names)
    if len(lines) < 2:
        raise DataError(f"{table}: there are no meshes in the table")
    meshes, files, splits, values = TableMeshes(table), [], [], []
    for number, cells in lines[1:]:
        place = f"{table}, line {number}"
        if len(cells) != len(header):
            raise DataError(f"{place}: {len(cells)} cells, but the first line has {len(header)}")
        files.append(meshes.path(number, cells[0]))
        splits.append(cells[-1] if has_split else "")
        meshes.check_split(number, splits[-1])
        own = zip(names, cells[1:], strict=False)
        values.append([parse_number(f"{place}, column {name}", cell) for name, cell in own])
    if needs_train and not splits[0]:
        training = set(parts_at_random(root, files, test_fraction, seed)[0])
        splits = ["train" if file in training else "test" for file in files]
    items = [
        LabeledMesh(cells[0], load_mesh(file, cache_dir), np.array([row]))
        for (_, cells), file, row in zip(lines[1:], files, values, strict=True)
    ]
    train = [item for item, split in zip(items, splits, strict=True) if split == "train"]
    test = [item for item, split in zip(items, splits, strict=True) if split != "train"]
    for part, found in (("train", train), ("test", test)):
        if not found and (needs_train or part == "test"):
            raise DataError(f"{table}: there are no {part} meshes")
    return LabeledMeshes(train, test, names, "meshes")


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
