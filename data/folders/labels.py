"""Labels and targets of a whole set: their classes, and the elements of the meshes that they belong to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import TABLE_PREFIX
from diffnet.data.folders.files import label_files, listing, natural, pair_labels
from diffnet.data.folders.index import MeshFacts, ValueFacts, facts_of
from diffnet.data.folders.sources import MAX_COLORS, TARGETS, FileValues, read_source
from diffnet.data.labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt, counted
from diffnet.data.numbers import check_names, check_vertex_numbers, read_columns, read_labels, read_lines
from diffnet.data.places import row_numbers, rows_at
from diffnet.data.stored import with_change
from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import on_triangles
from diffnet.geometry.mesh.attributes import MeshArray
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

D = TypeVar("D", bound=LabeledMeshes)

_SURE: tuple[LabelsAt, LabelsAt] = ("vertices", "faces")  # targets may also be at edges
_WORDS = "rows", "has targets at"  # of messages about targets


class Classes(NamedTuple):
    """The classes of a set.

    numbers: of the classes in the label files, or None for files with names
    places: the class of each number or name in the label files
    """

    names: list[str]
    numbers: list[int] | None
    places: dict[int | str, int]


def number_classes(labels: Mapping[Path, ValueFacts], names_file: Path) -> Classes:
    """The classes of a set, from what is known of its label files.

    Files with names: the distinct names become classes, in natural order (`a2` before `a10`). If `names_file` exists,
    its lines are the classes, in this order.

    Files with numbers: the sorted distinct values ≥ 0 become classes 0 … C-1. Negative values become UNLABELED. The
    names of the classes are the lines of `names_file` if it exists, else the values in decimal. If it has more lines
    than there are values, and all values are line numbers from 0, the lines are the classes.

    Raises DataError if nothing is labeled, if names and numbers are mixed, and if the names file does not fit or
    has a name twice.
    """
    listed = read_lines(names_file) if names_file.is_file() else None
    check_names(names_file, listed or [], "classes")
    named = next((item for item in labels.items() if item[1].names is not None), None)
    numbered = next((item for item in labels.items() if item[1].names is None), None)
    if named and numbered:
        raise DataError(
            f"{named[0]} has labels by {named[1].kind}, but {numbered[0]} has {numbered[1].kind}: a set can have only "
            "one"
        )
    if named and named[1].kind == "colors":
        return _number_colors(labels, listed, names_file)
    if named:
        names = listed or sorted({name for facts in labels.values() for name in facts.names or ()}, key=natural)
        return Classes(names, None, _places(labels, names, names_file))
    values = sorted(set[int]().union(*(facts.distinct for facts in labels.values())))
    distinct = [value for value in values if value >= 0]
    if not distinct:
        raise DataError(f"{names_file.parent}: every label is negative, which means unlabeled")
    if listed is not None and len(listed) != len(distinct):
        if len(listed) < len(distinct) or distinct[-1] >= len(listed):
            some = listing(map(str, distinct), 8)
            raise DataError(f"{names_file}: {len(listed)} names for {len(distinct)} distinct labels ({some})")
        distinct = list(range(len(listed)))
    places: dict[int | str, int] = {value: UNLABELED for value in values if value < 0}
    places |= {value: i for i, value in enumerate(distinct)}
    return Classes(listed or [str(value) for value in distinct], distinct, places)


def _number_colors(labels: Mapping[Path, ValueFacts], listed: list[str] | None, names_file: Path) -> Classes:
    """The classes of colors, sorted, or in the order of lines such as `#ff0000 arm`."""
    colors = sorted({color for facts in labels.values() for color in facts.names or ()})
    if len(colors) > MAX_COLORS:
        raise DataError(
            f"{next(iter(labels))}: the set has {len(colors)} distinct colors. Colors can be labels if there are at "
            f"most {MAX_COLORS}; put the labels into files beside the meshes"
        )
    names = colors
    if listed is not None:
        colors, names = [], []
        for line in listed:
            color, _, name = line.partition(" ")
            if not re.fullmatch("#[0-9a-fA-F]{6}", color) or not name.strip() or color.lower() in colors:
                raise DataError(
                    f"{names_file}: the labels are colors, so each line should be another color and a name, such as "
                    f"'#ff0000 arm', got {line[:40]!r}"
                )
            colors.append(color.lower())
            names.append(name.strip())
        check_names(names_file, names, "classes")
    return Classes(names, None, _places(labels, colors, names_file))


def _places(labels: Mapping[Path, ValueFacts], names: list[str], names_file: Path) -> dict[int | str, int]:
    """The place of each name in a list. Raises DataError for a file with a name that is not in it."""
    places: dict[int | str, int] = {name: i for i, name in enumerate(names)}
    for path, facts in labels.items():
        unknown = [name for name in facts.names or () if name not in places]
        if unknown:
            raise DataError(f"{path}: the label {unknown[0][:40]!r} is not in {names_file}")
    return places


class Pair(NamedTuple):
    """A mesh file and a file with labels or targets of the mesh, and what is known of them."""

    mesh: Path
    sizes: MeshFacts
    file: Path
    facts: ValueFacts


def find_elements(pairs: Sequence[Pair], at: LabelsAt | None = None) -> LabelsAt:
    """The elements that have labels or targets in a whole set: those in the files, else those whose number fits.

    If a mesh has as many faces as vertices, its file fits both, and the other files decide.

    at: the elements, if the layout tells

    Raises DataError for a file that doesn't fit, for a set that mixes several, if every file fits two, and for values
    at vertices of an STL file.
    """
    different: dict[Any, Pair] = {}  # large sets have many pairs alike
    for pair in pairs:
        different.setdefault((pair.sizes[:4], pair.facts.rows, pair.facts.at, mesh_suffix(pair.mesh)), pair)
    distinct = [*different.values()]
    words = _WORDS if pairs[0].facts.kind == TARGETS else ("labels", "labels")
    at = _decided(distinct, *words) if at is None else at
    if at is None:
        mesh, sizes, file, facts = pairs[0]
        raise DataError(
            f"{file}: {facts.rows} {words[0]} fit vertices and faces: {mesh} has {sizes.shown('vertices')} and "
            f"{sizes.shown('faces')}, and no other file decides"
        )
    for mesh, sizes, file, facts in distinct:
        if facts.rows >= 0 and not sizes.fits(facts.rows, at):
            raise DataError(f"{file}: {facts.rows} {words[0]}, but {mesh} has {sizes.shown(at)}").about(mesh)
        if at == "vertices":
            check_vertex_numbers(mesh, file)
    return at


def _decided(pairs: Sequence[Pair], noun: str, verb: str) -> LabelsAt | None:
    """The elements that fit the files, or None if two do."""
    decided: dict[LabelsAt, Path] = {}
    for mesh, sizes, file, facts in pairs:
        possible: list[LabelsAt] = [*_SURE, "edges"] if facts.kind == TARGETS and sizes.faces else [*_SURE]
        fitting = [facts.at] if facts.at else [at for at in possible if sizes.fits(facts.rows, at)][:2]
        if not fitting:
            shown = [sizes.shown(at) for at in possible]
            text = f"{file}: {facts.rows} {noun}, but {mesh} has {', '.join(shown[:-1])} and {shown[-1]}"
            raise DataError(text).about(mesh)
        if len(fitting) == 1 or fitting[1] == "edges":
            decided.setdefault(fitting[0], file)
    if len(decided) > 1:
        (first, file), (second, other) = list(decided.items())[:2]
        raise DataError(f"{file} {verb} {first}, but {other} {verb} {second}: a set can have only one kind")
    return next(iter(decided), None)


def find_columns(rows: Sequence[Sequence[Pair]]) -> tuple[list[str], list[LabelsAt]]:
    """The names of the columns of targets, which are those of each mesh, and the elements of each, see `find_elements`.

    If the files of a target fit two kinds of elements, the first target that is decided decides.

    rows: the files of each mesh. Raises DataError for a mesh with other columns.
    """
    first = rows[0]
    check_names(first[-1].file, columns := [name for pair in first for name in pair.facts.names or ()])
    for row in rows:
        for (_, _, path, facts), expected in zip(row, first, strict=True):
            names, others = facts.names or [], expected.facts.names or []
            if len(names) != len(others):
                raise DataError(
                    f"{path}: {counted(len(names), 'column', 'columns')}, but {expected.file} has {len(others)}; all "
                    "meshes of a set need the same columns"
                )
            if names != others:
                raise DataError(f"{path}: the columns are {names}, but those of {expected.file} are {others}")
    files = list(zip(*rows, strict=True))
    decided = [_decided(pairs, *_WORDS) for pairs in files]
    default = next((at for at in decided if at is not None), None)
    places = [find_elements(pairs, at or default) for pairs, at in zip(files, decided, strict=True)]
    return columns, [at for pair, at in zip(first, places, strict=True) for _ in pair.facts.names or ()]


class Numbering(NamedTuple):
    """How the labels in the files of a set become classes at elements of the meshes.

    classes: the class of each number or name in the label files
    kind: that of the label files, see `indexed`
    """

    classes: dict[int | str, int]
    at: LabelsAt
    kind: str = "labels"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the files of a mesh, see `indexed`."""
        return (self.kind,)

    def labels(self, mesh: Mesh, sources: Sequence[FileValues], numbers: NDArray[Any]) -> NDArray[np.int64]:
        """The labels of a mesh (V,), (F,) or (E,) int64 from those in its file, see `place_labels`."""
        names = sources[0].names
        distinct, inverse = np.unique(sources[0].values, return_inverse=True)
        keys = distinct.tolist() if names is None else [names[i] if i >= 0 else None for i in distinct.tolist()]
        classes = [UNLABELED if key is None else self.classes[key] for key in keys]
        return place_labels(mesh, np.array(classes, np.int64)[inverse.reshape(-1)], self.at, sources[0])


class Columns(NamedTuple):
    """How the targets of a set become columns at elements of the meshes. names: see `target_parts`"""

    names: list[str]
    at: TargetsAt

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(f"targets {name}" for name in self.names if name not in self.of_table)

    @property
    def of_table(self) -> list[str]:
        """The names of those that are numbers of a mesh."""
        return [name for name in self.names if name.startswith(TABLE_PREFIX)]

    def labels(self, mesh: Mesh, sources: Sequence[FileValues], numbers: NDArray[Any]) -> NDArray[np.float64]:
        """The targets of a mesh (V, C), (F, C) or (E, C) from those in its files, or those of `rows_at`.

        numbers: targets of the mesh in a table
        """
        if not isinstance(self.at, tuple):
            return np.hstack([on_triangles(mesh, source.values, cast(LabelsAt, self.at)) for source in sources])
        columns = [column for source in sources for column in source.values.T] + [*numbers[:, None]]
        targets = np.full((len(row_numbers(mesh, self.at)), len(columns)), np.nan)
        for place, rows in rows_at(targets, len(mesh.verts), self.at):
            for i, column in enumerate(columns):
                if self.at[i] == place:
                    rows[:, i] = column if place == "meshes" else on_triangles(mesh, column, place)
        return targets


def place_labels(mesh: Mesh, labels: NDArray[np.int64], at: LabelsAt, source: FileValues) -> NDArray[np.int64]:
    """One label for each vertex (V,), triangle (F,) or edge (E,) of a mesh, int64.

    labels: the classes of `source.values`, whose number fits, see `find_elements`

    Labels of faces may be one per triangle, or one per polygon of the source file, which all its triangles get. Labels
    of edges are those of its polygons, without cuts. Raises DataError for a face that the mesh doesn't have.
    """
    if source.elements is not None:
        if source.elements.max(initial=-1) >= mesh.polygon_count:
            size = MeshFacts(0, len(mesh.faces), mesh.polygon_count, 0, "").shown("faces")
            text = f"{source.path}: there is no face {source.elements.max() + 1}, {mesh.name} has {size}"
            raise DataError(text).about(mesh.path or mesh.name)
        listed, labels = labels, np.full(mesh.polygon_count, UNLABELED, np.int64)
        labels[source.elements] = listed
    return on_triangles(mesh, labels, at)


def labels_beside(mesh: Mesh) -> list[MeshArray]:
    """The labels in files beside the file of a mesh that have its name. Files of other content are left out."""
    labels, path = [], Path(str(mesh.path))
    sizes = facts_of(mesh, edges=False, hashes=False)
    for suffix in (".txt", ".npy", ".seg", ".csv", ".json"):
        file = path.with_name(mesh_stem(path) + suffix)
        with suppress(DataError):  # other content
            source = read_source(file)
            at = find_elements([Pair(path, sizes, file, facts_of(source))])
            if at in ("vertices", "faces"):
                labels.append(MeshArray(file.name, "labels", at, place_labels(mesh, source.values, at, source)))
    return labels


def with_soft_labels(data: D, meshes: list[Path], root: Path) -> D:
    """The data set with the classes that `sseg/NAME.seseg` allows at each edge of the test meshes.

    A class is allowed if its share is above 0. Training uses the hard labels alone.

    meshes: the files of the test meshes, in the order of the data

    As in MeshCNN, column i of a file is the label i + m, where m is the smallest label ≥ 0 in all files of `seg/`.
    Raises DataError, which names the file, if a mesh has no such file, for another number of lines than edges, and if a
    label has no column.
    """
    values = np.concatenate([read_labels(file) for file in label_files(root / "seg", (".eseg",))])
    smallest = int(values[values >= 0].min())
    files = {
        mesh_stem(mesh): str(file)
        for mesh, file in zip(meshes, pair_labels(meshes, root / "sseg", (".seseg",)), strict=True)
    }
    numbers = [int(number) for number in data.label_numbers or ()]
    change = partial(_softened, files=files, numbers=numbers, smallest=smallest)
    contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files.values()]
    return replace(data, test=with_change(data.test, change, "soft labels", numbers, smallest, contents))


def _softened(item: LabeledMesh, files: Mapping[str, str], numbers: Sequence[int], smallest: int) -> LabeledMesh:
    file = Path(files[item.name])
    columns = np.array(numbers) - smallest
    shares = read_columns(file).values
    if len(bad := np.flatnonzero(~(shares >= 0).all(1))):
        raise DataError(f"{file}: shares should be at least 0, row {bad[0]} is {shares[bad[0]].tolist()}")
    if len(shares) != len(item.labels):
        raise DataError(f"{file}: {len(shares)} lines, but {item.mesh.name} has {len(item.labels)} edges")
    unlisted = [i for i in np.unique(item.labels) if i >= 0 and not 0 <= columns[i] < shares.shape[1]]
    if unlisted:
        raise DataError(
            f"{file}: {shares.shape[1]} numbers in a line, for the labels from {smallest} on, but the label "
            f"{numbers[unlisted[0]]} occurs"
        )
    listed = (columns >= 0) & (columns < shares.shape[1])
    return replace(item, accepted=(shares > 0)[:, np.where(listed, columns, 0)] & listed)
