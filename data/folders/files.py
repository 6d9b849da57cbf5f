"""The files of a data set: which part a mesh belongs to, and which labels belong to a mesh."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np

from diffnet.data.counts import counted
from diffnet.data.folders.numbers import is_label_table, read_lines
from diffnet.data.folders.sources import PART_LIST, holds_labels
from diffnet.data.labeled import DataError
from diffnet.geometry import FORMATS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

MESH_FOLDERS = (".", "off", "meshes")
NAMES = "label_names.txt"
_DIGITS = re.compile("([0-9]+)")
_NOT_LABELS = tuple(
    name + packed for name in ("train.txt", "test.txt", NAMES, "readme.txt", "license.txt") for packed in ("", ".gz")
)

Parts: TypeAlias = tuple[list[Path], list[Path]]


def find_parts(root: Path, test_fraction: float, seed: int, needs_train: bool = True, min_tests: int = 1) -> Parts:
    """The meshes for training and for testing: by subfolders, else by lists, else at random. Raises DataError.

    needs_train: if not, the training part may be missing, and meshes that nothing divides are for testing
    min_tests: the smallest number of test meshes that are chosen at random, if as many are left for training
    """
    if _both_exist(root / "train", root / "test", needs_train):
        parts = meshes_in(root / "train"), meshes_in(root / "test")
        check_parts(root, parts, needs_train)
        return parts
    folder = next((root / name for name in MESH_FOLDERS if has_meshes(root / name)), root)
    return divided(root, meshes_in(folder), folder, test_fraction, seed, needs_train, min_tests)


def counts_train(root: Path, needs_train: bool) -> bool:
    """Whether labels of the training part matter. `label_names.txt` may name the distinct values of the whole set."""
    return needs_train or (root / NAMES).is_file()


def divided(
    root: Path,
    meshes: list[Path],
    folder: Path,
    test_fraction: float,
    seed: int,
    needs_train: bool = True,
    min_tests: int = 1,
) -> Parts:
    """The meshes for training and for testing, by the lists in `root`, else at random. See `find_parts`."""
    if _both_exist(root / "train.txt", root / "test.txt", needs_train):
        parts = parts_by_lists(root, meshes, folder, needs_train)
    elif needs_train:
        parts = parts_at_random(root, meshes, test_fraction, seed, min_tests)
    else:
        parts = [], meshes
    check_parts(root, parts, needs_train)
    return parts


def _both_exist(train: Path, test: Path, needs_train: bool) -> bool:
    if train.exists() != test.exists() and (needs_train or not test.exists()):
        present, absent = (train, test) if train.exists() else (test, train)
        raise DataError(f"{present.parent}: there is {present.name} but no {absent.name}")
    return test.exists()


def parts_by_lists(root: Path, meshes: list[Path], folder: Path, needs_train: bool = True) -> Parts:
    """The meshes listed in `train.txt` and `test.txt`, in that order. Names may lack their extensions.

    needs_train: if not, `train.txt` may be missing; it is read only if `counts_train`

    Raises DataError for a missing list and for a name without a mesh.
    """
    known = {mesh_stem(mesh): mesh for mesh in meshes} | {_key(mesh): mesh for mesh in meshes}

    def listed(file: Path) -> list[Path]:
        names = read_lines(file)
        found = [known.get(_key(name), known.get(name)) for name in names]
        unknown = [name for name, mesh in zip(names, found, strict=True) if mesh is None]
        if unknown:
            raise DataError(f"{file}: no mesh in {folder} for {listing(unknown)}")
        return [mesh for mesh in found if mesh is not None]

    train = root / "train.txt"
    wanted = needs_train or (train.exists() and counts_train(root, needs_train))
    return listed(train) if wanted else [], listed(root / "test.txt")


def _key(name: str | Path) -> str:
    """A file name with its extension in lower case and without .gz. Lists often disagree with the files about these."""
    return mesh_stem(name) + mesh_suffix(name)


def parts_at_random(root: Path, meshes: list[Path], test_fraction: float, seed: int, min_tests: int = 1) -> Parts:
    """A random share of the meshes for testing, and the others for training. Raises DataError.

    min_tests: see `find_parts`
    """
    if len(meshes) < 2:
        found = counted(len(meshes), "mesh", "meshes")
        raise DataError(f"{root}: {found} ({', '.join(FORMATS)}, also with .gz), training and testing need at least 2")
    at_least = min_tests if len(meshes) >= 2 * min_tests else 1
    tests = min(max(round(len(meshes) * test_fraction), at_least), len(meshes) - at_least)
    chosen = set(np.random.default_rng(seed).permutation(len(meshes))[:tests].tolist())
    train = [mesh for i, mesh in enumerate(meshes) if i not in chosen]
    return train, [mesh for i, mesh in enumerate(meshes) if i in chosen]


def check_parts(root: Path, parts: Parts, needs_train: bool = True) -> None:
    """Raises DataError for an empty part that is needed, and for a mesh name that occurs twice.

    Meshes of one name would share one label file.
    """
    seen: dict[str, tuple[Path, str]] = {}
    for name, meshes in zip(("train", "test"), parts, strict=True):
        if not meshes and (needs_train or name == "test"):
            raise DataError(f"{root}: no meshes in {name}")
        for mesh in meshes:
            stem = mesh_stem(mesh)
            if stem in seen:
                other, part = seen[stem]
                raise DataError(f"{root}: {stem!r} occurs twice, as {other} in {part} and as {mesh} in {name}")
            seen[stem] = mesh, name


def pair_beside(
    root: Path, parts: Parts, subfolder: str, suffixes: tuple[str, ...], in_meshes: bool = False, train: bool = True
) -> list[list[Path]]:
    """The label files of both parts, beside the meshes or in a subfolder. Raises DataError if labels have no mesh.

    Warns of files without a mesh that don't hold labels, such as notes.

    in_meshes: if no mesh has a label file, return the meshes, which hold their labels themselves
    train: whether the training part needs labels; if not, it gets none
    """
    places = [list(dict.fromkeys([m[0].parent, m[0].parent / subfolder, root / subfolder])) if m else [] for m in parts]
    stems = {mesh_stem(mesh) for meshes in parts if meshes for mesh in _mesh_names(meshes[0].parent)}
    found = {folder: _by_stem(folder, suffixes, stems) for folder in dict.fromkeys(chain(*places))}
    if in_meshes and not any(stem in stems for own in found.values() for stem in own):
        return [list(parts[0]) if train else [], list(parts[1])]
    wanted = zip(parts if train else ([], parts[1]), places, strict=True)
    paired = [_paired(meshes, {folder: found[folder] for folder in folders}, suffixes) for meshes, folders in wanted]
    strange = [own[stem] for own in found.values() for stem in own if stem not in stems]
    orphans = [file for files in strange for file in files if _may_hold_labels(file, stems)]
    lost = [str(file.relative_to(root)) for file in orphans if holds_labels(file)]
    if lost:
        raise DataError(f"{root}: labels without a mesh: {listing(lost)}. Add the mesh, or move these files elsewhere")
    if orphans:
        names = listing(str(file.relative_to(root)) for file in orphans)
        # The warning points at the call of `load_dataset`.
        warnings.warn(f"{root}: files without labels and without a mesh are ignored: {names}", stacklevel=4)
    return paired


def _may_hold_labels(file: Path, stems: set[str]) -> bool:
    """False for JSON files, and for own features of a mesh, `MESH.NAME.npy`."""
    suffix = mesh_suffix(file)
    return suffix != ".json" and not (suffix == ".npy" and mesh_stem(file).rpartition(".")[0] in stems)


def pair_labels(meshes: list[Path], folders: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """The label file of each mesh. Raises DataError if a mesh has none or several.

    A JSON file beside another label file is ignored, because it often describes the mesh.
    """
    stems = {mesh_stem(mesh) for mesh in meshes}
    return _paired(meshes, {folder: _by_stem(folder, suffixes, stems) for folder in folders}, suffixes)


_ByStem: TypeAlias = dict[str, list[Path]]  # label files by the stem of the mesh that they belong to


def _by_stem(folder: Path, suffixes: tuple[str, ...], stems: set[str]) -> _ByStem:
    """The label files of a folder. `NAME_labels.txt` belongs to NAME. stems: those of all meshes"""
    found: _ByStem = {}
    for file in label_files(folder, suffixes):
        stem = mesh_stem(file)
        if stem not in stems and stem.endswith(PART_LIST) and mesh_suffix(file) == ".txt":
            stem = stem[: -len(PART_LIST)]
        found.setdefault(stem, []).append(file)
    return found


def _paired(meshes: list[Path], found: dict[Path, _ByStem], suffixes: tuple[str, ...]) -> list[Path]:
    """See `pair_labels`. found: the label files of each folder"""
    paired, missing = [], []
    for mesh in meshes:
        stem = mesh_stem(mesh)
        files = [file for own in found.values() for file in own.get(stem, ())]
        if len(files) > 1:
            files = [file for file in files if mesh_suffix(file) != ".json"] or files
        if len(files) > 1:
            raise DataError(f"{mesh}: more than one label file: {listing(map(str, files))}")
        if files:
            paired.append(files[0])
        else:
            missing.append(mesh.name)
    if missing:
        places = ", ".join(map(str, found))
        raise DataError(
            f"{meshes[0].parent}: no labels ({', '.join(suffixes)}) for {listing(missing)}, looked in {places}"
        )
    return paired


def meshes_below(root: Path) -> list[Path]:
    """The visible meshes in visible subfolders of any depth, sorted by folder and name."""
    folders = (path for path in root.rglob("*") if path.is_dir())
    visible = [path for path in folders if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return [mesh for folder in sorted(visible) for mesh in meshes_in(folder)]


def label_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The label files of a folder with these extensions, also with .gz, sorted by name. Other tables are left out."""
    files = files_in(folder, _also_packed(suffixes), _NOT_LABELS)
    return [file for file in files if mesh_suffix(file) != ".csv" or is_label_table(file)]


def meshes_in(folder: Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """The visible meshes of a folder, also with .gz, sorted by name. Empty if the folder does not exist.

    Raises DataError if a mesh is there both with and without .gz.
    """
    meshes = files_in(folder, _also_packed(formats))
    seen: dict[str, Path] = {}
    for mesh in meshes:
        if (other := seen.setdefault(_key(mesh), mesh)) is not mesh:
            raise DataError(f"{folder}: {other.name} and {mesh.name} are the same mesh. Remove one of them")
    return meshes


def has_meshes(folder: Path) -> bool:
    """Whether a folder has visible meshes, also with .gz."""
    return folder.is_dir() and any(_mesh_names(folder))


def _mesh_names(folder: Path) -> Iterator[str]:
    return _names_in(folder, _also_packed(FORMATS))


def _also_packed(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return (*suffixes, *(f"{suffix}.gz" for suffix in suffixes))


def files_in(folder: Path, endings: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Path]:
    """The visible files of a folder whose names have these endings, sorted by name. Empty if there is no such folder.

    without: names of files that are left out

    Raises DataError for a link to a file that is missing.
    """
    if not folder.is_dir():
        return []
    names = sorted(name for name in _names_in(folder, endings) if name.lower() not in without)
    return [folder / name for name in sorted(names, key=_natural)]


def _names_in(folder: Path, endings: tuple[str, ...]) -> Iterator[str]:
    """The names of `files_in`, in no order. Sets have many files, so this makes no Path of each."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == "." or not entry.name.lower().endswith(endings):
                continue
            if entry.is_symlink() and not os.path.exists(entry):
                raise DataError(f"{folder / entry.name}: this link points to a file that is missing")
            if entry.is_file():
                yield entry.name


def _natural(name: str) -> list[str | int]:
    parts: list[str | int] = [*_DIGITS.split(name.lower())]
    parts[1::2] = map(int, parts[1::2])
    return parts


def listing(names: Iterable[str]) -> str:
    """At most five names, and the number of the others."""
    shown = list(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
