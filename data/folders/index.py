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

from diffnet.data.content import content_hash
from diffnet.data.folders.sources import read_source
from diffnet.data.folders.target_files import read_targets
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.data.parallel import computed_in_chunks
from diffnet.geometry import load_mesh
from diffnet.geometry.elements.polygons import file_edges
from diffnet.geometry.errors import DiffnetError, some_reasons
from diffnet.geometry.file_state import FileIdentity, file_identity, state_number
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry

CHUNK = 32  # files that a worker process reads in one call
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


class LabelFacts(NamedTuple):
    """What is known of the labels in a file, see `FileLabels`.

    rows: the number of labels, or -1 if the file names the elements that have them
    distinct: the distinct values
    content: a hash of the labels
    """

    rows: int
    kind: str
    at: LabelsAt | None
    names: list[str] | None
    distinct: list[int]
    content: str


class TargetFacts(NamedTuple):
    """What is known of the columns of targets in a file.

    at: the elements, or None if the number of rows decides
    known: for each column, whether there is a target
    content: a hash of the targets
    """

    rows: int
    names: list[str]
    at: LabelsAt | None
    known: list[bool]
    content: str


Facts: TypeAlias = "tuple[FileIdentity, Any]"
_Known: TypeAlias = dict[str, dict[str, Facts]]  # by kind and path


def indexed(
    root: Path, files: Mapping[str, Sequence[Path]], cache_dir: str | os.PathLike[str], jobs: int | None
) -> dict[str, list[Facts]]:
    """The identities of files of the data set in `root` and what is known of them, in the order of the files.

    files: by their kinds, "mesh", "labels", "targets NAME" and "other". Files that are new or have changed are read.
    jobs: number of worker processes that read them; by default one for each core

    Raises DataError, which names the files, if some can't be used. The index of the others is stored first.
    """
    place = index_path(root, cache_dir)
    here = os.getcwd()  # `os.path.abspath` takes several times as long as `join`
    wanted = {kind: [os.path.join(here, path) for path in paths] for kind, paths in files.items()}
    known = _read(place)
    wanting = [
        (kind, os.fspath(path), own, number)
        for kind, paths in files.items()
        for number, (path, name) in enumerate(zip(paths, wanted[kind], strict=True), -len(paths))
        if (own := known.get(kind, {}).get(name)) is None or own[0].state != state_number(path)
    ]
    if wanting:
        stale = [work[:3] for work in wanting]
        describe = partial(describe_files, cache_dir=cache_dir)
        failed: list[str] = []
        meshes: set[int] = set()  # that have failed, by their numbers from the end: files of labels come in their order
        stored = time.monotonic()
        new: _Known = {}
        try:
            for position, result in computed_in_chunks(describe, stale, jobs, CHUNK):
                kind, path, _, number = wanting[position]
                if isinstance(result, str):
                    failed.append(result)
                    meshes.add(number)
                else:
                    new.setdefault(kind, {})[os.path.join(here, path)] = result
                if time.monotonic() - stored > STORED_EVERY:
                    _store(place, new)
                    stored = time.monotonic()
        finally:
            if new:
                _store(place, new)
        if failed:
            total = max(map(len, files.values()))
            count = "" if total == 1 else f"{len(meshes)} of {total} meshes can't be used: "
            raise DataError(count + some_reasons(failed))
        known = _merged(known, new)
    return {kind: [known[kind][name] for name in names] for kind, names in wanted.items()}


_KINDS: dict[str, Any] = {"mesh": MeshFacts, "labels": LabelFacts, "targets": TargetFacts, "other": tuple}


def contents_of(paths: Sequence[Path], cache_dir: str | os.PathLike[str] | None, jobs: int | None = 1) -> list[str]:
    """A hash of the content of each file. Those that an index in the cache folder recognizes are not read.

    Raises DataError for files that can't be read.
    """
    if cache_dir is None or not paths:
        return [identity_of(path).content for path in paths]
    root = Path(os.path.commonpath(list(map(os.path.abspath, paths))))
    return [own.content for own, _ in indexed(root, {"other": paths}, cache_dir, jobs)["other"]]


def index_path(root: Path, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the index of the data set in a folder."""
    return entry_path(cache_dir, cache_key({}, identities_of=os.path.abspath(root)), "index")


def identity_of(path: str | os.PathLike[str], before: FileIdentity | None = None) -> FileIdentity:
    """`file_identity`. Raises DataError if the file is missing."""
    try:
        return file_identity(path, before)
    except OSError as e:
        raise DataError(f"{os.fspath(path)}: the file can't be read ({e.strerror})") from e


def _read(place: Path) -> _Known:
    """The stored index. Empty if there is none and, with a warning, if its file is damaged."""
    known: _Known = {}

    def check(arrays: Arrays) -> None:
        for kind, columns in json.loads(arrays["index"].tobytes()).items():
            paths, states, contents, *facts = columns
            make = _KINDS[kind.partition(" ")[0]]  # raises TypeError for another number
            own = map(make, *facts) if facts else repeat(make())
            known[kind] = dict(zip(paths, zip(map(FileIdentity, states, contents), own)))  # noqa: B905

    return {} if read_entry(place, check) is None else known


def _merged(known: _Known, new: _Known) -> _Known:
    return {kind: known.get(kind, {}) | new.get(kind, {}) for kind in known | new}


def _store(place: Path, new: _Known) -> None:
    """Add entries to the stored index, which another process may have extended meanwhile.

    Entries of files that are gone are dropped. If two processes write at the same moment, one of both indices stays,
    and the next start reads the files that it lacks.
    """
    columns = {}
    for kind, own in _merged(_read(place), new).items():
        kept = [path for path in own if path in new.get(kind, {}) or os.path.exists(path)]
        if kept:
            columns[kind] = list(zip(*((path, *own[path][0], *own[path][1]) for path in kept), strict=True))
    write_entry(place, {"index": np.frombuffer(json.dumps(columns).encode(), np.uint8)})


def describe_files(work: Sequence[tuple[str, str, Facts | None]], cache_dir: str | os.PathLike[str]) -> list[Any]:
    """Read files, given as (kind, path, what was known). Returns identity and facts, or an error message, for each."""
    return [_describe(kind, Path(path), known, cache_dir) for kind, path, known in work]


def _describe(kind: str, path: Path, known: Facts | None, cache_dir: str | os.PathLike[str]) -> Facts | str:
    before, facts = known or (None, None)
    try:
        own = identity_of(path, before)  # before reading: a file that changes meanwhile is then read again
        return own, facts if before is not None and own.content == before.content else read_facts(kind, path, cache_dir)
    except DiffnetError as e:
        return str(e)


def read_facts(kind: str, path: Path, cache_dir: str | os.PathLike[str]) -> Any:
    """Read a file. Returns what is known of it, as its kind in `_KINDS` says. Raises DataError or MeshError."""
    if kind == "other":
        return ()
    if kind == "mesh":
        mesh = load_mesh(path, cache_dir)
        sizes = len(mesh.verts), len(mesh.faces), mesh.polygon_count, len(file_edges(mesh))
        return MeshFacts(*sizes, content_hash(mesh.verts, mesh.faces))
    if kind != "labels":
        columns = read_targets(path, kind.partition(" ")[2])
        known: Any = (~np.isnan(columns.values)).any(0).tolist()
        rows = len(columns.values)
        return TargetFacts(rows, columns.names, columns.at, known, content_hash(columns.values))
    source = read_source(path)
    rows = -1 if source.elements is not None else len(source.values)
    content = content_hash(source.values, *([] if source.elements is None else [source.elements]))
    distinct: list[int] = np.unique(source.values).tolist()
    return LabelFacts(rows, source.kind, source.at, source.names, distinct, content)
