"""The files of a data set: which part a mesh belongs to, and which labels belong to a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from diffnet.data.folders.labels import read_lines
from diffnet.data.labeled import DataError
from diffnet.geometry import FORMATS
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

MESH_FOLDERS = (".", "off", "meshes")
_NOT_LABELS = ("train.txt", "test.txt", "label_names.txt", "readme.txt", "license.txt")

Parts: TypeAlias = tuple[list[Path], list[Path]]


def find_parts(root: Path, test_fraction: float, seed: int) -> Parts:
    """The meshes for training and for testing: by subfolders, else by lists, else at random. Raises DataError."""
    if _both_exist(root / "train", root / "test"):
        parts = meshes_in(root / "train"), meshes_in(root / "test")
    else:
        folder = next((root / name for name in MESH_FOLDERS if meshes_in(root / name)), root)
        meshes = meshes_in(folder)
        if _both_exist(root / "train.txt", root / "test.txt"):
            parts = parts_by_lists(root, meshes, folder)
        else:
            parts = _parts_at_random(root, meshes, test_fraction, seed)
    check_parts(root, parts)
    return parts


def scored_parts(root: Path) -> Parts:
    """The meshes to score, as the test part: `test/`, else those in `test.txt`, else all. Raises DataError."""
    if (root / "test").is_dir():
        tests = meshes_in(root / "test")
    else:
        folder = next((root / name for name in MESH_FOLDERS if meshes_in(root / name)), root)
        tests = meshes_in(folder)
        if (root / "test.txt").exists():
            tests = listed_meshes(root / "test.txt", tests, folder)
    check_part(root, "test", tests, {})
    return [], tests


def _both_exist(train: Path, test: Path) -> bool:
    if train.exists() != test.exists():
        present, absent = (train, test) if train.exists() else (test, train)
        raise DataError(f"{present.parent}: there is {present.name} but no {absent.name}")
    return train.exists()


def parts_by_lists(root: Path, meshes: list[Path], folder: Path) -> Parts:
    """The meshes listed in `train.txt` and `test.txt`, in that order. Raises DataError for a name without a mesh."""
    return listed_meshes(root / "train.txt", meshes, folder), listed_meshes(root / "test.txt", meshes, folder)


def listed_meshes(file: Path, meshes: list[Path], folder: Path) -> list[Path]:
    """The meshes that a file lists, in that order. Raises DataError for a name without a mesh."""
    known = {_key(mesh): mesh for mesh in meshes}
    names = read_lines(file)
    unknown = [name for name in names if _key(name) not in known]
    if unknown:
        raise DataError(f"{file}: no mesh in {folder} for {_some(unknown)}")
    return [known[_key(name)] for name in names]


def _key(name: str | Path) -> str:
    """A file name with its extension in lower case and without .gz. Lists often disagree with the files about these."""
    return mesh_stem(name) + mesh_suffix(name)


def _parts_at_random(root: Path, meshes: list[Path], test_fraction: float, seed: int) -> Parts:
    if len(meshes) < 2:
        raise DataError(
            f"{root}: {len(meshes)} meshes ({', '.join(FORMATS)}, also with .gz), training and testing need at least 2"
        )
    tests = min(max(round(len(meshes) * test_fraction), 1), len(meshes) - 1)
    chosen = set(np.random.default_rng(seed).permutation(len(meshes))[:tests].tolist())
    train = [mesh for i, mesh in enumerate(meshes) if i not in chosen]
    return train, [mesh for i, mesh in enumerate(meshes) if i in chosen]


def check_parts(root: Path, parts: Parts) -> None:
    """Raises DataError for an empty part, and for a mesh name that occurs twice, which would share one label file."""
    seen: dict[str, str] = {}
    for name, meshes in zip(("train", "test"), parts, strict=True):
        check_part(root, name, meshes, seen)


def check_part(root: Path, name: str, meshes: list[Path], seen: dict[str, str]) -> None:
    """`check_parts` of one part. `seen` holds the places of mesh names, and gets those of this part."""
    if not meshes:
        raise DataError(f"{root}: no meshes in {name}")
    for mesh in meshes:
        place = f"{mesh} in {name}"
        stem = mesh_stem(mesh)
        if stem in seen:
            raise DataError(f"{root}: {stem!r} occurs twice, as {seen[stem]} and as {place}")
        seen[stem] = place


def pair_beside(root: Path, parts: Parts, subfolder: str, suffixes: tuple[str, ...]) -> list[list[Path]]:
    """The label files of both parts, beside the meshes or in a subfolder. Raises DataError if labels have no mesh."""
    places = [list(dict.fromkeys([m[0].parent, m[0].parent / subfolder, root / subfolder])) if m else [] for m in parts]
    paired = [pair_labels(meshes, folders, suffixes) for meshes, folders in zip(parts, places, strict=True)]
    stems = {mesh_stem(mesh) for meshes in parts if meshes for mesh in meshes_in(meshes[0].parent)}
    labels = {file: None for folders in places for folder in folders for file in label_files(folder, suffixes)}
    orphans = [str(file.relative_to(root)) for file in labels if mesh_stem(file) not in stems]
    if orphans:
        raise DataError(f"{root}: labels without a mesh: {_some(orphans)}")
    return paired


def pair_labels(meshes: list[Path], folders: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """The label file of each mesh. Raises DataError if a mesh has none or several."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for file in label_files(folder, suffixes):
            found.setdefault(mesh_stem(file), []).append(file)
    missing = [mesh.name for mesh in meshes if mesh_stem(mesh) not in found]
    if missing:
        places = ", ".join(str(folder) for folder in folders)
        raise DataError(
            f"{meshes[0].parent}: no labels ({', '.join(suffixes)}) for {_some(missing)}, looked in {places}"
        )
    for mesh in meshes:
        if len(found[mesh_stem(mesh)]) > 1:
            raise DataError(f"{mesh}: more than one label file: {_some(map(str, found[mesh_stem(mesh)]))}")
    return [found[mesh_stem(mesh)][0] for mesh in meshes]


def label_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The label files of a folder with these extensions, also with .gz, sorted by name."""
    files = [file for file in files_in(folder, (*suffixes, ".gz")) if mesh_suffix(file) in suffixes]
    return [file for file in files if _key(file.name).lower() not in _NOT_LABELS]


def meshes_in(folder: Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """The visible meshes of a folder, also with .gz, sorted by name. Empty if the folder does not exist.

    Raises DataError if a mesh is there both with and without .gz.
    """
    meshes = [file for file in files_in(folder, (*formats, ".gz")) if mesh_suffix(file) in formats]
    seen: dict[str, Path] = {}
    for mesh in meshes:
        if (other := seen.setdefault(_key(mesh), mesh)) is not mesh:
            raise DataError(f"{folder}: {other.name} and {mesh.name} are the same mesh. Remove one of them")
    return meshes


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The visible files of a folder with these extensions, sorted by name. Empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.name[0] != ".")
    return sorted((file for file in files if file.is_file()), key=lambda file: (_natural(file.name), file.name))


def _natural(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part.lower() for i, part in enumerate(re.split("([0-9]+)", name))]


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
