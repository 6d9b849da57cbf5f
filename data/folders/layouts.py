"""Labeled data sets on disk, in the layouts in which they are published."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from diffnet.data.conversion import with_labels_at
from diffnet.data.folders.agreement import warn_of_scattered_labels
from diffnet.data.folders.division import BY_LISTS, Division, Rule, divided, find_parts, has_set, part_folders
from diffnet.data.folders.files import (
    MESH_FOLDERS,
    NAMES,
    counts_train,
    label_files,
    meshes_below,
    meshes_in,
    pair_beside,
    pair_labels,
)
from diffnet.data.folders.labels import Classes, find_labels_at, number_classes, place_labels
from diffnet.data.folders.numbers import read_lines
from diffnet.data.folders.soft_labels import with_soft_labels
from diffnet.data.folders.sources import FileLabels, read_source
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.geometry import FORMATS, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem

Layout: TypeAlias = Literal["auto", "rna", "meshcnn", "princeton", "coseg", "folder", "teeth"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_LABELS = (".txt", ".npy", ".seg", ".csv", ".json")
_LABELED: dict[Layout, LabelsAt] = {"rna": "vertices", "meshcnn": "edges", "princeton": "faces", "coseg": "faces"}
_PLACES: dict[Layout, tuple[str, str]] = {
    "rna": ("labels", ".txt"),
    "meshcnn": ("seg", ".eseg"),
    "coseg": ("gt", ".seg"),
}
_PDB_CHAIN = re.compile(r"[0-9][A-Za-z0-9]{3}_[A-Za-z0-9]+\.off(\.gz)?")

_Folder: TypeAlias = "str | os.PathLike[str] | None"


def load_dataset(
    path: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    labels_at: LabelsAt | None = None,
) -> LabeledMeshes:
    """Read all of a labeled data set from a folder in one of these layouts.

    "rna": RNA surfaces (Poulenard et al. 2019). Meshes are `off/NAME.off`. `labels/NAME.txt` holds an integer from -1
        to 258 per vertex. `train.txt` and `test.txt` list the meshes. There are always 260 classes: -1 is a class of
        its own, the first one.
    "meshcnn": segmentation sets of MeshCNN (Hanocka et al. 2019). Meshes are `train/*.obj` and `test/*.obj`.
        `seg/NAME.eseg` holds a label per edge. If there is a folder `sseg/`, `NAME.seseg` holds the shares of
        the classes at each edge, and `accepted` of the test meshes says which are above 0.
    "princeton": sets in the manner of the Princeton benchmark (Chen et al. 2009). `NAME.seg` holds a label per face. It
        is beside the mesh or in `seg/`.
    "coseg": sets of COSEG (Wang et al. 2012). Meshes are `shapes/NAME.off`. `gt/NAME.seg` holds a label per face. The
        lists or chance divide them.
    "folder": labels are in a file beside the mesh or in `labels/`, in one of these forms:
        `NAME.txt`, `.npy` or `.seg` has a number for each vertex or each face, and so has `NAME.csv` in its first
        column, which is called label. The number of labels decides which. If a mesh has as many faces as vertices, the
        other meshes decide;
        `NAME_labels.txt` has, for each part, a line with its name and a line with the numbers of its faces, from 1.
        Faces in no part are unlabeled;
        `NAME.json` has a list "labels" with a number for each vertex.
        If no mesh has such a file, the meshes hold the labels: a property of the vertices or faces of a PLY file with
        whole numbers, named label, labels, class, class_id, category, segment, segmentation or part; else the colors of
        the vertices (PLY, OBJ, OFF) or of the faces (PLY). Each of at most 64 distinct colors is a class.
    "teeth": sets in the manner of Teeth3DS (Ben-Hamadou et al. 2022). Meshes are in subfolders of any depth, with
        `NAME.json` beside each, as in "folder".
    "auto": the first of these that fits:
        meshcnn, if there are `train/`, `test/` and `seg/*.eseg`;
        rna, if there are `off/`, `labels/`, `train.txt` and `test.txt`, and every listed name is a PDB chain such as
        `1K73_B.off`. Other sets with these folders are read as "folder", without the 260 classes;
        coseg, if there are `shapes/*.off` and `gt/*.seg`;
        princeton, if a `.seg` file is in the folder or in its `seg/`, `off/`, `meshes/`, `train/` or `test/`;
        folder, if a mesh is in the folder or in its `off/`, `meshes/`, `train/` or `test/`;
        teeth, if a mesh with a `.json` file beside it is in a subfolder.

    A folder or a URL of shards gives the set of `load_shards`, whose meshes are read when they are needed.

    In "princeton" and "folder", meshes are files in `FORMATS`. The subfolders `train/` and `test/` divide them, and
    `val/` holds meshes for validation. Without these, the meshes are in the folder itself, else in `off/`, else in
    `meshes/`. Then `train.txt` and `test.txt`, and `val.txt`, divide them, with a mesh in each line, and a mesh that is
    not listed is left out. Names may lack their extensions, and the id of a patient stands for all meshes whose names
    begin with it. Without lists, a random share of `test_fraction`, drawn with `seed`, is the test part. It has at
    least one mesh. "teeth" and "meshcnn" are divided in the same ways, and "coseg" by the lists or at random.

    Folders and lists may have more words in their names, such as `shapes_train/` or `training_upper.txt`. If there are
    several, such as those of upper and lower jaws, the ones without more words count, else all of them.

    Except in "rna", numbers are any integers. Negative ones are unlabeled. The others, sorted, become classes 0 … C-1.
    `label_names` are the lines of `label_names.txt` if it exists, else the integers. If there are more lines than
    distinct integers, line i names the integer i, from 0. Named parts become classes in the order of `label_names.txt`,
    else of their names. The lines for colors are such as `#ff0000 arm`. Labels of faces may be one per polygon of the
    source file, or one per triangle.

    Meshes keep the order of the lists, else they are sorted by name (`a2` before `a10`). Hidden files and the case of
    extensions are ignored. So are files without a mesh that hold no labels, such as notes, with a warning. In every
    layout, meshes and labels may be compressed by gzip: `NAME.obj.gz` is found like `NAME.obj`.

    group_by: a regular expression on the names of meshes. Its first group, or all that it matches, names the group of a
        mesh, and a random division leaves groups together. A name without a match is a group of its own.
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, as for an evaluation, the training part is empty. It may be missing: a folder with `test/` or
        `test.txt` alone. Without either, all meshes are the test part. Labels of the training part are read only if
        `label_names.txt` exists, because the names may count the values of the whole set.
    labels_at: convert the labels to "vertices", "edges" or "faces", see `diffnet.data.labels_at`. None leaves them.

    Warns if neighboring elements of a mesh have the same label hardly more often than by chance.

    Returns meshes with labels (V,), (F,) or (E,) int64. Raises DataError for a folder, file or label that is missing,
    malformed or contradictory, naming the file, for labels of the vertices of an STL file, which doesn't number them,
    and for a single class; and MeshError for a mesh that can't be read.
    """
    from diffnet.data.shards.reading import labeled_shards  # here, because --help loads this file and no PyTorch

    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards if labels_at is None else with_labels_at(shards, labels_at)
    root = Path(path)
    files = find_files(root, layout, Rule(test_fraction, seed, group_by, needs_train))
    data = _load(root, files, cache_dir, needs_train)
    if files.layout == "meshcnn" and (root / "sseg").is_dir():
        data = with_soft_labels(data, files.parts.parts["test"], root)
    if needs_train:
        check_classes(root, data.label_names)
    warn_of_scattered_labels(data, root)
    return data if labels_at is None else with_labels_at(data, labels_at)


class SetFiles(NamedTuple):
    """The files of a data set, found without reading labels or meshes.

    layout: the layout, which is not "auto"
    parts: the meshes of each part
    labels: the label files of each part
    at: the elements that are labeled, or None if the files decide
    to_classes: numbers the classes
    """

    layout: Layout
    parts: Division[Path]
    labels: list[list[Path]]
    at: LabelsAt | None
    to_classes: Callable[[Sequence[FileLabels]], Classes]


def find_files(root: Path, layout: Layout, rule: Rule) -> SetFiles:
    """The files of the data set in a folder, see `load_dataset`. Raises DataError.

    Without `needs_train`, the training part is there only if its labels are needed to number the classes.
    """
    if layout not in LAYOUTS:
        raise DataError(f"layout should be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    if layout == "auto":
        layout = _detect(root, rule.needs_train)
    train = counts_train(root, rule.needs_train)
    at = _LABELED.get(layout)
    to_classes: Callable[[Sequence[FileLabels]], Classes] = partial(number_classes, names_file=root / NAMES)
    strays: tuple[str, ...] = ()
    if layout == "rna":
        train, to_classes = rule.needs_train, _rna_classes  # the classes are always the same
    if layout in ("rna", "coseg"):
        folder = root / ("off" if layout == "rna" else "shapes")
        parts = divided(root, meshes_in(folder, (".off",)), folder, rule)
        if layout == "rna" and not parts.source.startswith(BY_LISTS):
            raise DataError(f"{root}: the layout rna needs train.txt and test.txt")
    elif layout == "meshcnn":
        parts = find_parts(root, rule, partial(meshes_in, formats=(".obj",)))
    else:
        parts = find_parts(root, rule, meshes_below if layout == "teeth" else meshes_in)
    if layout in ("princeton", "folder"):
        subfolder, suffixes = ("seg", (".seg",)) if layout == "princeton" else ("labels", _LABELS)
        files, strays = pair_beside(root, [*parts.parts.values()], subfolder, suffixes, layout == "folder", train)
    parts = parts if train else parts.of_test()
    if layout == "teeth":
        files = [_beside(part) for part in parts.parts.values()]
    elif layout in _PLACES:
        place, suffix = _PLACES[layout]
        files = [pair_labels(part, [root / place], (suffix,)) for part in parts.parts.values()]
    return SetFiles(layout, replace(parts, left_out=(*parts.left_out, *strays)), files, at, to_classes)


def check_classes(root: Path, names: Sequence[str]) -> None:
    """Raises DataError for a single class."""
    if len(names) == 1:
        raise DataError(
            f"{root}: {names[0]!r} is the only class; segmentation needs at least 2. A negative label means unlabeled"
        )


def _beside(meshes: list[Path]) -> list[Path]:
    """The `.json` file beside each mesh. Raises DataError for a mesh without one."""
    inside: dict[Path, list[Path]] = {}
    for mesh in meshes:
        inside.setdefault(mesh.parent, []).append(mesh)
    pairs = [zip(own, pair_labels(own, [folder], (".json",)), strict=True) for folder, own in inside.items()]
    found = dict(chain(*pairs))
    return [found[mesh] for mesh in meshes]


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
    if any(mesh.with_name(f"{mesh_stem(mesh)}.json").is_file() for mesh in meshes_below(root)):
        return "teeth"
    raise DataError(
        f"{root}: no data set found. Looked for train/, test/ and seg/*.eseg (meshcnn); off/, labels/, train.txt and "
        "test.txt (rna); shapes/*.off and gt/*.seg (coseg); *.seg (princeton); "
        f"and meshes, {', '.join(FORMATS)}, also with .gz, here or in off/, "
        "meshes/, train/ or test/ (folder), or in subfolders with a .json file beside them (teeth). "
        "Folders of classes are for `diffnet train classification`"
    )


def _is_rna(root: Path, needs_train: bool) -> bool:
    """Decided by the listed names: other sets have the same folders, and small labels fit the range of RNA labels."""
    train = root / "train.txt"
    lists = [*([train] if needs_train or train.exists() else []), root / "test.txt"]
    if not ((root / "off").is_dir() and (root / "labels").is_dir() and all(file.is_file() for file in lists)):
        return False
    return all(_PDB_CHAIN.fullmatch(name) for file in lists for name in read_lines(file))


def _rna_classes(labels: Sequence[FileLabels]) -> Classes:
    for file in labels:
        bad = np.flatnonzero((file.values < -1) | (file.values > 258))
        if len(bad):
            raise DataError(f"{file.path}: label {file.values[bad[0]]} of vertex {bad[0]} is outside -1 … 258")
    numbers = list(range(-1, 259))
    return [file.values + 1 for file in labels], [str(number) for number in numbers], numbers


def _load(root: Path, files: SetFiles, cache_dir: _Folder, needs_train: bool) -> LabeledMeshes:
    """Read the labels of both parts, and the meshes of the parts that are needed.

    Labels come first: they load fast, so their faults show before minutes of reading meshes.
    """
    parts, at = files.parts if needs_train else files.parts.of_test(), files.at
    sources = [read_source(file) for part in files.labels for file in part]
    labels, names, numbers = files.to_classes(sources)
    paths = parts.every
    sources, labels = sources[-len(paths) :], labels[-len(paths) :]
    meshes = [load_mesh(path, cache_dir) for path in paths]
    if at is None:
        at = find_labels_at(meshes, sources)
    items = [
        LabeledMesh(mesh_stem(path), mesh, place_labels(mesh, values, at, source))
        for path, mesh, values, source in zip(paths, meshes, labels, sources, strict=True)
    ]
    return LabeledMeshes(**parts.fields(items), label_names=names, labels_at=at, label_numbers=numbers)
