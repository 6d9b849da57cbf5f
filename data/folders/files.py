"""The files of a data set: the meshes in its folders, and which labels belong to a mesh."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from diffnet.data.folders.sources import PART_LIST, PROPERTIES, holds_labels
from diffnet.data.labeled import DataError
from diffnet.data.numbers import is_label_table
from diffnet.geometry import FORMATS
from diffnet.geometry.errors import raised_as
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

MESH_FOLDERS = (".", "off", "meshes")
NAMES = "label_names.txt"
Part: TypeAlias = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
_TOLD = "train training trainset", "val valid validation valset dev", "test testing testset"
_PART_OF: dict[str, Part] = {word: part for part, words in zip(PARTS, _TOLD, strict=True) for word in words.split()}
_WORD = re.compile("(?<![0-9])(?:[A-Z]?[a-z]+|[A-Z]+(?![a-z]))|[0-9]+")
_DIGITS = re.compile("([0-9]+)")
_NOT_LABELS = ("train.txt", "test.txt", NAMES, "readme.txt", "license.txt")


def part_of(name: str) -> tuple[Part, str] | None:
    """The part that a word in a name tells, and the other words. None if the name tells none or several.

    >>> part_of("training_upper"), part_of("SMALTest"), part_of("latest"), part_of("train_test_split")
    (('train', 'upper'), ('test', 'smal'), None, None)
    """
    words = [word.lower() for word in _WORD.findall(name)]
    told = [_PART_OF[word] for word in words if word in _PART_OF]
    return (told[0], "_".join(word for word in words if word not in _PART_OF)) if len(told) == 1 else None


def counts_train(root: Path, needs_train: bool) -> bool:
    """Whether labels of the training part matter. `label_names.txt` may name the distinct values of the whole set."""
    return needs_train or (root / NAMES).is_file()


def file_key(name: str | Path) -> str:
    """A file name with its extension in lower case and without .gz. Lists often disagree with the files about these."""
    return mesh_stem(name) + mesh_suffix(name)


def pair_beside(
    root: Path, meshes: list[Path], wanted: list[Path], subfolder: str, suffixes: tuple[str, ...], in_meshes: bool
) -> tuple[list[Path], tuple[str, ...]]:
    """The label files of meshes, beside the meshes or in a subfolder, and what is left out, such as notes.

    wanted: those of the meshes that need labels
    in_meshes: if no mesh has a label file, return the meshes, which hold their labels themselves

    Raises DataError if labels have no mesh.
    """
    folders = dict.fromkeys(map(os.path.dirname, meshes))
    stems = {mesh_stem(mesh) for folder in folders for mesh in _names_in(Path(folder), FORMATS)}
    places = {folder: _places_of_labels(root, Path(folder), subfolder) for folder in folders}
    files = {place: _by_stem(place, suffixes, stems) for place in dict.fromkeys(chain(*places.values()))}
    inside = in_meshes and not any(stem in stems for files in files.values() for stem in files)
    if inside and (not wanted or not _near(wanted[0], files, suffixes) or holds_labels(wanted[0])):
        return wanted, ()
    paired = _paired(wanted, places, files, suffixes)
    strange = [files[stem] for files in files.values() for stem in files if stem not in stems]
    orphans = [file for files in strange for file in files if _may_hold_labels(file, stems)]
    lost = [str(file.relative_to(root)) for file in orphans if holds_labels(file)]
    if lost:
        raise DataError(f"{root}: labels without a mesh: {listing(lost)}. Add the mesh, or move these files elsewhere")
    names = listing(str(file.relative_to(root)) for file in orphans)
    return paired, (f"files without labels and without a mesh: {names}",) if orphans else ()


def _places_of_labels(root: Path, folder: Path, subfolder: str) -> list[Path]:
    """Where the label files of the meshes in a folder of a set may be."""
    mirrored = root / subfolder / folder.relative_to(root)
    places = [folder, folder / subfolder, root / subfolder, *([mirrored] if mirrored.is_dir() else [])]
    return [*dict.fromkeys(places)]


def _may_hold_labels(file: Path, stems: set[str]) -> bool:
    """False for JSON files, lists of meshes, and own arrays of a mesh, such as `MESH.NAME.npy`."""
    suffix, stem = mesh_suffix(file), mesh_stem(file)
    is_array = suffix in (".npy", ".csv") and stem.rpartition(".")[0] in stems
    return suffix != ".json" and not is_array and part_of(stem) is None


def pair_labels(meshes: list[Path], place: Path | None, suffixes: tuple[str, ...]) -> list[Path]:
    """The label file of each mesh, in a folder, or beside the mesh. Raises DataError if a mesh has none or several.

    A JSON file beside another label file is ignored, because it often describes the mesh.
    """
    stems = set(map(mesh_stem, meshes))
    places = {folder: [place or Path(folder)] for folder in map(os.path.dirname, meshes)}
    files = {path: _by_stem(path, suffixes, stems) for path in dict.fromkeys(chain(*places.values()))}
    return _paired(meshes, places, files, suffixes)


_ByStem: TypeAlias = dict[str, list[Path]]  # label files by the stem of the mesh that they belong to


def _by_stem(folder: Path, suffixes: tuple[str, ...], stems: set[str]) -> _ByStem:
    """The label files of a folder. stems: those of all meshes

    `NAME_labels.txt` and `NAME.labels.ply` belong to NAME, and `labels.txt` to the only mesh of its folder.
    """
    files: _ByStem = {}
    meshes = files_in(folder, FORMATS)
    labeled = {file: stem for file in meshes if (stem := labeled_stem(file.name, stems))}
    beside = {mesh_stem(mesh) for mesh in meshes if mesh not in labeled}
    for file in (*label_files(folder, suffixes), *labeled):
        stem = labeled.get(file, mesh_stem(file))
        if stem in PROPERTIES and stem not in stems and len(beside) == 1:
            stem = next(iter(beside))
        if stem not in stems and stem.endswith(PART_LIST) and mesh_suffix(file) == ".txt":
            stem = stem[: -len(PART_LIST)]
        files.setdefault(stem, []).append(file)
    return files


def _paired(
    meshes: list[Path], places: dict[str, list[Path]], labels: dict[Path, _ByStem], suffixes: tuple[str, ...]
) -> list[Path]:
    """See `pair_labels`. places: for each folder of meshes, those of label files. labels: the files there"""
    paired, missing = [], []
    for mesh in meshes:
        stem = mesh_stem(mesh)
        files = [file for place in places[os.path.dirname(mesh)] for file in labels[place].get(stem, ())]
        if len(files) > 1:
            files = [file for file in files if mesh_suffix(file) != ".json"] or files
        if len(files) > 1:
            raise DataError(f"{mesh}: more than one label file: {listing(map(str, files))}")
        paired += files
        missing += [] if files else [mesh]
    if missing:
        folder = os.path.dirname(missing[0])
        names, looked = listing(mesh.name for mesh in missing), ", ".join(map(str, places[folder]))
        near = _near(missing[0], places[folder], suffixes)
        message = f"{folder}: no labels ({', '.join(suffixes)}) for {names}, looked in {looked}{near}"
        raise DataError(message).about({mesh: f"{mesh}: no labels ({', '.join(suffixes)})" for mesh in missing})
    return paired


def _near(mesh: Path, folders: Iterable[Path], suffixes: tuple[str, ...]) -> str:
    """What to say of a file that may hold the labels of a mesh, but isn't called so. Empty if there is none."""
    stem = mesh_stem(mesh)
    for file in (file for folder in folders for file in files_in(folder, suffixes)):
        name = mesh_stem(file)
        if name == stem and mesh_suffix(file) == ".csv":
            return f". There is {file}, but it has neither a column called label nor whole numbers alone"
        if name.startswith(stem) and name[len(stem) :][:1] in {*"_-. "}:
            return f". There is {file}, but the labels of {mesh.name} should be in {stem}{mesh_suffix(file)}"
    return ""


def folders_in(folder: Path) -> list[Path]:
    """The visible subfolders, sorted. Empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:  # sets have many files, so this makes no Path of each
        return [folder / name for name in sorted(e.name for e in entries if e.name[0] != "." and e.is_dir())]


def folders_below(root: Path) -> list[Path]:
    """The visible subfolders of any depth, each once, sorted. Links are followed, but not to folders above."""
    top, below = root.resolve(), dict[Path, Path]()
    for folder, names, _ in os.walk(root, followlinks=True):
        places = [Path(folder, name) for name in sorted(names) if name[0] != "."]
        targets = {place.resolve(): place for place in places}
        new = {real: place for real, place in targets.items() if real not in below and not top.is_relative_to(real)}
        names[:] = [place.name for place in new.values()]  # those that `walk` enters
        below |= new
    return sorted(below.values())


def meshes_below(root: Path) -> list[Path]:
    """The visible meshes in visible subfolders of any depth, sorted by folder and name."""
    return [mesh for folder in folders_below(root) for mesh in meshes_in(folder)]


def meshes_matching(root: Path, pattern: str) -> list[Path]:
    """The meshes of a folder whose paths below it match a pattern such as `sub-*/surf/lh.pial`, in natural order.

    Raises DataError for a pattern that isn't relative, or that no mesh matches.
    """
    place = f"{root}: files should be a pattern such as 'sub-*/surf/lh.pial', got {pattern!r}"
    with raised_as(DataError, place, ValueError, NotImplementedError):
        files = [path for path in root.glob(pattern) if mesh_suffix(path) in FORMATS and path.is_file()]
    if not files:
        raise DataError(f"{root}: no mesh ({', '.join(FORMATS)}, also with .gz) matches {pattern!r}")
    return sorted(files, key=lambda path: natural(str(path)))


def meshes_by(root: Path, pattern: str | None) -> Callable[[Path], list[Path]]:
    """A function of folders of a set that gives their meshes.

    With a pattern, these are the meshes that match it. Else they are in the folder, or in its subfolders if the folder
    has none.
    """
    if pattern is None:
        return lambda folder: meshes_in(folder) or meshes_below(folder)
    every = meshes_matching(root, pattern)
    return lambda folder: [mesh for mesh in every if str(mesh).startswith(f"{folder}{os.sep}") or folder == Path()]


def mesh_names(root: Path, meshes: Iterable[Path]) -> list[str]:
    """The names of the meshes of a set: those of their files, behind their folders if they are in further folders.

    MESH_FOLDERS and folders whose names tell a part don't count as further ones.
    """
    prefixes: dict[str, str] = {}
    for folder in dict.fromkeys(map(os.path.dirname, meshes := list(meshes))):
        inside = Path(folder).relative_to(root).parts
        is_plain = not inside or (len(inside) == 1 and (inside[0] in MESH_FOLDERS or part_of(inside[0])))
        prefixes[folder] = "" if is_plain else f"{'/'.join(inside)}/"
    return [prefixes[os.path.dirname(mesh)] + mesh_stem(mesh) for mesh in meshes]


def label_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The label files of a folder, see `files_in`. Lists, notes and other tables are left out."""
    files = files_in(folder, suffixes, _NOT_LABELS)
    return [file for file in files if mesh_suffix(file) != ".csv" or is_label_table(file)]


def files_of_parts(folder: Path, suffixes: tuple[str, ...]) -> dict[Path, tuple[Part, str]]:
    """The `files_in` a folder whose names tell a part, and what they tell."""
    told = {name: part_of(mesh_stem(name)) for name in _names_in(folder, suffixes)}
    return {folder / name: part for name, part in sorted(told.items()) if part}


def meshes_in(folder: Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """The visible meshes of a folder, also with .gz, sorted by name. Empty if the folder does not exist.

    Meshes that hold the labels of others, such as `scene.labels.ply` beside `scene.ply`, are left out.

    Raises DataError if a mesh is there both with and without .gz.
    """
    seen: dict[str, Path] = {}
    files = files_in(folder, formats)
    stems = {mesh_stem(mesh) for mesh in files}
    for mesh in files:
        if labeled_stem(mesh.name, stems):
            continue
        if (other := seen.setdefault(file_key(mesh), mesh)) is not mesh:
            raise DataError(f"{folder}: {other.name} and {mesh.name} are the same mesh. Remove one of them")
    return [*seen.values()]


def labeled_stem(name: str, stems: Collection[str]) -> str | None:
    """The stem of the mesh whose labels a mesh file such as `scene.labels.ply` holds (ScanNet, Dai et al. 2017)."""
    stem, dot, word = mesh_stem(name).rpartition(".")
    return stem if dot and word == "labels" and stem in stems and mesh_suffix(name) in FORMATS else None


def has_meshes(folder: Path) -> bool:
    """Whether a folder has visible meshes, also with .gz."""
    return folder.is_dir() and any(_names_in(folder, FORMATS))


def files_in(folder: Path, suffixes: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Path]:
    """The visible files of a folder with these extensions, also with .gz, sorted by name.

    Empty if there is no such folder. without: names of files that are left out

    Raises DataError for a link to a file that is missing.
    """
    if not folder.is_dir():
        return []
    names = sorted(name for name in _names_in(folder, suffixes) if name.lower().removesuffix(".gz") not in without)
    return [folder / name for name in sorted(names, key=natural)]


def _names_in(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The names of `files_in`, in no order. Sets have many files, so this makes no Path of each."""
    endings = (*suffixes, *(f"{suffix}.gz" for suffix in suffixes))
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == "." or not entry.name.lower().endswith(endings):
                continue
            if entry.is_symlink() and not os.path.exists(entry):
                raise DataError(f"{folder / entry.name}: this link points to a file that is missing")
            if entry.is_file():
                yield entry.name


def natural(name: str) -> list[str | int]:
    """What sorts names in natural order: `a2` before `a10`."""
    parts: list[str | int] = [*_DIGITS.split(name.lower())]
    parts[1::2] = map(int, parts[1::2])
    return parts


def listing(names: Iterable[str], most: int = 5) -> str:
    """The first names, and the number of the others."""
    shown = list(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
