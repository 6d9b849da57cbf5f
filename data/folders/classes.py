"""Data sets for classification on disk: one label for each mesh."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from diffnet.data.counts import counted
from diffnet.data.folders.division import Division, Rule, divide, in_parts, part_folders
from diffnet.data.folders.files import Part, folders_in, has_meshes, listing, meshes_in
from diffnet.data.folders.tables import TableMeshes, read_table
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.shards.reading import labeled_shards
from diffnet.geometry import FORMATS, load_mesh
from diffnet.geometry.files import as_text
from diffnet.geometry.mesh.mesh import mesh_stem

TABLE = "labels.csv"  # the name of a table in a folder


class Row(NamedTuple):
    """One mesh of a set. split: its part, or None if that is not decided."""

    name: str
    path: Path
    label: str
    split: Part | None


def load_classes(
    path: str | os.PathLike[str],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
) -> LabeledMeshes:
    """Read all of a data set for classification, in one of these layouts.

    - `CLASS/train/*` and `CLASS/test/*`, or `train/CLASS/*` and `test/CLASS/*`: meshes in one folder per class.
    - `CLASS/*`: the same without a split.
    - Shards, see `load_shards`. Their meshes are read when they are needed.
    - A table, `labels.csv` in the folder or the path itself: lines `file,label` or `file,label,split`, where the split
      is train, val or test. Files are relative to the table. A first line `file,label` or `file,label,split` is a
      header.

    Folders of parts may have other names, and there may be one for validation, as in `load_dataset`. Without a split,
    the lists of `load_dataset` divide the meshes. Without these, a random share of `test_fraction` of each class, drawn
    with `seed`, is the test part. It has at least one mesh of each class. Classes are sorted by name. Meshes beside the
    folders of classes belong to no class. They are not read, and `left_out` of the set names them.

    group_by: see `load_dataset`
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, as for an evaluation, the training part is not read, and it and some classes may be missing.
        Without a split, all meshes are the test part.

    Returns meshes with labels () int64. Raises DataError for a folder, file or line that is missing or malformed,
    naming it; for a single class; for a class without a training or test mesh; and MeshError for a mesh that can't be
    read.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    found, names = find_rows(Path(path), Rule(test_fraction, seed, group_by, needs_train))
    place = {name: np.array(i, np.int64) for i, name in enumerate(names)}
    items = [LabeledMesh(row.name, load_mesh(row.path, cache_dir), place[row.label]) for row in found.every]
    return LabeledMeshes(**found.fields(items), label_names=names, labels_at="meshes")


def find_rows(root: Path, rule: Rule) -> tuple[Division[Row], list[str]]:
    """The meshes of each part, and the names of the classes, see `load_classes`. No mesh is read."""
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    table = root if root.is_file() else root / TABLE
    rows, source, strays = _read_table(table) if table.is_file() else _read_folders(root, rule.needs_train)
    names = sorted({row.label for row in rows})
    if rule.needs_train and len(names) < 2:
        raise DataError(f"{root}: {names[0]!r} is the only class; classification needs at least 2")
    if rows[0].split:
        found = Division(in_parts((row.split or "test", row) for row in rows), source)
    else:
        folder = root if root.is_dir() else root.parent
        kinds = [row.label for row in rows]
        numbers = divide(folder, [row.name for row in rows], [row.path for row in rows], rule, kinds=kinds)
        found = numbers.of(rows.__getitem__)
    for part in ("test", "train") if rule.needs_train else ():
        if missing := sorted(set(names) - {row.label for row in found.parts[part]}):
            meshes = counted(sum(row.label == missing[0] for row in rows), "mesh", "meshes")
            raise DataError(f"{root}: class {missing[0]!r} has no {part} mesh: it has {meshes}")
    if not found.parts["test"]:
        raise DataError(f"{root}: there are no test meshes")
    return replace(found if rule.needs_train else found.of_test(), left_out=(*found.left_out, *strays)), names


_Rows: TypeAlias = tuple[list[Row], str, list[str]]  # the meshes, what divides them, and what is left out


def _read_folders(root: Path, needs_train: bool) -> _Rows:
    classes = folders_in(root)
    if not classes:
        raise DataError(f"{root}: no classes found; expected one folder of meshes per class, or a table {TABLE}")
    strays = _strays(root)
    above = {folder: told[0] for folder, told in part_folders(root, _has_classes).items()}
    if above and ({"test"} | ({"train"} if needs_train else set()) <= {*above.values()} or len(above) == len(classes)):
        rows = [row for folder, part in above.items() for row in _parted_above(folder, part)]
        strays += [text for folder in above for text in _strays(folder)]
        others = [folder.name for folder in classes if folder not in above]
        strays += [f"folders beside {listing(f.name for f in above)}: {listing(others)}"] if others else []
        return rows, f"by the folders {listing(folder.name for folder in above)}", strays
    rows = []
    source = ""
    for folder in classes:
        parts: dict[Path, Part | None] = {place: told[0] for place, told in part_folders(folder).items()}
        if parts:
            strays += _strays(folder)
            source = source or f"by the folders {listing(place.name for place in parts)} of each class"
        for place, part in (parts or {folder: None}).items():
            rows += _class_rows(folder.name, place, part)
            if bool(part) != bool(rows[0].split):
                with_split, without = (place.parent, root / rows[0].label) if part else (root / rows[0].label, place)
                raise DataError(
                    f"{with_split} has train/ or test/, and {without} has none: a set can have only one kind"
                )
    return rows, source, strays


def _has_classes(folder: Path) -> bool:
    """Whether a folder has folders of meshes that aren't parts of it."""
    return any(map(has_meshes, folders_in(folder))) and not part_folders(folder)


def _strays(folder: Path) -> list[str]:
    """What to say of meshes in a folder in which the subfolders have the meshes of the set."""
    strays = [mesh.name for mesh in meshes_in(folder)]
    return [f"meshes in {folder}, whose subfolders have the meshes of the set: {listing(strays)}"] if strays else []


def _parted_above(folder: Path, part: Part) -> list[Row]:
    """The meshes of `train/CLASS/*` or `test/CLASS/*`."""
    classes = folders_in(folder)
    if not classes:
        raise DataError(f"{folder}: no classes found; expected one folder of meshes per class")
    return [row for own in classes for row in _class_rows(own.name, own, part)]


def _class_rows(label: str, folder: Path, part: Part | None) -> list[Row]:
    meshes = meshes_in(folder)
    if not meshes:
        raise DataError(f"{folder}: no meshes ({', '.join(FORMATS)}, also with .gz) in this class")
    return [Row(f"{label}/{mesh_stem(mesh)}", mesh, as_text(label), part) for mesh in meshes]


def _read_table(table: Path) -> _Rows:
    lines = read_table(table, "file,label")
    if lines and [cell.lower() for cell in lines[0][1]] in (["file", "label"], ["file", "label", "split"]):
        lines = lines[1:]
    if not lines:
        raise DataError(f"{table}: there are no meshes in the table")
    meshes = TableMeshes(table)
    return [_table_row(table, meshes, number, cells) for number, cells in lines], f"by the table {table.name}", []


def _table_row(table: Path, meshes: TableMeshes, number: int, cells: list[str]) -> Row:
    if len(cells) not in (2, 3) or not cells[0] or not cells[1]:
        raise DataError(
            f"{table}, line {number}: expected file,label or file,label,split; got {','.join(cells)[:80]!r}"
        )
    file, label, split = (*cells, "")[:3]
    return Row(file, meshes.path(number, file), label, meshes.part(number, split))
