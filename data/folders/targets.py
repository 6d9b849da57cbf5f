"""Data sets for regression on disk: numbers at vertices, faces or edges, or for each mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.folders.columns import check_names, parse_number
from diffnet.data.folders.division import Division, Rule, divide, find_parts, in_parts
from diffnet.data.folders.files import Part
from diffnet.data.folders.labels import fits, shown_size
from diffnet.data.folders.numbers import check_vertex_numbers
from diffnet.data.folders.tables import TableMeshes, read_table
from diffnet.data.folders.target_files import Targets, find_targets, read_targets
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from diffnet.data.shards.reading import labeled_shards
from diffnet.data.target_names import TABLE, target_parts
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.elements.elements import on_triangles
from diffnet.geometry.mesh.mesh import mesh_stem


def load_targets(
    path: str | os.PathLike[str],
    targets: str | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
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
        `file,COLUMN,…` or `file,COLUMN,…,split`, where the split is train, val or test. Files are relative to the
        table. Without a split, the lists of `load_dataset` divide the meshes. Without these, a random share of
        `test_fraction`, drawn with `seed`, is the test part.

    `path` may also be shards with targets, see `load_shards`. Their meshes are read when they are needed.

    NaN, and an empty cell of a table, is a missing target. Targets of faces may be one per polygon of the source file,
    or one per triangle.

    group_by: see `load_dataset`
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, the training part may be missing, as for an evaluation, see `load_dataset`

    Returns meshes with labels (N, C) float64. `label_names` are the names of the columns. `labels_at` is "vertices",
    "faces", "edges" or "meshes". Raises DataError for a folder, file or value that is missing, malformed or
    contradictory, naming the file, and for a column that is missing in all training meshes; OptionError for targets of
    another form; and MeshError for a mesh that can't be read.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train, "targets")) is not None:
        return shards
    rule = Rule(test_fraction, seed, group_by, needs_train)
    names, parts, columns = find_target_rows(Path(path), targets, rule)
    rows = parts.every
    if names is None:
        items = [LabeledMesh(row.name, load_mesh(row.path, cache_dir), np.array([row.values])) for row in rows]
        at: TargetsAt = "meshes"
    else:
        # Targets come first: they load fast, so their faults show before minutes of reading meshes.
        sources = [[read_targets(find_targets(row.path, name), name) for name in names] for row in rows]
        columns = checked_names(sources)
        meshes = [load_mesh(row.path, cache_dir) for row in rows]
        at = targets_at(meshes, sources)
        items = [
            LabeledMesh(row.name, mesh, placed_targets(mesh, source, at))
            for row, mesh, source in zip(rows, meshes, sources, strict=True)
        ]
    data = LabeledMeshes(**parts.fields(items), label_names=columns, labels_at=at)
    if needs_train:
        check_known(Path(path), columns, [~np.isnan(item.labels).all(axis=0) for item in data.train])
    return data


class TargetRow(NamedTuple):
    """One mesh. values: its targets in a table, or none"""

    name: str
    path: Path
    values: list[float]


def find_target_rows(
    root: Path, targets: str | None, rule: Rule
) -> tuple[list[str] | None, Division[TargetRow], list[str]]:
    """The meshes of a set, see `load_targets`, without reading them.

    Returns the names in `targets`; the meshes of each part, and without `needs_train` those of the test part alone; and
    the names of the columns in a table. Raises DataError.
    """
    names = None if targets is None else target_parts(targets)
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    if names is not None and not root.is_dir():
        raise DataError(f"{root}: a folder is needed for the targets {targets}, and this is a file")
    columns: list[str] = []
    if names is None:
        parts, columns = _table_parts(root, rule)
    else:
        parts = find_parts(root, rule).of(lambda path: TargetRow(mesh_stem(path), path, []))
    return names, parts if rule.needs_train else parts.of_test(), columns


def check_known(
    root: str | os.PathLike[str], columns: Sequence[str], known: Sequence[Sequence[bool] | NDArray[np.bool_]]
) -> None:
    """Raises DataError for a column without any target.

    known: for each training mesh and each column, whether there is a target
    """
    found = np.zeros(len(columns), bool)
    for own in known:
        found |= own
    if not found.all():
        raise DataError(
            f"{os.fspath(root)}: the column {columns[int(found.argmin())]!r} is missing (NaN) in all training meshes"
        )


def checked_names(sources: Sequence[Sequence[Targets]]) -> list[str]:
    """The names of the columns, which are those of each mesh. Raises DataError for a mesh with others."""
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
    return columns


def targets_at(meshes: Sequence[Mesh], sources: Sequence[Sequence[Targets]]) -> LabelsAt:
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


def placed_targets(mesh: Mesh, sources: Sequence[Targets], at: LabelsAt) -> NDArray[np.float64]:
    """The columns (N, C) of all sources, with a row for each vertex, triangle or edge.

    Raises DataError if the number of rows does not fit, and for vertices of an STL file.
    """
    check_targets_fit(mesh, sources, at)
    return np.hstack([on_triangles(mesh, one.values, at) for one in sources])


def check_targets_fit(mesh: Mesh, sources: Sequence[Targets], at: LabelsAt) -> None:
    """Raises DataError if a number of rows does not fit, and for vertices of an STL file."""
    for one in sources:
        if not fits(mesh, len(one.values), at):
            raise DataError(f"{one.path}: {len(one.values)} rows, but {mesh.name} has {shown_size(mesh, at)}")
        if at == "vertices":
            check_vertex_numbers(mesh, one.path)


def _table_parts(root: Path, rule: Rule) -> tuple[Division[TargetRow], list[str]]:
    """The meshes of each part of a table, and the names of its columns."""
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
    meshes, rows = TableMeshes(table), []
    splits: list[Part] = []
    for number, cells in lines[1:]:
        place = f"{table}, line {number}"
        if len(cells) != len(header):
            raise DataError(f"{place}: {len(cells)} cells, but the first line has {len(header)}")
        file = meshes.path(number, cells[0])
        if part := meshes.part(number, cells[-1] if has_split else ""):
            splits.append(part)
        own = zip(names, cells[1:], strict=False)
        values = [parse_number(f"{place}, column {name}", cell) for name, cell in own]
        rows.append(TargetRow(cells[0], file, values))
    if splits:
        found = Division(in_parts(zip(splits, rows, strict=True)), f"by the table {table.name}")
    else:
        numbers = divide(table.parent, [row.name for row in rows], [row.path for row in rows], rule)
        found = numbers.of(rows.__getitem__)
    for name in ("train", "test") if rule.needs_train else ("test",):
        if not found.parts[name]:
            raise DataError(f"{table}: there are no {name} meshes")
    return found, names


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
