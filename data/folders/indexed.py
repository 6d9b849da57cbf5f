"""Data sets whose meshes and labels are read when they are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.folders.index import LabelFacts, MeshFacts, fingerprint, indexed
from diffnet.data.folders.labels import check_fit, find_labels_at, place_labels
from diffnet.data.folders.layouts import Layout, SetFiles, check_classes, find_files
from diffnet.data.folders.sources import FileLabels, read_source
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem


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
    _files: NDArray[np.bytes_]  # (N, 2), the mesh and its labels; names in an array take less than strings
    _fingerprints: NDArray[np.int64]  # (N, 2, 2)
    _classes: dict[int | str, int]  # of the values in the label files
    _at: LabelsAt
    _cache_dir: str

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, key: int) -> LabeledMesh: ...
    @overload
    def __getitem__(self, key: slice) -> IndexedMeshes: ...
    def __getitem__(self, key: int | slice) -> LabeledMesh | IndexedMeshes:
        if isinstance(key, slice):
            parts = ("vertex_counts", "face_counts", "_files", "_fingerprints")
            return replace(self, **{name: getattr(self, name)[key] for name in parts})
        mesh, labels = (Path(os.fsdecode(name)) for name in self._files[key])
        for path, own in zip((mesh, labels), self._fingerprints[key].tolist(), strict=True):
            if fingerprint(path) != tuple(own):
                raise DataError(f"{path}: the file has changed since the data set was indexed. Index it again")
        source = read_source(labels)
        loaded = load_mesh(mesh, self._cache_dir)
        return LabeledMesh(mesh_stem(mesh), loaded, place_labels(loaded, self._numbered(source), self._at, source))

    def _numbered(self, source: FileLabels) -> NDArray[np.int64]:
        distinct, inverse = np.unique(source.values, return_inverse=True)
        own = [self._classes[key] for key in _keys(distinct, source.names)]
        return np.array(own, np.int64)[inverse.reshape(-1)]

    def __repr__(self) -> str:
        return f"IndexedMeshes({counted(len(self), 'mesh', 'meshes')}, {int(self.vertex_counts.sum())} vertices)"


@dataclass(frozen=True, repr=False)
class IndexedDataset(LabeledMeshes):
    """A data set whose meshes and labels are read when they are needed, see `index_dataset`."""

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
) -> IndexedDataset:
    """The data set that `load_dataset` reads, for sets that are larger than the memory: items are read when needed.

    `train` and `test` are `IndexedMeshes`. The first call reads all files and stores an index in the cache folder: the
    numbers of vertices and faces, which labels occur, and size and time of modification of each file. Later calls read
    files that are new or whose size or time differs. Processes can share the folder.

    path, layout, test_fraction, seed, needs_train: see `load_dataset`
    cache_dir: a folder for the index, parsed meshes and operators, see `precompute`. If it can't be written, there is a
        warning, and the next call reads all files again.
    jobs: number of worker processes that read files; by default one for each core. See `precompute_all` for calls from
        a script.

    Items are those of `load_dataset`, without soft labels. Labels in another order than the elements are not noticed.
    Raises DataError for the same faults as `load_dataset`, also for meshes that can't be read. The message names the
    files. What is known of the other files is stored first.
    """
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
    everything = IndexedMeshes(
        vertex_counts=np.array([own.vertices for _, own in found.meshes], np.int64),
        face_counts=np.array([own.faces for _, own in found.meshes], np.int64),
        _files=np.array([list(map(os.fsencode, pair)) for pair in zip(meshes, labels, strict=True)]),
        _fingerprints=np.array([(a, b) for (a, _), (b, _) in zip(found.meshes, label_facts, strict=True)], np.int64),
        _classes=classes,
        _at=at,
        _cache_dir=os.fspath(cache_dir),
    )
    count = len(parts[0])
    return IndexedDataset(everything[:count], everything[count:], names, at, numbers)


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
