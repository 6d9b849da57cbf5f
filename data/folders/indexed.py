"""Data sets whose meshes and labels are read when they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.folders.classes import find_rows
from diffnet.data.folders.index import Fingerprint, LabelFacts, MeshFacts, fingerprint, indexed
from diffnet.data.folders.labels import check_fit, find_labels_at, place_labels
from diffnet.data.folders.layouts import Layout, SetFiles, check_classes, find_files
from diffnet.data.folders.sources import FileLabels, read_source
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.data.shards.reading import ShardedDataset, labeled_shards
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem


class Numbering(NamedTuple):
    """How the labels in the files of a set become classes at elements of the meshes.

    classes: the class of each number or name in the label files
    """

    classes: dict[int | str, int]
    at: LabelsAt

    def labels(self, mesh: Mesh, source: FileLabels) -> NDArray[np.int64]:
        """The labels of a mesh, see `place_labels`."""
        distinct, inverse = np.unique(source.values, return_inverse=True)
        own = [self.classes[key] for key in _keys(distinct, source.names)]
        return place_labels(mesh, np.array(own, np.int64)[inverse.reshape(-1)], self.at, source)


@dataclass(frozen=True, eq=False, repr=False)
class IndexedMeshes(Sequence[LabeledMesh]):
    """The meshes of a part of a data set. Item i is read from its files each time it is asked for.

    It holds no mesh, and about 200 bytes for each, so it can be sent to worker processes.

    vertex_counts, face_counts: (N,) int64, of the meshes

    An item raises DataError or MeshError, which names the file, if a file is missing, can't be read, or is not the one
    that was indexed.
    """

    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    _cache_dir: str
    _names: NDArray[np.bytes_]  # an array takes less than strings
    _files: NDArray[np.bytes_]  # (N, 1), the meshes, or (N, 2), the meshes and their labels
    _fingerprints: NDArray[np.int64]  # (N, 1, 2) or (N, 2, 2)
    _labels: NDArray[np.int64] | Numbering  # (N,), one label for each mesh, or how labels in files are numbered

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, key: int) -> LabeledMesh: ...
    @overload
    def __getitem__(self, key: slice) -> IndexedMeshes: ...
    def __getitem__(self, key: int | slice) -> LabeledMesh | IndexedMeshes:
        if isinstance(key, slice):
            arrays: dict[str, Any] = {name: x[key] for name, x in vars(self).items() if isinstance(x, np.ndarray)}
            return replace(self, **arrays)
        paths = [Path(os.fsdecode(name)) for name in self._files[key]]
        for path, own in zip(paths, self._fingerprints[key].tolist(), strict=True):
            if fingerprint(path) != tuple(own):
                raise DataError(f"{path}: the file has changed since the data set was indexed. Index it again")
        mesh = load_mesh(paths[0], self._cache_dir)
        if isinstance(self._labels, Numbering):
            labels = self._labels.labels(mesh, read_source(paths[1]))
        else:
            labels = np.asarray(self._labels[key])
        return LabeledMesh(os.fsdecode(self._names[key]), mesh, labels)

    @property
    def paths(self) -> list[str]:
        """The mesh files, for `fill_cache`."""
        return [os.fsdecode(name) for name in self._files[:, 0]]

    def digest(self, i: int) -> int:
        """A number that is another one if item i, its files or its label have changed."""
        label = 0 if isinstance(self._labels, Numbering) else int(self._labels[i])
        content = self._names[i], self._files[i].tolist(), self._fingerprints[i].tolist(), label
        digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def __repr__(self) -> str:
        return f"IndexedMeshes({counted(len(self), 'mesh', 'meshes')}, {int(self.vertex_counts.sum())} vertices)"


@dataclass(frozen=True, repr=False)
class IndexedDataset(LabeledMeshes):
    """A data set whose meshes and labels are read when needed, see `index_dataset` and `index_classes`."""

    train: IndexedMeshes
    test: IndexedMeshes


def index_dataset(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    needs_train: bool = True,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set that `load_dataset` reads, for sets that are larger than the memory: items are read when needed.

    `train` and `test` are `IndexedMeshes`. The first call reads all files and stores an index in the cache folder: the
    numbers of vertices and faces, which labels occur, and size and time of modification of each file. Later calls read
    files that are new or whose size or time differs. Processes can share the folder.

    path, layout, test_fraction, seed, needs_train: see `load_dataset`. Shards give the set of `load_shards`.
    cache_dir: a folder for the index, parsed meshes and operators, see `precompute`. If it can't be written, there is a
        warning, and the next call reads all files again.
    jobs: number of worker processes that read files; by default one for each core. See `precompute_all` for calls from
        a script.

    Items are those of `load_dataset`, without soft labels. Labels in another order than the elements are not noticed.
    Raises DataError for the same faults as `load_dataset`, also for meshes that can't be read. The message names the
    files. What is known of the other files is stored first.
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    root = Path(path)
    files = find_files(root, layout, test_fraction, seed, needs_train)
    parts = files.parts if needs_train else ([], files.parts[1])
    meshes = [mesh for part in parts for mesh in part]
    labels = [file for part in files.labels for file in part]
    found = indexed(root, meshes, labels, cache_dir, jobs)
    names, numbers, classes = _number(files, labels, [facts for _, facts in found.labels])
    labels, label_facts = labels[-len(meshes) :], found.labels[-len(meshes) :]
    at = _find_elements(
        meshes, [facts for _, facts in found.meshes], labels, [facts for _, facts in label_facts], files.at
    )
    if needs_train:
        check_classes(root, names)
    items = _items(
        list(map(mesh_stem, meshes)), [meshes, labels], found.meshes, label_facts, Numbering(classes, at), cache_dir
    )
    return IndexedDataset(items[: len(parts[0])], items[len(parts[0]) :], names, at, numbers)


def index_classes(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    needs_train: bool = True,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set for classification that `load_classes` reads, with items that are read when needed.

    path, test_fraction, seed, needs_train: see `load_classes`
    cache_dir, jobs: see `index_dataset`, also for the index and what is raised
    """
    if (shards := labeled_shards(path, cache_dir, needs_train)) is not None:
        return shards
    (train, test), names = find_rows(Path(path), test_fraction, seed, needs_train)
    rows = [*train, *test]
    meshes = [row.path for row in rows]
    found = indexed(Path(path), meshes, [], cache_dir, jobs)
    place = {name: i for i, name in enumerate(names)}
    labels = np.array([place[row.label] for row in rows], np.int64)
    items = _items([row.name for row in rows], [meshes], found.meshes, [], labels, cache_dir)
    return IndexedDataset(items[: len(train)], items[len(train) :], names, "meshes")


def _items(
    names: Sequence[str],
    files: Sequence[Sequence[Path]],
    meshes: Sequence[tuple[Fingerprint, MeshFacts]],
    sources: Sequence[tuple[Fingerprint, LabelFacts]],
    labels: NDArray[np.int64] | Numbering,
    cache_dir: str | os.PathLike[str],
) -> IndexedMeshes:
    prints = [[own for own, _ in part] for part in (meshes, sources)[: len(files)]]
    return IndexedMeshes(
        vertex_counts=np.array([own.vertices for _, own in meshes], np.int64),
        face_counts=np.array([own.faces for _, own in meshes], np.int64),
        _cache_dir=os.fspath(cache_dir),
        _names=np.array(list(map(os.fsencode, names))),
        _files=np.stack([np.array(list(map(os.fsencode, part))) for part in files], 1),
        _fingerprints=np.stack([np.array(part, np.int64) for part in prints], 1),
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
    """The elements that are labeled. Raises DataError where the number of labels doesn't fit, except for edges.

    at: the elements, if the layout tells
    """
    different: dict[tuple[Any, ...], int] = {}
    for i, (sizes, own) in enumerate(zip(mesh_facts, label_facts, strict=True)):
        different.setdefault((sizes, own.rows, own.at, meshes[i].suffix), i)
    kept = list(different.values())
    like_meshes = [_mesh_of(meshes[i], mesh_facts[i]) for i in kept]
    like_labels = [_labels_of(labels[i], label_facts[i]) for i in kept]
    if at is None:
        at = find_labels_at(like_meshes, like_labels)
    for i, mesh, source in zip(kept, like_meshes, like_labels, strict=True):
        if label_facts[i].rows >= 0 and at != "edges":  # the number of edges is not in the index
            check_fit(mesh, label_facts[i].rows, at, source.path)
    return at


def _mesh_of(path: Path, facts: MeshFacts) -> Mesh:
    """A mesh with the sizes of a file, without its content. Its arrays take no memory."""
    zeros = np.broadcast_to(np.int64(0), (facts.faces,))
    verts, faces = np.broadcast_to(0.0, (facts.vertices, 3)), np.broadcast_to(np.int64(0), (facts.faces, 3))
    return Mesh(verts, faces, zeros, facts.polygons, str(path), path=str(path))


def _labels_of(path: Path, facts: LabelFacts) -> FileLabels:
    values = np.broadcast_to(np.int64(0), (max(facts.rows, 0),))
    return FileLabels(path, facts.kind, values, facts.names, facts.at)
