"""Labeled data sets on disk, in the layouts in which they are published."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from diffnet.data.folders.files import (
    MESH_FOLDERS,
    Parts,
    check_part,
    check_parts,
    find_parts,
    label_files,
    listed_meshes,
    meshes_in,
    pair_beside,
    pair_labels,
    parts_by_lists,
    scored_parts,
)
from diffnet.data.folders.labels import find_labels_at, number_classes, place_labels, read_labels, read_lines
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.geometry import FORMATS, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem

Layout: TypeAlias = Literal["auto", "rna", "meshcnn", "princeton", "folder"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_LABELS = (".txt", ".npy", ".seg")
_PDB_CHAIN = re.compile(r"[0-9][A-Za-z0-9]{3}_[A-Za-z0-9]+\.off(\.gz)?")

_Values: TypeAlias = list[NDArray[np.int64]]
_Folder: TypeAlias = "str | os.PathLike[str] | None"


def load_dataset(
    path: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    test_only: bool = False,
) -> LabeledMeshes:
    """Read all of a labeled data set from a folder in one of these layouts.

    "rna": RNA surfaces (Poulenard et al. 2019). Meshes are `off/NAME.off`. `labels/NAME.txt` holds an integer from -1
        to 258 per vertex. `train.txt` and `test.txt` list the meshes. There are always 260 classes: -1 is a class of
        its own, the first one.
    "meshcnn": segmentation sets of MeshCNN (Hanocka et al. 2019). Meshes are `train/*.obj` and `test/*.obj`.
        `seg/NAME.eseg` holds a label per edge. Soft labels (`sseg/`) are not read.
    "princeton": sets in the manner of the Princeton benchmark (Chen et al. 2009). `NAME.seg` holds a label per face. It
        is beside the mesh or in `seg/`.
    "folder": `NAME.txt`, `.npy` or `.seg` is beside the mesh or in `labels/`. The number of labels decides whether they
        are at vertices or at faces. If a mesh has as many faces as vertices, the other meshes decide.
    "auto": the first of these that fits:
        meshcnn, if there are `train/`, `test/` and `seg/*.eseg`;
        rna, if there are `off/`, `labels/`, `train.txt` and `test.txt`, and every listed name is a PDB chain such as
        `1K73_B.off`. Other sets with these folders are read as "folder", without the 260 classes;
        princeton, if a `.seg` file is in the folder or in its `seg/`, `off/`, `meshes/`, `train/` or `test/`;
        folder, if a mesh is in the folder or in its `off/`, `meshes/`, `train/` or `test/`.

    In "princeton" and "folder", meshes are files in `FORMATS`. The subfolders `train/` and `test/` divide them.
    Without these, the meshes are in the folder itself, else in `off/`, else in `meshes/`. Then `train.txt` and
    `test.txt` divide them, with one file name per line, and a mesh that is not listed is left out. Without these, a
    random share of `test_fraction`, drawn with `seed`, is the test part. It has at least one mesh.

    Except in "rna", labels are any integers. Negative ones are unlabeled. The others, sorted, become classes 0 … C-1.
    `label_names` are the lines of `label_names.txt` if it exists, else the integers. Labels of faces may be one per
    polygon of the source file, or one per triangle.

    Meshes keep the order of the lists, else they are sorted by name (`a2` before `a10`). Hidden files and the case of
    extensions are ignored. In every layout, meshes and labels may be compressed by gzip: `NAME.obj.gz` is found like
    `NAME.obj`.

    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    test_only: read only the test part, which needs no training part: the folder `test/`, else the meshes in `test.txt`,
        else all meshes. The training part is empty. Classes are those of the labels that are read.

    Returns meshes with labels (V,), (F,) or (E,) int64. Raises DataError for a folder, file or label that is missing,
    malformed or contradictory, naming the file; and MeshError for a mesh that can't be read.
    """
    root = Path(path)
    if layout not in LAYOUTS:
        raise DataError(f"layout should be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction should be between 0 and 1, got {test_fraction}")
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    if layout == "auto":
        layout = _detect(root, test_only)
    if layout == "rna":
        return _load_rna(root, cache_dir, test_only)
    if layout == "meshcnn":
        return _load_meshcnn(root, cache_dir, test_only)
    parts = scored_parts(root) if test_only else find_parts(root, test_fraction, seed)
    if layout == "princeton":
        return _load(parts, pair_beside(root, parts, "seg", (".seg",)), "faces", _numbered(root), cache_dir)
    return _load(parts, pair_beside(root, parts, "labels", _LABELS), None, _numbered(root), cache_dir)


def _detect(root: Path, test_only: bool) -> Layout:
    parted = (test_only or (root / "train").is_dir()) and (root / "test").is_dir()
    if parted and label_files(root / "seg", (".eseg",)):
        return "meshcnn"
    if _is_rna(root, test_only):
        return "rna"
    if any(label_files(root / name, (".seg",)) for name in (*MESH_FOLDERS, "seg", "train", "test")):
        return "princeton"
    if any(meshes_in(root / name) for name in (*MESH_FOLDERS, "train", "test")):
        return "folder"
    raise DataError(
        f"{root}: no data set found. Looked for train/, test/ and seg/*.eseg (meshcnn); off/, labels/, train.txt and "
        f"test.txt (rna); *.seg (princeton); and meshes, {', '.join(FORMATS)}, also with .gz, here or in off/, "
        "meshes/, train/ or test/ (folder). Folders of classes are for `diffnet train classification`"
    )


def _is_rna(root: Path, test_only: bool) -> bool:
    """Decided by the listed names: other sets have the same folders, and small labels fit the range of RNA labels."""
    lists = [root / "test.txt"] if test_only else [root / "train.txt", root / "test.txt"]
    if not ((root / "off").is_dir() and (root / "labels").is_dir() and all(file.is_file() for file in lists)):
        return False
    return all(_PDB_CHAIN.fullmatch(name) for file in lists for name in read_lines(file))


def _load_rna(root: Path, cache_dir: _Folder, test_only: bool) -> LabeledMeshes:
    def shift(values: _Values, files: list[Path]) -> tuple[_Values, list[str]]:
        for labels, file in zip(values, files, strict=True):
            bad = np.flatnonzero((labels < -1) | (labels > 258))
            if len(bad):
                raise DataError(f"{file}: label {labels[bad[0]]} of vertex {bad[0]} is outside -1 … 258")
        return [labels + 1 for labels in values], [str(value) for value in range(-1, 259)]

    meshes = meshes_in(root / "off", (".off",))
    if test_only:
        parts: Parts = [], listed_meshes(root / "test.txt", meshes, root / "off")
        check_part(root, "test", parts[1], {})
    else:
        parts = parts_by_lists(root, meshes, root / "off")
        check_parts(root, parts)
    label_files = [pair_labels(part, [root / "labels"], (".txt",)) for part in parts]
    return _load(parts, label_files, "vertices", shift, cache_dir)


def _load_meshcnn(root: Path, cache_dir: _Folder, test_only: bool) -> LabeledMeshes:
    tests = meshes_in(root / "test", (".obj",))
    if test_only:
        parts: Parts = [], tests
        check_part(root, "test", tests, {})
    else:
        parts = meshes_in(root / "train", (".obj",)), tests
        check_parts(root, parts)
    label_files = [pair_labels(part, [root / "seg"], (".eseg",)) for part in parts]
    return _load(parts, label_files, "edges", _numbered(root), cache_dir)


def _load(
    parts: Parts,
    label_files: Sequence[list[Path]],
    at: LabelsAt | None,
    to_classes: Callable[[_Values, list[Path]], tuple[_Values, list[str]]],
    cache_dir: _Folder,
) -> LabeledMeshes:
    """Read both parts. Labels come first: they load fast, so their faults show before minutes of reading meshes."""
    paths = [path for part in parts for path in part]
    files = [file for part in label_files for file in part]
    labels, names = to_classes([read_labels(file) for file in files], files)
    meshes = [load_mesh(path, cache_dir) for path in paths]
    if at is None:
        at = find_labels_at(meshes, [len(values) for values in labels], files)
    items = [
        LabeledMesh(mesh_stem(path), mesh, place_labels(mesh, values, at, file))
        for path, mesh, values, file in zip(paths, meshes, labels, files, strict=True)
    ]
    return LabeledMeshes(items[: len(parts[0])], items[len(parts[0]) :], names, at)


def _numbered(root: Path) -> Callable[[_Values, list[Path]], tuple[_Values, list[str]]]:
    return lambda values, _: number_classes(values, root / "label_names.txt")
