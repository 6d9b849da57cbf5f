"""The meshes of a set with their labels: read when they are asked for, or all at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.folders.index import Facts, MeshFacts, facts_of, identity_of, indexed, read_file
from diffnet.data.folders.labels import Columns, Numbering
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.stored import StoredMeshes, content_hash
from diffnet.geometry.file_state import FileIdentity, hashed

# (N, …), the labels or targets of each mesh, or how labels in files are numbered, or the columns in files
Labels: TypeAlias = "NDArray[Any] | Numbering | Columns"
Files: TypeAlias = Mapping[str, Sequence[Path]]  # by their kinds, see `indexed`
Conditions: TypeAlias = "NDArray[np.float64]"  # (N, C), a row for each mesh, and its targets in a table at the end
FileFacts: TypeAlias = dict[str, list[Facts]]  # what is known of them


@dataclass(frozen=True, eq=False, repr=False)
class IndexedMeshes(StoredMeshes):
    """The meshes of a part of a data set. Item i is read from its files each time it is asked for.

    It holds no mesh, and about 300 bytes for each, so it can be sent to worker processes.

    vertex_counts, face_counts: (N,) int64, of the meshes

    An item raises DataError or MeshError, which names the file, if a file is missing, can't be read, or is not the one
    that was indexed.
    """

    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    cache_dir: str
    _names: NDArray[np.bytes_]  # an array takes less than strings
    _files: NDArray[np.bytes_]  # (N, 1 + P), the meshes, and the files of their labels or targets
    _states: NDArray[np.int64]  # (N, 1 + P), see `FileIdentity`
    _bytes: NDArray[np.bytes_]  # (N, 1 + P), hashes of the bytes of the files
    _contents: NDArray[np.bytes_]  # (N, 1 + P), hashes of what was read from them
    _labels: Labels
    _conditions: NDArray[np.float64]  # (N, C)

    def item(self, number: int) -> LabeledMesh:
        paths = [Path(os.fsdecode(name)) for name in self._files[number]]
        for path, state, content in zip(paths, self._states[number].tolist(), self._bytes[number], strict=True):
            before = FileIdentity(state, content.decode())
            if identity_of(path, before).content != before.content:
                raise DataError(f"{path}: the file has changed since the data set was indexed. Index it again")
        kinds = () if isinstance(self._labels, np.ndarray) else self._labels.kinds
        contents = [read_file(kind, path, self.cache_dir) for kind, path in zip(("mesh", *kinds), paths, strict=True)]
        return _labeled(os.fsdecode(self._names[number]), contents, self._labels, number, self._conditions)

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
        more = self._conditions[i : i + 1].tolist() if self._conditions.size else []
        return hashed(self._names[i].tolist(), self._bytes[i].tolist(), self._contents[i].tolist(), label, *more)

    @property
    def mesh_labels(self) -> NDArray[Any] | None:
        return self._labels if isinstance(self._labels, np.ndarray) else None

    def _of_meshes(self) -> list[NDArray[Any]]:
        """The labels and the conditions of the meshes, if they have any that no file of a mesh holds."""
        labels = [] if self.mesh_labels is None else [self.mesh_labels]
        return labels + ([self._conditions] if self._conditions.size else [])

    @property
    def contents(self) -> list[list[str]]:
        hashes: list[list[str]] = [[digest.decode() for digest in row] for row in self._contents]
        for values in self._of_meshes():
            hashes = [[*row, repr(value)] for row, value in zip(hashes, values.tolist(), strict=True)]
        return hashes

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
        content = content_hash(self._names, self._bytes, self._contents, *self._of_meshes())
        return hashlib.sha256(f"{content} {self.meaning}".encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, repr=False)
class IndexedDataset(LabeledMeshes):
    """A data set whose meshes and labels are read when needed, see `index_dataset` and `index_classes`."""

    train: StoredMeshes
    test: StoredMeshes
    validation: StoredMeshes = field(kw_only=True)


@dataclass(frozen=True)
class Index:
    """The files of a set, of which an index keeps what is known. See `indexed`. Their meshes are `IndexedMeshes`."""

    root: Path
    cache_dir: str | os.PathLike[str]
    jobs: int | None
    dataset: ClassVar = IndexedDataset

    def facts(self, files: Files, edges: bool = False) -> FileFacts:
        """What is known of the files, by their kinds, see `indexed`. edges: whether those of meshes matter"""
        return indexed(self.root, files, self.cache_dir, self.jobs)

    def items(
        self, names: Sequence[str], files: Files, facts: FileFacts, labels: Labels, conditions: Conditions
    ) -> IndexedMeshes:
        """The meshes with their labels. files: the meshes, and then the files of their labels. facts: of these"""
        sizes: list[MeshFacts] = [size for _, size in facts["mesh"]]
        rows = list(zip(*(facts[kind] for kind in files), strict=True))
        shape = len(names), len(files)

        def table(values: list[Any]) -> NDArray[Any]:
            return np.array(values).reshape(shape)

        return IndexedMeshes(
            vertex_counts=np.array([size.vertices for size in sizes], np.int64),
            face_counts=np.array([size.faces for size in sizes], np.int64),
            cache_dir=os.fspath(self.cache_dir),
            _names=np.array(list(map(os.fsencode, names))),
            _files=table([list(map(os.fsencode, row)) for row in zip(*files.values(), strict=True)]),
            _states=table([[identity.state for identity, _ in row] for row in rows]),
            _bytes=table([[identity.content.encode() for identity, _ in row] for row in rows]),
            _contents=table([[content.content.encode() for _, content in row] for row in rows]),
            _labels=labels,
            _conditions=conditions,
        )


class Whole:
    """The files of a set, which are read at once. Their meshes are lists. It has the methods of `Index`."""

    dataset: ClassVar = LabeledMeshes

    def __init__(self, cache_dir: str | os.PathLike[str] | None) -> None:
        self.cache_dir = cache_dir
        self._contents: dict[str, list[Any]] = {}

    def facts(self, files: Files, edges: bool = False) -> FileFacts:
        # Meshes come last: labels load fast, so their faults show before minutes of reading meshes.
        for kind in [*files][::-1]:
            self._contents[kind] = [read_file(kind, path, self.cache_dir) for path in files[kind]]
        nothing, facts = FileIdentity(0, ""), partial(facts_of, edges=edges, hashes=False)
        return {kind: [(nothing, facts(content)) for content in self._contents[kind]] for kind in files}

    def items(
        self, names: Sequence[str], files: Files, facts: FileFacts, labels: Labels, conditions: Conditions
    ) -> list[LabeledMesh]:
        contents = zip(*(self._contents[kind][-len(names) :] for kind in files), strict=True)
        rows = enumerate(zip(names, contents, strict=True))
        return [_labeled(name, row, labels, i, conditions) for i, (name, row) in rows]


def _labeled(name: str, contents: Sequence[Any], labels: Labels, number: int, conditions: Conditions) -> LabeledMesh:
    """contents: of the file of a mesh, and of those of its labels. number: of the mesh"""
    mesh, *sources = contents
    count = conditions.shape[1] - (len(labels.of_table) if isinstance(labels, Columns) else 0)
    row, targets = np.split(conditions[number], [count])
    values = labels[number] if isinstance(labels, np.ndarray) else labels.labels(mesh, sources, targets)
    file = sources[0].path if isinstance(labels, Numbering) else None
    return LabeledMesh(name, mesh, np.asarray(values), conditions=row, label_file=file)
