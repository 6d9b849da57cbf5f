"""Files of vertex indices: template points of a mesh, and maps, which give a vertex of one mesh for each of another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from diffnet.data.folders.files import listing
from diffnet.data.labeled import DataError
from diffnet.data.numbers import check_vertex_numbers, read_labels, read_lines
from diffnet.data.options import Base
from diffnet.geometry.files import make_folder, npy_bytes, write_atomically
from diffnet.geometry.mesh.mesh import mesh_stem

if TYPE_CHECKING:
    from diffnet.data.pairs.shapes import Ints, PairShape
    from diffnet.geometry import Mesh

WRITTEN = (".txt", ".csv", ".npy")  # the formats of maps
MAP_FORMATS = (*WRITTEN, ".map")  # those that are read

StrPath: TypeAlias = "str | os.PathLike[str]"


def pair_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The two names in each line of a list of pairs, with the number of the line from 1.

    Blanks or a comma separate them. Raises DataError for other lines and for an empty file.
    """
    for number, line in enumerate(read_lines(path), 1):
        names = line.replace(",", " ").split()
        if len(names) != 2:
            raise DataError(f"{path}, line {number}: expected the names of two meshes, got {line[:60]!r}")
        yield number, names


def write_map(file: Path, matches: Ints, meshes: Sequence[Mesh]) -> None:
    """Write a map: an array (`.npy`), or a vertex in each line. A table (`.csv`) also has the name of its column.

    matches: (V,) int64, a vertex for each vertex, from 0, or −1 for none
    meshes: both meshes

    Raises DataError for an STL file, which doesn't number its vertices.
    """
    for mesh in meshes:
        check_vertex_numbers(mesh, file, "Save it as")
    make_folder(file.parent)
    suffix = file.suffix.lower()
    lines = ["vertex"] * (suffix == ".csv") + [str(vertex) for vertex in matches.tolist()]
    write_atomically(file, npy_bytes(matches) if suffix == ".npy" else "\n".join(lines) + "\n")


def read_maps(
    files: Sequence[Path], pairs: Sequence[tuple[PairShape, PairShape]], base: Base, *, needs_all: bool = True
) -> list[Ints]:
    """The maps of pairs of meshes, for each vertex of the first one (V,) a vertex of the second one, from 0.

    files: one for each pair, in one of MAP_FORMATS, also with .gz
    base, needs_all: see `read_indices`

    Raises DataError, see `read_indices`, for another number of entries and for an STL file.
    """
    for file, pair in zip(files, pairs, strict=True):
        for shape in pair:
            check_vertex_numbers(shape.mesh, file)
    targets = [second.mesh for _, second in pairs]
    sides = [IndexFile(file, len(mesh.verts), mesh.name) for file, mesh in zip(files, targets, strict=True)]
    maps = read_indices(sides, base, needs_all=needs_all)
    for file, vertices, (first, _) in zip(files, maps, pairs, strict=True):
        if len(vertices) != len(first.mesh.verts):
            raise DataError(
                f"{file}: {len(vertices)} entries, but {first.mesh.name} has {len(first.mesh.verts)} vertices"
            )
    return maps


def map_names(pairs: Sequence[tuple[StrPath, StrPath]]) -> list[str]:
    """The name of the map of each pair of mesh files, without extension: FIRST_SECOND.

    If several pairs would have this name, it is PATH/PATH, the paths below the folder that all meshes have in common.
    """
    short = [f"{mesh_stem(first)}_{mesh_stem(second)}" for first, second in pairs]
    count = Counter(short)
    absolute = [tuple(Path(os.path.abspath(mesh)) for mesh in pair) for pair in pairs]
    common = os.path.commonpath([mesh.parent for pair in absolute for mesh in pair])
    return [
        name if count[name] == 1 else str(first.relative_to(common) / second.relative_to(common))
        for name, (first, second) in zip(short, absolute, strict=True)
    ]


def find_maps(folder: Path, pairs: Sequence[tuple[StrPath, StrPath]]) -> list[Path]:
    """The file in a folder that holds the map of each pair: FIRST_SECOND, see `map_names`, or FIRST-SECOND.

    Raises DataError for a pair without a file, and for one with several.
    """
    maps: list[Path] = []
    missing: list[str] = []
    endings = [suffix + end for suffix in MAP_FORMATS for end in ("", ".gz")]
    for name, pair in zip(map_names(pairs), pairs, strict=True):
        names = [name] if os.sep in name else [name, "-".join(map(mesh_stem, pair))]
        files = [file for each in names for ending in endings if (file := folder / f"{each}{ending}").is_file()]
        if len(files) > 1:
            raise DataError(f"{folder}: several maps of one pair: {listing(file.name for file in files)}")
        maps += files
        missing += [] if files else [name]
    if missing:
        raise DataError(f"{folder}: no map ({', '.join(MAP_FORMATS)}) for {listing(missing)}")
    return maps


class IndexFile(NamedTuple):
    """A file of vertex indices.

    path: the file
    vertices: the number of vertices of the mesh that the indices belong to
    name: of this mesh, for messages
    """

    path: Path
    vertices: int
    name: str


def read_indices(files: Sequence[IndexFile], base: Base = "auto", *, needs_all: bool = True) -> list[Ints]:
    """The indices (N,) in each file of a set, counted from 0.

    base: the number of the first vertex, "0" or "1". All files of a set have the same. "auto" finds it: an index 0
        means 0, and an index equal to the number of vertices means 1.
    needs_all: whether a negative index, which marks a missing point, is an error. Else it is −1.

    Raises DataError for a file that is missing or holds anything but whole numbers; for an index out of range; for a
    missing point; for files that contradict each other; and if "auto" fits both.
    """
    values = [read_labels(file.path) for file in files]
    for file, array in zip(files, values, strict=True):
        if needs_all and len(missing := np.flatnonzero(array < 0)):
            raise DataError(
                f"{file.path}: entry {missing[0] + 1} is {array[missing[0]]}, which marks a missing point, as on a "
                "partial shape. Partial shapes are not supported without --partial: every point needs a vertex"
            )
    first = _first_number(files, values) if base == "auto" else int(base)
    for file, array in zip(files, values, strict=True):
        outside = np.flatnonzero(((array >= 0) & (array < first)) | (array >= file.vertices + first))
        if len(outside):
            raise DataError(
                f"{file.path}: entry {outside[0] + 1} is {array[outside[0]]}, but the vertices of {file.name} are "
                f"numbered from {first} to {file.vertices + first - 1}"
            )
    return [np.where(array < 0, -1, array - first) for array in values]


def _first_number(files: Sequence[IndexFile], values: Sequence[Ints]) -> int:
    zero = next((file for file, array in zip(files, values, strict=True) if (array == 0).any()), None)
    one = next((file for file, array in zip(files, values, strict=True) if array.max() == file.vertices), None)
    for file, array in zip(files, values, strict=True):
        if array.max() > file.vertices:
            raise DataError(
                f"{file.path}: entry {array.argmax() + 1} is {array.max()}, but {file.name} has {file.vertices} "
                "vertices"
            )
    if zero is not None and one is not None:
        raise DataError(
            f"{zero.path} has the index 0, but {one.path} has the index {one.vertices}, and {one.name} has "
            f"{one.vertices} vertices: all files should count from 0, or all from 1. If 0 marks missing points of "
            "a partial shape, write -1"
        )
    if zero is None and one is None:
        raise DataError(
            f"{files[0].path}: the indices could count from 0 or from 1: no file of the set has the index 0, or the "
            "number of vertices of its mesh. Say which: base 0 or 1"
        )
    return 0 if one is None else 1
