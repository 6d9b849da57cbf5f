"""The files of labeled data sets, in the layouts in which they are published."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from diffnet.data.feature_names import AUTO_LABELS, FILE_PREFIX, LABEL_SOURCES
from diffnet.data.folders.division import BY_LISTS, Division, Rule, divided, find_parts, has_set, part_folders
from diffnet.data.folders.files import (
    MESH_FOLDERS,
    NAMES,
    counts_train,
    label_files,
    mesh_names,
    meshes_below,
    meshes_in,
    pair_beside,
    pair_labels,
)
from diffnet.data.folders.index import ValueFacts
from diffnet.data.folders.labels import Classes, number_classes
from diffnet.data.folders.rows import find_label_rows
from diffnet.data.folders.sources import find_values, read_source
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.data.numbers import read_lines
from diffnet.geometry import FORMATS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

Layout: TypeAlias = Literal["auto", "rna", "meshcnn", "princeton", "coseg", "folder", "teeth"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# The sets that come with diffnet: 8 labeled parts of bodies at the faces, and bodies in pairs with template vertices.
BODIES = Path(__file__).parents[1] / "builtin" / "bodies"
BODY_MAPS = BODIES.with_name("body_maps")

_LABELS = (".txt", ".npy", ".seg", ".csv", ".json", ".label.gii")
_LABELED: dict[Layout, LabelsAt] = {"rna": "vertices", "meshcnn": "edges", "princeton": "faces", "coseg": "faces"}
_PLACES: dict[Layout, tuple[str | None, str]] = {  # of label files, and their extension; None is beside the mesh
    "rna": ("labels", ".txt"),
    "meshcnn": ("seg", ".eseg"),
    "coseg": ("gt", ".seg"),
    "teeth": (None, ".json"),
}
_PDB_CHAIN = re.compile(r"[0-9][A-Za-z0-9]{3}_[A-Za-z0-9]+\.off(\.gz)?")


class SetFiles(NamedTuple):
    """The files of a data set, found without reading labels or meshes.

    layout: the layout, which is not "auto"
    parts: the meshes of each part that is needed
    names: of these meshes
    labels: the label files of the meshes, behind those of other meshes that tell the classes
    at: the elements that are labeled, or None if the files decide
    to_classes: numbers the classes
    """

    layout: Layout
    parts: Division[Path]
    names: list[str]
    labels: list[Path]
    at: LabelsAt | None
    to_classes: Callable[[Mapping[Path, ValueFacts]], Classes]


def find_files(root: Path, layout: Layout, rule: Rule, source: str = AUTO_LABELS) -> SetFiles:
    """The files of the data set in a folder, see `load_dataset`. Raises DataError. source: of the labels"""
    if layout not in LAYOUTS:
        raise DataError(f"layout should be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if mesh_suffix(root) in (".csv", ".tsv") and root.is_file() and layout in ("auto", "folder"):
        return _table_files(root, rule, source)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    if layout == "auto":
        layout = "folder" if rule.files or source != AUTO_LABELS else _detect(root, rule.needs_train)
    if rule.files and layout not in ("princeton", "folder"):
        raise DataError(f"{root}: files is {rule.files!r}, but the layout {layout} tells the files; use folder")
    if source not in LABEL_SOURCES and not source.startswith(FILE_PREFIX):
        sources = ", ".join(LABEL_SOURCES)
        raise DataError(f"{root}: labels is {source!r}, but labels at elements are {sources} or file:NAME")
    if source != AUTO_LABELS and layout != "folder":
        raise DataError(f"{root}: labels is {source!r}, but the layout {layout} tells the labels; use folder")
    train = counts_train(root, rule.needs_train)
    at = _LABELED.get(layout)
    to_classes: Callable[[Mapping[Path, ValueFacts]], Classes] = partial(number_classes, names_file=root / NAMES)
    strays: tuple[str, ...] = ()
    if layout == "rna":
        train, to_classes = rule.needs_train, _rna_classes  # the classes are always the same
    if layout in ("rna", "coseg"):
        parts = divided(root, meshes_in(root / ("off" if layout == "rna" else "shapes"), (".off",)), rule)
        if layout == "rna" and not parts.source.startswith(BY_LISTS):
            raise DataError(f"{root}: the layout rna needs train.txt and test.txt")
    elif layout == "meshcnn":
        parts = find_parts(root, rule, partial(meshes_in, formats=(".obj",)))
    else:
        parts = find_parts(root, rule, meshes_below if layout == "teeth" else None)
    wanted = parts.every if train else parts.parts["test"]
    if source.startswith(FILE_PREFIX):
        labels = [find_values(mesh, source.removeprefix(FILE_PREFIX)) for mesh in wanted]
    elif source != AUTO_LABELS:
        labels = wanted
    elif layout in ("princeton", "folder"):
        subfolder, suffixes = ("seg", (".seg",)) if layout == "princeton" else ("labels", _LABELS)
        labels, strays = pair_beside(root, parts.every, wanted, subfolder, suffixes, layout == "folder")
    else:
        place, suffix = _PLACES[layout]
        labels = pair_labels(wanted, root / place if place else None, (suffix,))
    if rule.without:  # also of further meshes
        labels = [file for file in labels if os.path.join(os.getcwd(), file) not in rule.without]
    parts = replace(parts, left_out=(*parts.left_out, *strays))
    parts = parts if rule.needs_train else parts.of_test()
    by_folder = layout in ("princeton", "folder")
    names = mesh_names(root, parts.every) if by_folder else list(map(mesh_stem, parts.every))
    return SetFiles(layout, parts, names, labels, at, to_classes)


def _table_files(table: Path, rule: Rule, source: str) -> SetFiles:
    """The files of a set in a table, with label files in the column `labels` or `source`, or as in a folder."""
    is_elsewhere = source.startswith(FILE_PREFIX) or source in LABEL_SOURCES[1:]
    columns = [] if is_elsewhere else ["labels" if source == AUTO_LABELS else source]
    rows = find_label_rows(table, rule, columns)
    labels = [table.parent / row.cells[0] if columns else row.path for row in rows.every]
    if source.startswith(FILE_PREFIX):
        labels = [find_values(mesh, source.removeprefix(FILE_PREFIX)) for mesh in labels]
    names = [row.name for row in rows.every]
    to_classes = partial(number_classes, names_file=table.parent / NAMES)
    return SetFiles("folder", rows.of(lambda row: row.path), names, labels, None, to_classes)


def _detect(root: Path, needs_train: bool) -> Layout:
    told = part_folders(root)
    parts = {part for part, _ in told.values()}
    if "test" in parts and ("train" in parts or not needs_train) and label_files(root / "seg", (".eseg",)):
        return "meshcnn"
    if _is_rna(root, needs_train):
        return "rna"
    if meshes_in(root / "shapes", (".off",)) and label_files(root / "gt", (".seg",)):
        return "coseg"
    if any(label_files(folder, (".seg",)) for folder in (*(root / name for name in (*MESH_FOLDERS, "seg")), *told)):
        return "princeton"
    if has_set(root):
        return "folder"
    if below := meshes_below(root):
        return "teeth" if any(mesh.with_name(f"{mesh_stem(mesh)}.json").is_file() for mesh in below) else "folder"
    raise DataError(
        f"{root}: no data set found. Looked for train/, test/ and seg/*.eseg (meshcnn); off/, labels/, train.txt and "
        "test.txt (rna); shapes/*.off and gt/*.seg (coseg); *.seg (princeton); "
        f"and meshes, {', '.join(FORMATS)}, also with .gz, here or in subfolders (folder, or teeth with a .json file "
        "beside them). "
        "Folders of classes are for `diffnet train classification`"
    )


def _is_rna(root: Path, needs_train: bool) -> bool:
    """Decided by the listed names: other sets have the same folders, and small labels fit the range of RNA labels."""
    train = root / "train.txt"
    lists = [*([train] if needs_train or train.exists() else []), root / "test.txt"]
    if not ((root / "off").is_dir() and (root / "labels").is_dir() and all(file.is_file() for file in lists)):
        return False
    return all(_PDB_CHAIN.fullmatch(name) for file in lists for name in read_lines(file))


def _rna_classes(labels: Mapping[Path, ValueFacts]) -> Classes:
    for path, facts in labels.items():
        if facts.distinct and not -1 <= min(facts.distinct) <= max(facts.distinct) <= 258:
            values = read_source(path).values
            bad = np.flatnonzero((values < -1) | (values > 258))[0]
            raise DataError(f"{path}: label {values[bad]} of vertex {bad} is outside -1 … 258")
    numbers = list(range(-1, 259))
    return Classes([str(number) for number in numbers], numbers, {number: number + 1 for number in numbers})
