"""The index of a data set: what a start needs to know of each file, so that unchanged files aren't read again.

The cache folder keeps it in one file for each data set. Its entries don't depend on the layout and the split.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from diffnet.data.folders.sources import read_source
from diffnet.data.labeled import DataError, LabelsAt
from diffnet.geometry import load_mesh
from diffnet.geometry.cache import Arrays, cache_key, entry_path, read_entry, write_entry
from diffnet.geometry.errors import DiffnetError, some_reasons
from diffnet.geometry.processes import WorkerPool, available_cores

CHUNK = 32  # files that a worker process reads in one call
STORED_EVERY = 60.0  # seconds, so that a build that is killed loses no more

Fingerprint: TypeAlias = tuple[int, int]  # the size of a file in bytes and its time of modification in nanoseconds


class MeshFacts(NamedTuple):
    """What is known of a mesh file: the numbers of vertices, triangles and polygons."""

    vertices: int
    faces: int
    polygons: int


class LabelFacts(NamedTuple):
    """What is known of the labels in a file, see `FileLabels`.

    rows: the number of labels, or -1 if the file names the elements that have them
    distinct: the distinct values
    """

    rows: int
    kind: str
    at: LabelsAt | None
    names: list[str] | None
    distinct: list[int]


class SetIndex(NamedTuple):
    """The fingerprints of files and what is known of them, in the order of the files."""

    meshes: list[tuple[Fingerprint, MeshFacts]]
    labels: list[tuple[Fingerprint, LabelFacts]]


_Known: TypeAlias = dict[str, tuple[Fingerprint, list[Any]]]  # by "mesh:PATH" and "labels:PATH"


def indexed(
    root: Path, meshes: Sequence[Path], labels: Sequence[Path], cache_dir: str | os.PathLike[str], jobs: int | None
) -> SetIndex:
    """The index of these files of the data set in `root`. Files that are new or have changed are read.

    jobs: number of worker processes that read them; by default one for each core

    Raises DataError, which names the files, if some can't be used. The index of the others is stored first.
    """
    place = index_path(root, cache_dir)
    here = os.getcwd()  # `os.path.abspath` takes several times as long as `join`
    wanted = [f"mesh:{os.path.join(here, path)}" for path in meshes]
    wanted += [f"labels:{os.path.join(here, path)}" for path in labels]
    known = _read(place)
    paths = [*meshes, *labels]
    stale = [i for i, key in enumerate(wanted) if key not in known or known[key][0] != fingerprint(paths[i])]
    if stale:
        work = [(wanted[i].partition(":")[0], str(paths[i])) for i in stale]
        failed: list[str] = []
        stored = time.monotonic()
        new: _Known = {}
        try:
            for position, result in _described(work, cache_dir, jobs):
                if isinstance(result, str):
                    failed.append(result)
                else:
                    new[wanted[stale[position]]] = result
                if time.monotonic() - stored > STORED_EVERY:
                    _store(place, new)
                    stored = time.monotonic()
        finally:
            if new:
                _store(place, new)
        if failed:
            count = "" if len(paths) == 1 else f"{len(failed)} of {len(paths)} files can't be used: "
            raise DataError(count + some_reasons(failed))
        known |= new
    found = [known[key] for key in wanted]
    return SetIndex(
        [(own, MeshFacts(*facts)) for own, facts in found[: len(meshes)]],
        [(own, LabelFacts(*facts)) for own, facts in found[len(meshes) :]],
    )


def index_path(root: Path, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the index of the data set in a folder."""
    return entry_path(cache_dir, cache_key({}, index_of=os.path.abspath(root)), "index")


def fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """The size and the time of modification of a file. Raises DataError if it is missing."""
    try:
        stat = os.stat(path)
    except OSError as e:
        raise DataError(f"{os.fspath(path)}: the file can't be read ({e.strerror})") from e
    return stat.st_size, stat.st_mtime_ns


def _read(place: Path) -> _Known:
    """The stored index. Empty if there is none and, with a warning, if its file is damaged."""
    known: _Known = {}

    def check(arrays: Arrays) -> None:
        for key, size, modified, facts in json.loads(arrays["index"].tobytes()):
            known[key] = (size, modified), facts
            (MeshFacts if key.startswith("mesh:") else LabelFacts)(*facts)  # raises TypeError for another number

    return {} if read_entry(place, check) is None else known


def _store(place: Path, new: _Known) -> None:
    """Add entries to the stored index, which another process may have extended meanwhile.

    Entries of files that are gone are dropped. If two processes write at the same moment, one of both indices stays,
    and the next start reads the files that it lacks.
    """
    kept = {key: own for key, own in _read(place).items() if key in new or os.path.exists(key.partition(":")[2])}
    rows = [[key, *own, facts] for key, (own, facts) in (kept | new).items()]
    write_entry(place, {"index": np.frombuffer(json.dumps(rows).encode(), np.uint8)})


def _described(
    work: Sequence[tuple[str, str]], cache_dir: str | os.PathLike[str], jobs: int | None
) -> Iterator[tuple[int, Any]]:
    """For each (kind, path): its position, and its fingerprint with what is known of it, or an error message."""
    chunks = [range(i, min(i + CHUNK, len(work))) for i in range(0, len(work), CHUNK)]
    jobs = min(jobs or available_cores(), len(chunks))
    if jobs <= 1:
        for chunk in chunks:
            yield from zip(chunk, describe_files([work[i] for i in chunk], cache_dir), strict=True)
        return
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        running = {pool.submit(describe_files, [work[i] for i in chunk], cache_dir): chunk for chunk in chunks}
        for future in as_completed(running):
            yield from zip(running[future], future.result(), strict=True)


def describe_files(work: Sequence[tuple[str, str]], cache_dir: str | os.PathLike[str]) -> list[Any]:
    """Read files, given as (kind, path). Returns a fingerprint and facts, or an error message, for each."""
    return [_describe(kind, Path(path), cache_dir) for kind, path in work]


def _describe(kind: str, path: Path, cache_dir: str | os.PathLike[str]) -> tuple[Fingerprint, list[Any]] | str:
    try:
        own = fingerprint(path)  # before reading: a file that changes meanwhile is then read again
        if kind == "mesh":
            mesh = load_mesh(path, cache_dir)
            return own, [len(mesh.verts), len(mesh.faces), mesh.polygon_count]
        source = read_source(path)
    except DiffnetError as e:
        return str(e)
    rows = -1 if source.elements is not None else len(source.values)
    return own, [rows, source.kind, source.at, source.names, np.unique(source.values).tolist()]
