"""The meshes that a command reads, and the files that `diffnet predict` writes for them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffnet.data.folders.files import folders_below, labeled_stem, meshes_matching
from diffnet.data.labeled import TargetsAt
from diffnet.data.places import places_of
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.content import VTK_FORMATS
from diffnet.geometry.mesh.mesh import FORMATS, mesh_stem, mesh_suffix
from diffnet.train.commands.many_files import REPORT_COLUMNS

if TYPE_CHECKING:
    from diffnet.train.ranks import Ranks


def find_meshes(paths: Sequence[Path], without: Path | None = None, pattern: str | None = None) -> list[Path]:
    """The given files, and the visible meshes in the given folders and in their visible subfolders. None comes twice.

    Meshes that hold the labels of others, such as `scene.labels.ply` beside `scene.ply`, are left out.

    without: a folder that is not searched if it is in one of these folders
    pattern: of the meshes in folders, by their paths there, see `meshes_matching`; or None for all

    Raises OptionError if there are none, and DataError if none matches.
    """
    left_out = None if without is None else _absolute(without)
    meshes: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            below = _meshes_below(path) if pattern is None else meshes_matching(path, pattern)
            if left_out is not None and _absolute(path) in left_out.parents:
                below = [p for p in below if left_out not in _absolute(p).parents]
            # A link to a missing file is kept, so that reading it gives the reason.
            files = sorted(p for p in below if p.is_file() or not p.exists())
        else:
            files = [path]
        for file in files:
            meshes.setdefault(_absolute(file), file)
    if not meshes:
        raise OptionError(f"no meshes ({', '.join(FORMATS)}, also with .gz) in {', '.join(map(str, paths))}")
    return list(meshes.values())


def _meshes_below(folder: Path) -> list[Path]:
    """The visible meshes in a folder and in its visible subfolders, in no order."""
    files = (path for place in (folder, *folders_below(folder)) for path in place.iterdir())
    every = [path for path in files if path.name[0] != "." and mesh_suffix(path) in FORMATS]
    stems = set(map(mesh_stem, every))
    return [p for p in every if labeled_stem(p.name, stems) is None]


def part_numbers(part: str) -> tuple[int, int]:
    """I and N of "I/N". Raises OptionError for another form, and for an I that is not from 1 to N."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f"--part should be I/N with I from 1 to N, such as 1/4, got {part!r}")
    return int(match[1]), int(match[2])


def files_of_first(ranks: Ranks, find: Callable[[], Sequence[Path]]) -> list[Path]:
    """The files that rank 0 finds. A network file system may not list the same files on all machines yet."""
    return [Path(name) for name in ranks.shared(lambda: list(map(str, find())))]


def part_of(files: list[Path], part: str | None) -> list[Path]:
    """The files of part I of N, for `part` "I/N", in their order. The parts have about the same number of bytes.

    They follow from names and sizes, so they are the same on all machines. A file that is missing counts as empty. All
    files are there without a part.

    Raises OptionError, see `part_numbers`.
    """
    from diffnet.data.samples import balanced_shares  # loads PyTorch

    if part is None:
        return files
    number, count = part_numbers(part)
    named = sorted(files, key=Path.as_posix)
    sizes = [max(file.stat().st_size, 1) if file.exists() else 1 for file in named]
    shares = balanced_shares(sizes, min(count, len(files)))  # further parts stay empty
    members = {named[i] for share in shares[number - 1 : number] for i in share}
    return [file for file in files if file in members]


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # without following links


def output_files(
    paths: Sequence[Path], meshes: Sequence[Path], out: Path, formats: Sequence[str], form: str | None, at: TargetsAt
) -> list[Path]:
    """The file to write for each mesh, or one table for all meshes.

    meshes: the result of `find_meshes` for the paths
    out, form: the options --out and --format
    formats: the possible extensions, the default first; none for a table. VTK files become .vtp files by default.

    In a folder, a file keeps its path below the folder that all paths have in common. Meshes whose results would have
    the same name, such as a.ply and a.obj, keep their extensions: a.ply.txt and a.obj.txt.

    Raises OptionError for an option that doesn't fit.
    """
    if not formats:
        if out.suffix.lower() != ".csv" or out.is_dir():
            raise OptionError(f"--out should be a .csv file, because the network predicts whole meshes; got {out}")
        if form is not None:
            raise OptionError(f"--format is for one file for each mesh, and {out} is a table of all meshes")
        return [out]
    several, elements = is_batch(paths), _listed(places_of(at), "and")
    if not several and mesh_suffix(out) in formats and not out.is_dir():
        if form is not None:
            raise OptionError(f"--format is for a folder; the extension of {out} decides")
        return [out]
    if out.suffix and not out.is_dir():
        expected = "a folder for several meshes" if several else f"a {_listed(formats)} file for outputs at {elements}"
        raise OptionError(f"--out should be {expected}, got {out}")
    suffix = None if form is None else f".{form.lower().lstrip('.')}"
    if suffix not in (None, *formats):
        expected = _listed([extension[1:] for extension in formats])
        raise OptionError(f"--format should be {expected} for outputs at {elements}, got {form}")
    folders = [_absolute(path if path.is_dir() else path.parent) for path in paths]
    common = os.path.commonpath(folders)
    names = [_absolute(mesh).relative_to(common) for mesh in meshes]
    short = [name.with_name(mesh_stem(name)) for name in names]
    count = Counter(short)
    results = [name if count[stem] > 1 else stem for name, stem in zip(names, short, strict=True)]
    of_vtk = ".vtp" if ".vtp" in formats else formats[0]
    suffixes = [suffix or (of_vtk if mesh_suffix(mesh) in VTK_FORMATS else formats[0]) for mesh in meshes]
    files = [out / name.with_name(name.name + end) for name, end in zip(results, suffixes, strict=True)]
    places = {place for mesh in meshes for place in (mesh.parent.resolve(), mesh.resolve().parent)}
    for file in files:
        if file.exists() and file.resolve().parent in places:
            raise OptionError(
                f"{file}: this file is beside the meshes and would be overwritten; choose another folder for --out"
            )
    return files


def _listed(words: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def is_batch(paths: Sequence[Path]) -> bool:
    """Whether there are several paths or a folder."""
    return len(paths) > 1 or paths[0].is_dir()


def report_file(out: Path, columns: Sequence[str] = ("file",)) -> Path:
    """The file that lists what became of each mesh: report.csv in a folder, TABLE.report.csv beside a table.

    columns: those that name the files

    Raises OptionError if there is such a file that is no report.
    """
    path = out.with_suffix(".report.csv") if out.suffix.lower() == ".csv" and not out.is_dir() else out / "report.csv"
    if path.is_file():
        with path.open("rb") as file:
            if file.readline().strip() != ",".join([*columns, *REPORT_COLUMNS]).encode():
                raise OptionError(f"{path}: this file is no report of diffnet, and would be overwritten")
    return path
