"""The index of a data set: what a start needs to know of each file, so that unchanged files aren't read again.

The cache folder keeps it in one file for each data set. Its entries don't depend on the layout and the split.
`diffnet.geometry.file_state` says what a file is recognized by.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from diffnet.data.feature_names import AUTO_LABELS
from diffnet.data.folders.sources import TARGETS, Fields, FileValues, read_fields, read_source, read_targets
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.data.stored import CHUNK, computed, content_hash
from diffnet.geometry import Mesh, load_mesh
from diffnet.geometry.elements.elements import file_edges
from diffnet.geometry.errors import DiffnetError, some_reasons
from diffnet.geometry.file_state import FileIdentity, file_identity, state_number
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry

STORED_EVERY = 60.0  # seconds, so that a build that is killed loses no more


class MeshFacts(NamedTuple):
    """What is known of a mesh file: the numbers of vertices, triangles, polygons and edges, without cuts.

    content: `content_hash` of the positions and the triangles
    """

    vertices: int
    faces: int
    polygons: int
    edges: int
    content: str

    def fits(self, count: int, at: LabelsAt) -> bool:
        """Whether the mesh has so many of these elements. Polygons of the file count as faces, too."""
        sizes = {"vertices": (self.vertices,), "edges": (self.edges,), "faces": (self.polygons, self.faces)}
        return count in sizes[at]

    def shown(self, at: LabelsAt) -> str:
        """How many of these elements the mesh has, for messages."""
        if at == "faces" and self.polygons != self.faces:
            return f"{self.polygons} faces ({self.faces} triangles)"
        return f"{getattr(self, at)} {at}"


class ValueFacts(NamedTuple):
    """What is known of the labels or targets in a file, see `FileValues`.

    rows: their number, or -1 if the file names the elements that have them
    distinct: the distinct labels; for each column of targets, whether there is one
    content: a hash of the values
    """

    rows: int
    kind: str
    at: LabelsAt | None
    names: list[str] | None
    distinct: list[int]
    content: str


Facts: TypeAlias = "tuple[FileIdentity, Any]"
_Known: TypeAlias = dict[tuple[str, str], Facts]  # by kind and path
_KINDS: dict[str, Any] = {
    "mesh": MeshFacts,
    "labels": ValueFacts,
    "targets": ValueFacts,
    "fields": Fields,
    "other": tuple,
}


def indexed(
    root: Path, files: Mapping[str, Sequence[Path]], cache_dir: str | os.PathLike[str], jobs: int | None
) -> dict[str, list[Facts]]:
    """The identities of files of the data set in `root` and what is known of them, in the order of the files.

    files: by their kinds, "mesh", "labels", "labels SOURCE", "targets NAME", "fields" and "other". Files that are new
        or have changed are read.
    jobs: number of worker processes that read them; by default one for each core

    Raises DataError, which names the files, if some can't be used. The index of the others is stored first.
    """
    place = index_path(root, cache_dir)
    here = os.getcwd()  # `os.path.abspath` takes several times as long as `join`
    keys = {kind: [(kind, os.path.join(here, path)) for path in paths] for kind, paths in files.items()}
    table = _read(place)
    stale = [
        (kind, os.fspath(path), facts)
        for kind, paths in files.items()
        for path, key in zip(paths, keys[kind], strict=True)
        if (facts := table.get(key)) is None or facts[0].state != state_number(path)
    ]
    if stale:
        describe = partial(describe_file, cache_dir=cache_dir)
        failed: dict[tuple[str, str], str] = {}
        new: _Known = {}
        stored = time.monotonic()
        try:
            for position, result in computed(describe, stale, jobs, CHUNK):
                kind, path, _ = stale[position]
                key = kind, os.path.join(here, path)
                if isinstance(result, str):
                    failed[key] = result
                else:
                    new[key] = result
                if time.monotonic() - stored > STORED_EVERY:
                    _store(place, new)
                    stored = time.monotonic()
        finally:
            if new:
                _store(place, new)
        if failed:
            # Files of labels are in the order of the meshes, and there may be more of them before.
            meshes = {n for entries in keys.values() for n, key in enumerate(entries, -len(entries)) if key in failed}
            total = max(map(len, files.values()))
            count = "" if total == 1 else f"{len(meshes)} of {total} meshes can't be used: "
            raise DataError(count + some_reasons([*failed.values()]))
        table |= new
    return {kind: [table[key] for key in entries] for kind, entries in keys.items()}


def contents_of(paths: Sequence[Path], cache_dir: str | os.PathLike[str] | None, jobs: int | None = 1) -> list[str]:
    """A hash of the content of each file. Those that an index in the cache folder recognizes are not read.

    Raises DataError for files that can't be read.
    """
    if cache_dir is None or not paths:
        return [identity_of(path).content for path in paths]
    root = Path(os.path.commonpath(list(map(os.path.abspath, paths))))
    return [identity.content for identity, _ in indexed(root, {"other": paths}, cache_dir, jobs)["other"]]


def index_path(root: Path, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the index of the data set in a folder."""
    return entry_path(cache_dir, cache_key({}, index_of=os.path.abspath(root)), "index")


def identity_of(path: str | os.PathLike[str], before: FileIdentity | None = None) -> FileIdentity:
    """`file_identity`. Raises DataError if the file is missing."""
    try:
        return file_identity(path, before)
    except OSError as e:
        raise DataError(f"{os.fspath(path)}: the file can't be read ({e.strerror})") from e


def _read(place: Path) -> _Known:
    """The stored index. Empty if there is none and, with a warning, if its file is damaged."""
    table: _Known = {}

    def check(arrays: Arrays) -> None:
        for kind, columns in json.loads(arrays["index"].tobytes()).items():
            paths, states, contents, *facts = columns
            make = _KINDS[kind.partition(" ")[0]]  # raises TypeError for another number
            each = map(make, *facts) if facts else repeat(make())
            table.update(zip(zip(repeat(kind), paths), zip(map(FileIdentity, states, contents), each)))  # noqa: B905

    return {} if read_entry(place, check) is None else table


def _store(place: Path, new: _Known) -> None:
    """Add entries to the stored index, which another process may have extended meanwhile.

    Entries of files that are gone are dropped. If two processes write at the same moment, one of both indices stays,
    and the next start reads the files that it lacks.
    """
    rows: dict[str, list[Any]] = {}
    for key, (identity, facts) in (_read(place) | new).items():
        kind, path = key
        if key in new or os.path.exists(path):
            rows.setdefault(kind, []).append((path, *identity, *facts))
    columns = {kind: list(zip(*entries, strict=True)) for kind, entries in rows.items()}
    write_entry(place, {"index": np.frombuffer(json.dumps(columns).encode(), np.uint8)})


def describe_file(work: tuple[str, str, Facts | None], cache_dir: str | os.PathLike[str]) -> Facts | str:
    """Read a file, given by kind, path and what was known of it. Returns identity and facts, or an error message."""
    kind, path, before = work
    try:
        identity = identity_of(path, before and before[0])  # before reading: a file that changes is then read again
        if before is not None and identity.content == before[0].content:
            return identity, before[1]
        return identity, () if kind == "other" else facts_of(read_file(kind, Path(path), cache_dir))
    except DiffnetError as e:
        return str(e)


def read_file(kind: str, path: Path, cache_dir: str | os.PathLike[str] | None) -> Any:
    """The content of a file: a mesh, or labels or targets of a mesh. Raises DataError or MeshError.

    kind: see `indexed`
    """
    if kind == "mesh":
        return load_mesh(path, cache_dir)
    if kind == "fields":
        return read_fields(path)
    values, _, name = kind.partition(" ")
    return read_source(path, name or AUTO_LABELS) if values == "labels" else read_targets(path, name)


def facts_of(content: Mesh | FileValues | Fields, *, edges: bool = True, hashes: bool = True) -> Any:
    """What the index knows of the content of a file: `MeshFacts`, `ValueFacts` or `Fields`.

    edges, hashes: whether edges are counted (else there are -1), and whether there are hashes. Both take time.
    """
    if isinstance(content, Mesh):
        count = len(file_edges(content)) if edges else -1
        digest = content_hash(content.verts, content.faces) if hashes else ""
        return MeshFacts(len(content.verts), len(content.faces), content.polygon_count, count, digest)
    if isinstance(content, Fields):
        return content
    values, elements = content.values, content.elements
    digest = content_hash(values, *([] if elements is None else [elements])) if hashes else ""
    distinct = (~np.isnan(values)).any(0) if content.kind == TARGETS else np.unique(values)
    rows = len(values) if elements is None else -1
    return ValueFacts(rows, content.kind, content.at, content.names, distinct.tolist(), digest)
