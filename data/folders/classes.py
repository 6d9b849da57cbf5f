"""Data sets for classification on disk: one label for each mesh."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffnet.data.folders.files import listing, meshes_in
from diffnet.data.folders.tables import PARTS, TableMeshes, read_table
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.shards.reading import labeled_shards
from diffnet.geometry import FORMATS, load_mesh
from diffnet.geometry.files import as_text
from diffnet.geometry.mesh.mesh import mesh_stem

TABLE = "labels.csv"  # the name of a table in a folder


class Row(NamedTuple):
    """One mesh of a set. split: "train", "test" or "", which means not decided."""

    name: str
    path: Path
    label: str
    split: str


def load_classes(
    path: str | os.PathLike[str],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
) -> LabeledMeshes:
    """Read all of a data set for classification, in one of these layouts.

    - `CLASS/train/*` and `CLASS/test/*`, or `train/CLASS/*` and `test/CLASS/*`: meshes in one folder per class.
    - `CLASS/*`: the same without a split.
    - Shards, see `load_shards`. Their meshes are read when they are needed.
    - A table, `labels.csv` in the folder or the path itself: lines `file,label` or `file,label,split`, where the split
      is train or test. Files are relative to the table. A first line `file,label` or `file,label,split` is a header.

    Without a split, a random share of `test_fraction` of each class, drawn with `seed`, is the test part. It has at
    least one mesh of each class. Classes are sorted by name. Meshes beside the folders of classes belong to no class.
    They are not read, and a warning names them.

    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, as for an evaluation, the training part is not read, and it and some classes may be missing.
        Without a split, all meshes are the test part.

    Returns meshes with labels () int64. Raises DataError for a folder, file or line that is missing or malformed,
    naming it; for a single class; for a class without a training or test mesh; and MeshError for a mesh that can't be
    read.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    parts, names = find_rows(Path(path), test_fraction, seed, needs_train)
    place = {name: np.array(i, np.int64) for i, name in enumerate(names)}
    train, test = (
        [LabeledMesh(row.name, load_mesh(row.path, cache_dir), place[row.label]) for row in part] for part in parts
    )
    return LabeledMeshes(train, test, names, "meshes")


def find_rows(
    root: Path, test_fraction: float, seed: int, needs_train: bool
) -> tuple[tuple[list[Row], list[Row]], list[str]]:
    """The meshes for training and for testing, and the names of the classes, see `load_classes`. No mesh is read."""
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction should be between 0 and 1, got {test_fraction}")
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    table = root if root.is_file() else root / TABLE
    rows = _read_table(table) if table.is_file() else _read_folders(root)
    names = sorted({row.label for row in rows})
    if needs_train:
        rows = _checked(root, rows, names, test_fraction, seed)
    train = [row for row in rows if row.split == "train" and needs_train]
    test = [row for row in rows if row.split != "train"]
    if not test:
        raise DataError(f"{root}: there are no test meshes")
    return (train, test), names


def _checked(root: Path, rows: list[Row], names: Sequence[str], test_fraction: float, seed: int) -> list[Row]:
    """All rows with a split. Raises DataError for a single class, and for a class without a training or test mesh."""
    if len(names) < 2:
        raise DataError(f"{root}: {names[0]!r} is the only class; classification needs at least 2")
    if not rows[0].split:
        rows = _split(root, rows, names, test_fraction, seed)
    present = {(row.label, row.split) for row in rows}
    for name in names:
        for part in PARTS:
            if (name, part) not in present:
                raise DataError(f"{root}: class {name!r} has no {part} mesh")
    return rows


def _split(root: Path, rows: Sequence[Row], names: Sequence[str], test_fraction: float, seed: int) -> list[Row]:
    """A random part of each class is for testing. The meshes of a class decide, with the seed, which ones."""
    found, of_class = [], defaultdict(list)
    for row in rows:
        of_class[row.label].append(row)
    for number, name in enumerate(names):
        members = of_class[name]
        if len(members) < 2:
            raise DataError(
                f"{root}: class {name!r} has one mesh, {members[0].path}; training and testing need at least 2"
            )
        tests = min(max(round(len(members) * test_fraction), 1), len(members) - 1)
        chosen = set(np.random.default_rng([seed, number]).permutation(len(members))[:tests].tolist())
        found += [row._replace(split="test" if i in chosen else "train") for i, row in enumerate(members)]
    return found


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _read_folders(root: Path) -> list[Row]:
    classes = _folders_in(root)
    if not classes:
        raise DataError(f"{root}: no classes found; expected one folder of meshes per class, or a table {TABLE}")
    _warn_of_strays(root)
    if {folder.name for folder in classes} <= set(PARTS):
        for part in classes:
            _warn_of_strays(part)
        return [row for part in classes for row in _parted_above(part)]
    rows: list[Row] = []
    for folder in classes:
        parts = [name for name in PARTS if (folder / name).is_dir()]
        places = [(folder / name, name) for name in parts] or [(folder, "")]
        if parts:
            _warn_of_strays(folder)
        for place, split in places:
            rows += _class_rows(folder.name, place, split)
            if bool(split) != bool(rows[0].split):
                with_split, without = (place.parent, root / rows[0].label) if split else (root / rows[0].label, place)
                raise DataError(
                    f"{with_split} has train/ or test/, and {without} has none: a set can have only one kind"
                )
    return rows


def _warn_of_strays(folder: Path) -> None:
    """Warn of meshes in a folder in which the subfolders have the meshes of the set."""
    strays = [mesh.name for mesh in meshes_in(folder)]
    if strays:
        # The warning points at the call of `load_classes`.
        warnings.warn(f"{folder}: the meshes of the set are in subfolders; ignored: {listing(strays)}", stacklevel=5)


def _parted_above(part: Path) -> list[Row]:
    """The meshes of `train/CLASS/*` or `test/CLASS/*`."""
    classes = _folders_in(part)
    if not classes:
        raise DataError(f"{part}: no classes found; expected one folder of meshes per class")
    return [row for folder in classes for row in _class_rows(folder.name, folder, part.name)]


def _class_rows(label: str, folder: Path, split: str) -> list[Row]:
    meshes = meshes_in(folder)
    if not meshes:
        raise DataError(f"{folder}: no meshes ({', '.join(FORMATS)}, also with .gz) in this class")
    return [Row(f"{label}/{mesh_stem(mesh)}", mesh, as_text(label), split) for mesh in meshes]


def _read_table(table: Path) -> list[Row]:
    lines = read_table(table, "file,label")
    if lines and [cell.lower() for cell in lines[0][1]] in (["file", "label"], ["file", "label", "split"]):
        lines = lines[1:]
    if not lines:
        raise DataError(f"{table}: there are no meshes in the table")
    meshes = TableMeshes(table)
    return [_table_row(table, meshes, number, cells) for number, cells in lines]


def _table_row(table: Path, meshes: TableMeshes, number: int, cells: list[str]) -> Row:
    if len(cells) not in (2, 3) or not cells[0] or not cells[1]:
        raise DataError(
            f"{table}, line {number}: expected file,label or file,label,split; got {','.join(cells)[:80]!r}"
        )
    file, label, split = (*cells, "")[:3]
    path = meshes.path(number, file)
    meshes.check_split(number, split)
    return Row(file, path, label, split)
