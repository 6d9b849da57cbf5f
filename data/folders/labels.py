"""Labels of a whole set: their classes, and the elements of the meshes that they belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.folders.numbers import check_vertex_numbers, read_lines
from diffnet.data.folders.sources import MAX_COLORS, FileLabels, read_source
from diffnet.data.labeled import UNLABELED, DataError, LabelsAt
from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import file_edges, on_triangles
from diffnet.geometry.mesh.attributes import MeshArray
from diffnet.geometry.mesh.mesh import mesh_stem

# Class indices of the labels of each file, the names of the classes, and their numbers in the files or None.
Classes: TypeAlias = tuple[list[NDArray[np.int64]], list[str], "list[int] | None"]


@dataclass(frozen=True, kw_only=True)
class SizedMesh(Mesh):
    """A mesh of which only the name and the sizes are known. Its arrays take no memory."""

    edge_count: int

    @classmethod
    def of(cls, path: Path, vertices: int, faces: int, polygons: int, edges: int) -> SizedMesh:
        zeros = np.broadcast_to(np.int64(0), (faces, 3))
        verts = np.broadcast_to(0.0, (vertices, 3))
        return cls(verts, zeros, zeros[:, 0], polygons, str(path), path=str(path), edge_count=edges)


def edge_count(mesh: Mesh) -> int:
    return mesh.edge_count if isinstance(mesh, SizedMesh) else len(file_edges(mesh))


def number_classes(labels: Sequence[FileLabels], names_file: Path) -> Classes:
    """Class indices (int64, shapes unchanged) of the values of each file of a set, and the classes.

    The classes are their names, and their numbers in the files, or None for files with names.

    Files with names: the distinct names become classes, in natural order (`a2` before `a10`). If `names_file` exists,
    its lines are the classes, in this order.

    Files with numbers: the sorted distinct values ≥ 0 become classes 0 … C-1. Negative values become UNLABELED. The
    names of the classes are the lines of `names_file` if it exists, else the values in decimal. If it has more lines
    than there are values, and all values are line numbers from 0, the lines are the classes.

    Raises DataError if nothing is labeled, if names and numbers are mixed, and if the names file does not fit or
    has a name twice.
    """
    given = read_lines(names_file) if names_file.is_file() else None
    _check_distinct(given or [], names_file)
    named = [file for file in labels if file.names is not None]
    if len(named) == len(labels):
        number = _number_colors if labels[0].kind == "colors" else _number_names
        return *number(labels, given, names_file), None
    if named:
        other = next(file for file in labels if file.names is None)
        raise DataError(
            f"{named[0].path} has labels by {named[0].kind}, but {other.path} has {other.kind}: a set can have only one"
        )
    distinct = np.unique(np.concatenate([np.unique(file.values) for file in labels]))
    distinct = distinct[distinct >= 0]
    if not len(distinct):
        raise DataError(f"{names_file.parent}: every label is negative, which means unlabeled")
    if given is not None and len(given) != len(distinct):
        if len(given) < len(distinct) or distinct[-1] >= len(given):
            found = ", ".join(map(str, distinct[:8])) + (", …" if len(distinct) > 8 else "")
            raise DataError(f"{names_file}: {len(given)} names for {len(distinct)} distinct labels ({found})")
        distinct = np.arange(len(given))
    classes = [np.where(file.values < 0, UNLABELED, np.searchsorted(distinct, file.values)) for file in labels]
    return classes, [str(value) for value in distinct] if given is None else given, distinct.tolist()


def _number_names(
    labels: Sequence[FileLabels], given: list[str] | None, names_file: Path
) -> tuple[list[NDArray[np.int64]], list[str]]:
    """The classes of named parts."""
    names = sorted({name for file in labels for name in file.names or ()}, key=_natural) if given is None else given
    return [_places(file, names, names_file) for file in labels], names


def _number_colors(
    labels: Sequence[FileLabels], given: list[str] | None, names_file: Path
) -> tuple[list[NDArray[np.int64]], list[str]]:
    """The classes of colors, sorted, or in the order of lines such as `#ff0000 arm`."""
    colors = sorted({color for file in labels for color in file.names or ()})
    if len(colors) > MAX_COLORS:
        raise DataError(
            f"{labels[0].path}: the set has {len(colors)} distinct colors. Colors can be labels if there are at most "
            f"{MAX_COLORS}; put the labels into files beside the meshes"
        )
    names = colors
    if given is not None:
        colors, names = [], []
        for line in given:
            color, _, name = line.partition(" ")
            if not re.fullmatch("#[0-9a-fA-F]{6}", color) or not name.strip() or color.lower() in colors:
                raise DataError(
                    f"{names_file}: the labels are colors, so each line should be another color and a name, such as "
                    f"'#ff0000 arm', got {line[:40]!r}"
                )
            colors.append(color.lower())
            names.append(name.strip())
        _check_distinct(names, names_file)
    return [_places(file, colors, names_file) for file in labels], names


def _check_distinct(names: Sequence[str], names_file: Path) -> None:
    """Raises DataError if two classes have the same name. Networks, options and scores tell classes by their names."""
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise DataError(f"{names_file}: two classes are called {twice[:40]!r}")


def _places(file: FileLabels, names: list[str], names_file: Path) -> NDArray[np.int64]:
    """For each label of a file, the place of its name in a list. Raises DataError for a name that is not in it."""
    place = {name: i for i, name in enumerate(names)}
    unknown = [name for name in file.names or () if name not in place]
    if unknown:
        raise DataError(f"{file.path}: the label {unknown[0][:40]!r} is not in {names_file}")
    return np.array([place[name] for name in file.names or ()], np.int64)[file.values]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part.lower()) for part in re.split("([0-9]+)", name)]


def find_labels_at(meshes: Sequence[Mesh], labels: Sequence[FileLabels]) -> LabelsAt:
    """Find out whether a set is labeled at vertices or at faces: from the files, else from their numbers of labels.

    If a mesh has as many faces as vertices, its file fits both, and the other files decide.

    Raises DataError for a file that fits neither, for a set that mixes both, and if every file fits both.
    """
    decided: dict[LabelsAt, Path] = {}
    for mesh, own in zip(meshes, labels, strict=True):
        file, count = own.path, len(own.values)
        if own.at is not None:
            decided.setdefault(own.at, file)
            continue
        at_vertices, at_faces = fits(mesh, count, "vertices"), fits(mesh, count, "faces")
        if not (at_vertices or at_faces):
            raise DataError(
                f"{file}: {count} labels, but {mesh.name} has {shown_size(mesh, 'vertices')} and "
                f"{shown_size(mesh, 'faces')}"
            )
        if at_vertices != at_faces:
            decided.setdefault("vertices" if at_vertices else "faces", file)
    if len(decided) == 2:
        raise DataError(
            f"{decided['vertices']} labels vertices, but {decided['faces']} labels faces: a set can have only one kind"
        )
    if not decided:
        raise DataError(
            f"{labels[0].path}: {len(labels[0].values)} labels fit vertices and faces: {meshes[0].name} has "
            f"{shown_size(meshes[0], 'vertices')} and {shown_size(meshes[0], 'faces')}, and no other file decides"
        )
    return next(iter(decided))


def place_labels(mesh: Mesh, labels: NDArray[np.int64], at: LabelsAt, source: FileLabels) -> NDArray[np.int64]:
    """One label for each vertex (V,), triangle (F,) or edge (E,) of a mesh, int64.

    labels: the classes of `source.values`

    Labels of faces may be one per triangle, or one per polygon of the source file, which all its triangles get. Labels
    of edges are those of its polygons, without cuts. Raises DataError if the number of labels does not fit, and for
    labels of the vertices of an STL file. The message names the file.
    """
    file = source.path
    if source.elements is not None:
        if source.elements.max(initial=-1) >= mesh.polygon_count:
            raise DataError(
                f"{file}: there is no face {source.elements.max() + 1}, {mesh.name} has {shown_size(mesh, 'faces')}"
            )
        listed, labels = labels, np.full(mesh.polygon_count, UNLABELED, np.int64)
        labels[source.elements] = listed
    check_fit(mesh, len(labels), at, file)
    return on_triangles(mesh, labels, at)


def labels_beside(mesh: Mesh) -> list[MeshArray]:
    """The labels in files beside the file of a mesh that have its name. Files of other content are left out."""
    found = []
    for suffix in (".txt", ".npy", ".seg", ".csv", ".json"):
        file = Path(str(mesh.path)).with_name(mesh_stem(str(mesh.path)) + suffix)
        with suppress(DataError):  # other content
            source = read_source(file)
            at = find_labels_at([mesh], [source])
            if at in ("vertices", "faces"):
                found.append(MeshArray(file.name, "labels", at, place_labels(mesh, source.values, at, source)))
    return found


def check_fit(mesh: Mesh, count: int, at: LabelsAt, file: Path) -> None:
    """Raises DataError if the number of labels in a file does not fit, and for vertices of an STL file."""
    if not fits(mesh, count, at):
        raise DataError(f"{file}: {count} labels, but {mesh.name} has {shown_size(mesh, at)}")
    if at == "vertices":
        check_vertex_numbers(mesh, file)


def fits(mesh: Mesh, count: int, at: LabelsAt) -> bool:
    """Whether the mesh has so many of these elements. Polygons of the source file count as faces, too."""
    if at == "vertices":
        return count == len(mesh.verts)
    if at == "edges":
        return count == edge_count(mesh)
    return count in (mesh.polygon_count, len(mesh.faces))


def shown_size(mesh: Mesh, at: LabelsAt) -> str:
    """How many of these elements a mesh has, for messages."""
    if at == "vertices":
        return f"{len(mesh.verts)} vertices"
    if at == "edges":
        return f"{edge_count(mesh)} edges"
    if mesh.polygon_count == len(mesh.faces):
        return f"{len(mesh.faces)} faces"
    return f"{mesh.polygon_count} faces ({len(mesh.faces)} triangles)"
