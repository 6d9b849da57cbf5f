"""Data sets whose meshes and labels are read when they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.content import content_hash
from diffnet.data.folders.agreement import warn_of_scattered_labels
from diffnet.data.folders.classes import find_rows
from diffnet.data.folders.division import Rule
from diffnet.data.folders.index import Facts, LabelFacts, MeshFacts, TargetFacts, identity_of, indexed
from diffnet.data.folders.labels import SizedMesh, check_fit, find_labels_at, place_labels
from diffnet.data.folders.layouts import Layout, SetFiles, check_classes, find_files
from diffnet.data.folders.soft_labels import with_soft_labels
from diffnet.data.folders.sources import FileLabels, read_source
from diffnet.data.folders.target_files import Targets, find_targets, read_targets
from diffnet.data.folders.targets import (
    check_known,
    check_targets_fit,
    checked_names,
    find_target_rows,
    placed_targets,
    targets_at,
)
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from diffnet.data.shards.reading import ShardedDataset, labeled_shards
from diffnet.data.stored import StoredMeshes
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.file_state import FileIdentity, hashed
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix


class Numbering(NamedTuple):
    """How the labels in the files of a set become classes at elements of the meshes.

    classes: the class of each number or name in the label files
    """

    classes: dict[int | str, int]
    at: LabelsAt

    def labels(self, mesh: Mesh, files: Sequence[Path]) -> NDArray[np.int64]:
        """The labels of a mesh, see `place_labels`."""
        source = read_source(files[0])
        distinct, inverse = np.unique(source.values, return_inverse=True)
        own = [self.classes[key] for key in _keys(distinct, source.names)]
        return place_labels(mesh, np.array(own, np.int64)[inverse.reshape(-1)], self.at, source)


class Columns(NamedTuple):
    """How the targets in the files of a set become columns at elements of the meshes. names: see `load_targets`"""

    names: list[str]
    at: LabelsAt

    def labels(self, mesh: Mesh, files: Sequence[Path]) -> NDArray[np.float64]:
        """The targets of a mesh, see `load_targets`."""
        return placed_targets(mesh, list(map(read_targets, files, self.names)), self.at)


@dataclass(frozen=True, eq=False, repr=False)
class IndexedMeshes(StoredMeshes):
    """The meshes of a part of a data set. Item i is read from its files each time it is asked for.

    It holds no mesh, and about 300 bytes for each, so it can be sent to worker processes.

    vertex_counts, face_counts, edge_counts: (N,) int64, of the meshes

    An item raises DataError or MeshError, which names the file, if a file is missing, can't be read, or is not the one
    that was indexed.
    """

    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    edge_counts: NDArray[np.int64]
    cache_dir: str
    _names: NDArray[np.bytes_]  # an array takes less than strings
    _files: NDArray[np.bytes_]  # (N, 1 + P), the meshes, and the files of their labels or targets
    _states: NDArray[np.int64]  # (N, 1 + P), see `FileIdentity`
    _bytes: NDArray[np.bytes_]  # (N, 1 + P), hashes of the bytes of the files
    _contents: NDArray[np.bytes_]  # (N, 1 + P), hashes of what was read from them
    # (N, …), the labels or targets of each mesh, or how labels in files are numbered, or the columns in files
    _labels: NDArray[Any] | Numbering | Columns

    def item(self, number: int) -> LabeledMesh:
        paths = [Path(os.fsdecode(name)) for name in self._files[number]]
        for path, state, content in zip(paths, self._states[number].tolist(), self._bytes[number], strict=True):
            before = FileIdentity(state, content.decode())
            if identity_of(path, before).content != before.content:
                raise DataError(f"{path}: the file has changed since the data set was indexed. Index it again")
        mesh = load_mesh(paths[0], self.cache_dir)
        if isinstance(self._labels, np.ndarray):
            labels = np.asarray(self._labels[number])
        else:
            labels = self._labels.labels(mesh, paths[1:])
        return LabeledMesh(os.fsdecode(self._names[number]), mesh, labels)

    def take(self, numbers: NDArray[np.int64] | slice) -> IndexedMeshes:
        arrays: dict[str, Any] = {name: x[numbers] for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return replace(self, **arrays)

    @property
    def names(self) -> list[str]:
        return [os.fsdecode(name) for name in self._names]

    def file(self, number: int) -> str:
        return os.fsdecode(self._files[number, 0])

    @property
    def paths(self) -> list[str]:
        """The mesh files, for `fill_cache`."""
        return [os.fsdecode(name) for name in self._files[:, 0]]

    def digest(self, i: int) -> int:
        """A number that is another one if item i, its files or its label have changed, but not if they are moved."""
        label = 0 if self.mesh_labels is None else self.mesh_labels[i].tolist()
        return hashed(self._names[i].tolist(), self._bytes[i].tolist(), self._contents[i].tolist(), label)

    @property
    def mesh_labels(self) -> NDArray[Any] | None:
        return self._labels if isinstance(self._labels, np.ndarray) else None

    @property
    def contents(self) -> list[list[str]]:
        found: list[list[str]] = [[each.decode() for each in own] for own in self._contents]
        if self.mesh_labels is not None:
            found = [[*own, repr(label)] for own, label in zip(found, self.mesh_labels.tolist(), strict=True)]
        return found

    @property
    def meaning(self) -> str:
        if isinstance(self._labels, Numbering):
            return f"{sorted(self._labels.classes.items(), key=repr)} {self._labels.at}"
        return repr(self._labels) if isinstance(self._labels, Columns) else ""

    @cached_property
    def key(self) -> str:
        """A hash of names and contents of the files, and of what their labels mean.

        It doesn't depend on the folder, which may be given in several ways.
        """
        labels = () if self.mesh_labels is None else (self.mesh_labels,)
        content = content_hash(self._names, self._bytes, self._contents, *labels)
        return hashlib.sha256(f"{content} {self.meaning}".encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, repr=False)
class IndexedDataset(LabeledMeshes):
    """A data set whose meshes and labels are read when needed, see `index_dataset` and `index_classes`."""

    train: StoredMeshes
    test: StoredMeshes
    validation: StoredMeshes = field(kw_only=True)


def index_dataset(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set that `load_dataset` reads, for sets that are larger than the memory: items are read when needed.

    `train`, `validation` and `test` are `IndexedMeshes`, or those whose labels are changed when they are read. The
    first call reads all files and stores an index in the cache folder: the numbers of vertices, faces and edges, which
    labels occur, and what each file is recognized by. Later calls read files that are new or have changed. Processes
    can share the folder.

    path, layout, test_fraction, seed, group_by, needs_train: see `load_dataset`, also for a warning. Shards give
        the set of `load_shards`.
    cache_dir: a folder for the index, parsed meshes and operators, see `precompute`. If it can't be written, there is a
        warning, and the next call reads all files again.
    jobs: number of worker processes that read files; by default one for each core. See `precompute_all` for calls from
        a script.

    Items are those of `load_dataset`. Raises DataError for the same faults as `load_dataset`, also for meshes that
    can't be read. The message names the files. What is known of the other files is stored first.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    root = Path(path)
    files = find_files(root, layout, Rule(test_fraction, seed, group_by, needs_train))
    parts = files.parts if needs_train else files.parts.of_test()
    meshes = parts.every
    labels = [file for part in files.labels for file in part]
    found = indexed(root, {"mesh": meshes, "labels": labels}, cache_dir, jobs)
    names, numbers, classes = _number(files, labels, [facts for _, facts in found["labels"]])
    labels, label_facts = labels[-len(meshes) :], found["labels"][-len(meshes) :]
    at = _find_elements(
        meshes, [facts for _, facts in found["mesh"]], labels, [facts for _, facts in label_facts], files.at
    )
    if needs_train:
        check_classes(root, names)
    items = _items(
        list(map(mesh_stem, meshes)), [meshes, labels], [found["mesh"], label_facts], Numbering(classes, at), cache_dir
    )
    data = IndexedDataset(**parts.fields(items), label_names=names, labels_at=at, label_numbers=numbers)
    if files.layout == "meshcnn" and (root / "sseg").is_dir():
        data = with_soft_labels(data, parts.parts["test"], root)
    warn_of_scattered_labels(data, root)
    return data


def index_classes(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set for classification that `load_classes` reads, with items that are read when needed.

    path, test_fraction, seed, group_by, needs_train: see `load_classes`
    cache_dir, jobs: see `index_dataset`, also for the index and what is raised
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    parts, names = find_rows(Path(path), Rule(test_fraction, seed, group_by, needs_train))
    rows = parts.every
    place = {name: i for i, name in enumerate(names)}
    labels = np.array([place[row.label] for row in rows], np.int64)
    items = _of_rows(Path(path), rows, labels, cache_dir, jobs)
    return IndexedDataset(**parts.fields(items), label_names=names, labels_at="meshes")


def index_targets(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    targets: str | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set for regression that `load_targets` reads, with items that are read when needed.

    path, targets, test_fraction, seed, group_by, needs_train: see `load_targets`
    cache_dir, jobs: see `index_dataset`, also for the index and what is raised
    """
    if (shards := labeled_shards(path, cache_dir, needs_train, "targets")) is not None:
        return shards
    root = Path(path)
    rule = Rule(test_fraction, seed, group_by, needs_train)
    names, parts, columns = find_target_rows(root, targets, rule)
    rows, train = parts.every, len(parts.parts["train"])
    if names is None:
        values = np.array([[row.values] for row in rows])  # (N, 1, C)
        items = _of_rows(root, rows, values, cache_dir, jobs)
        known: Any = ~np.isnan(values[:train, 0])
        at: TargetsAt = "meshes"
    else:
        meshes = [row.path for row in rows]
        files = [[find_targets(mesh, name) for mesh in meshes] for name in names]
        kinds = [f"targets {name}" for name in names]
        found = indexed(root, {"mesh": meshes, **dict(zip(kinds, files, strict=True))}, cache_dir, jobs)
        facts = list(zip(*([own for _, own in found[kind]] for kind in kinds), strict=True))
        at, columns = _find_columns(meshes, [own for _, own in found["mesh"]], list(zip(*files, strict=True)), facts)
        own = [found["mesh"], *(found[kind] for kind in kinds)]
        items = _items([row.name for row in rows], [meshes, *files], own, Columns(names, at), cache_dir)
        known = [[each for own in facts[i] for each in own.known] for i in range(train)]
    if needs_train:
        check_known(root, columns, known)
    return IndexedDataset(**parts.fields(items), label_names=columns, labels_at=at)


def _find_columns(
    meshes: Sequence[Path],
    mesh_facts: Sequence[MeshFacts],
    files: Sequence[Sequence[Path]],
    target_facts: Sequence[Sequence[TargetFacts]],
) -> tuple[LabelsAt, list[str]]:
    """The elements that have targets, and the names of the columns. Raises DataError for files that don't fit."""
    kept = _different(
        [
            (sizes[:4], *((o.rows, *o.names, o.at) for o in own))
            for sizes, own in zip(mesh_facts, target_facts, strict=True)
        ]
    )
    sources = [
        [
            Targets(file, np.broadcast_to(0.0, (own.rows, len(own.names))), own.names, own.at)
            for file, own in zip(files[i], target_facts[i], strict=True)
        ]
        for i in kept
    ]
    columns = checked_names(sources)
    sized = [SizedMesh.of(meshes[i], *mesh_facts[i][:4]) for i in kept]
    at = targets_at(sized, sources)
    for mesh, own in zip(sized, sources, strict=True):
        check_targets_fit(mesh, own, at)
    return at, columns


def _of_rows(
    root: Path, rows: Sequence[Any], labels: NDArray[Any], cache_dir: str | os.PathLike[str], jobs: int | None
) -> IndexedMeshes:
    """Meshes with their own labels. rows: with a name and a path"""
    meshes = [row.path for row in rows]
    found = indexed(root, {"mesh": meshes}, cache_dir, jobs)
    return _items([row.name for row in rows], [meshes], [found["mesh"]], labels, cache_dir)


def _items(
    names: Sequence[str],
    files: Sequence[Sequence[Path]],
    facts: Sequence[Sequence[Facts]],
    labels: NDArray[Any] | Numbering | Columns,
    cache_dir: str | os.PathLike[str],
) -> IndexedMeshes:
    """files: the meshes, and then the files of their labels. facts: of these"""
    sizes = np.array([own[:4] for _, own in facts[0]], np.int64).reshape(-1, 4)
    identities = [[own for own, _ in part] for part in facts]
    vertices, faces, _, edges = np.ascontiguousarray(sizes.T)
    return IndexedMeshes(
        vertex_counts=vertices,
        face_counts=faces,
        edge_counts=edges,
        cache_dir=os.fspath(cache_dir),
        _names=np.array(list(map(os.fsencode, names))),
        _files=np.stack([np.array(list(map(os.fsencode, part))) for part in files], 1),
        _states=np.stack([np.array([own.state for own in part], np.int64) for part in identities], 1),
        _bytes=np.stack([np.array([own.content.encode() for own in part]) for part in identities], 1),
        _contents=np.stack([np.array([own.content.encode() for _, own in part]) for part in facts], 1),
        _labels=labels,
    )


def _number(
    files: SetFiles, paths: Sequence[Path], facts: Sequence[LabelFacts]
) -> tuple[list[str], list[int] | None, dict[int | str, int]]:
    """The names and the numbers of the classes, and the class of each value or name in the label files."""
    different = {(own.kind, tuple(own.names or ()), tuple(own.distinct)): i for i, own in reversed([*enumerate(facts)])}
    kept = sorted(different.values())
    sources = [FileLabels(paths[i], facts[i].kind, np.array(facts[i].distinct, np.int64), facts[i].names) for i in kept]
    try:
        indices, names, numbers = files.to_classes(sources)
    except DataError:
        files.to_classes([read_source(paths[i]) for i in kept])  # the same fault, with its place in the file
        raise
    classes: dict[int | str, int] = {}
    for source, own in zip(sources, indices, strict=True):
        classes.update(zip(_keys(source.values, source.names), own.tolist(), strict=True))
    return names, numbers, classes


def _keys(distinct: NDArray[np.int64], names: Sequence[str] | None) -> list[int] | list[str]:
    """What tells the class of each value in a label file: its name, or the number itself."""
    numbers: list[int] = distinct.tolist()
    return numbers if names is None else [names[i] for i in numbers]


def _find_elements(
    meshes: Sequence[Path],
    mesh_facts: Sequence[MeshFacts],
    labels: Sequence[Path],
    label_facts: Sequence[LabelFacts],
    at: LabelsAt | None,
) -> LabelsAt:
    """The elements that are labeled. Raises DataError where the number of labels doesn't fit.

    at: the elements, if the layout tells
    """
    kept = _different(
        [
            (sizes[:4], own.rows, own.at, mesh_suffix(path))
            for sizes, own, path in zip(mesh_facts, label_facts, meshes, strict=True)
        ]
    )
    sized = [SizedMesh.of(meshes[i], *mesh_facts[i][:4]) for i in kept]
    like_labels = [_labels_of(labels[i], label_facts[i]) for i in kept]
    if at is None:
        at = find_labels_at(sized, like_labels)
    for i, mesh, source in zip(kept, sized, like_labels, strict=True):
        if label_facts[i].rows >= 0:
            check_fit(mesh, label_facts[i].rows, at, source.path)
    return at


def _different(facts: Sequence[Hashable]) -> list[int]:
    """The places at which facts occur that didn't occur before."""
    first: dict[Any, int] = {}
    for i, own in enumerate(facts):
        first.setdefault(own, i)
    return list(first.values())


def _labels_of(path: Path, facts: LabelFacts) -> FileLabels:
    values = np.broadcast_to(np.int64(0), (max(facts.rows, 0),))
    return FileLabels(path, facts.kind, values, facts.names, facts.at)
