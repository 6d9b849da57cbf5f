"""Sequences of meshes that are read when they are asked for: their changes and joins, and what the cache keeps of each.

An index (`folders/indexed.py`), shards and derived meshes are such sequences.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabeledMesh, counted
from diffnet.data.options import Preprocessing
from diffnet.geometry import MeshLike
from diffnet.geometry.processes import WorkerPool, available_cores
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry

CHUNK = 32  # items that a worker process takes in one call

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LazySequence(Sequence[T_co]):
    """A sequence whose items are computed. Iterating over it raises the IndexError of a computation.

    Iterating over a plain `Sequence` ends at an IndexError, as if there were no more items.
    """

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))


class OnDemand(LazySequence[T_co]):
    """N items, of which none is kept in memory.

    compute: the item of a number from 0 to N - 1
    """

    def __init__(self, count: int, compute: Callable[[int], T_co]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(self._count))]
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self._compute(i)


class SampleFacts(NamedTuple):
    """What is known of a sample without reading it.

    name: of the mesh
    entry, operators: the names of its two cache entries, or "" if the item gives its operators
    vertices, faces, edges, entries: V, F, E, and the nonzeros of the gradient. Edges are counted only if they have
        labels, and may be 0 if the item gives its operators.
    """

    name: str
    entry: str
    operators: str
    vertices: int
    faces: int
    edges: int
    entries: int


class StoredMeshes(LazySequence[LabeledMesh]):
    """Labeled meshes that are read each time they are asked for. Objects are small, so worker processes can get them.

    They are dataclasses, whose arrays have a row for each mesh.

    vertex_counts, face_counts: (N,) int64, of the meshes
    names: of the meshes
    cache_dir: the folder that keeps what is found out about them, or None
    key: a hash of everything that the items depend on
    """

    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    cache_dir: str | None

    @property
    @abstractmethod
    def key(self) -> str: ...

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @property
    def contents(self) -> list[list[str]] | None:
        """For each mesh, a hash of its content, and hashes of that of its labels. None if they aren't known."""
        return None

    @property
    def meaning(self) -> str:
        """What the labels of `contents` mean."""
        return ""

    @property
    def mesh_labels(self) -> NDArray[Any] | None:
        """(N, …), the labels or targets of the meshes where they are known without reading files, else None."""
        return None

    def check_options(self, options: Preprocessing) -> None:
        """Raises OptionError, which names both values, if there are operators that were computed with other options."""

    def operator_facts(self) -> list[SampleFacts | None]:
        """What is known of the meshes whose items give their operators, see `LabeledMesh.prepared`. None for others."""
        return [None] * len(self)

    def take(self, numbers: NDArray[np.int64] | slice) -> StoredMeshes:
        """Some of the meshes."""
        arrays: dict[str, Any] = {name: x[numbers] for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return replace(self, **arrays)  # type: ignore[type-var]

    @abstractmethod
    def item(self, number: int) -> LabeledMesh:
        """Read a mesh."""

    def file(self, number: int) -> str | None:
        """The file of a mesh, or None if its mesh is not the content of one."""
        return None

    def place(self, number: int) -> tuple[StoredMeshes, int]:
        """The sequence that reads a mesh, and its number there."""
        return self, number

    def __len__(self) -> int:
        return len(self.vertex_counts)

    @overload
    def __getitem__(self, key: int) -> LabeledMesh: ...
    @overload
    def __getitem__(self, key: slice) -> StoredMeshes: ...
    def __getitem__(self, key: int | slice) -> LabeledMesh | StoredMeshes:
        if isinstance(key, slice):
            return self.take(key)
        if not -len(self) <= key < len(self):
            raise IndexError(f"there are {len(self)} meshes, and no mesh {key}")
        return self.item(key % len(self))

    def __repr__(self) -> str:
        meshes = counted(len(self), "mesh", "meshes")
        return f"{type(self).__name__}({meshes}, {int(self.vertex_counts.sum())} vertices)"


@dataclass(frozen=True, eq=False, repr=False)
class MeshView(StoredMeshes):
    """Several sequences of stored meshes, one after the other, and a change of their labels.

    change: see `with_change`, or None
    about: tells the change
    """

    parts: tuple[StoredMeshes, ...]
    change: Callable[[LabeledMesh], LabeledMesh] | None = None
    about: str = ""

    @cached_property
    def vertex_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return np.concatenate([part.vertex_counts for part in self.parts])

    @cached_property
    def face_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return np.concatenate([part.face_counts for part in self.parts])

    @property
    def cache_dir(self) -> str | None:  # type: ignore[override]
        return self.parts[0].cache_dir

    def check_options(self, options: Preprocessing) -> None:
        for part in self.parts:
            part.check_options(options)

    def operator_facts(self) -> list[SampleFacts | None]:
        return [facts for part in self.parts for facts in part.operator_facts()]

    @cached_property
    def key(self) -> str:
        keys = [part.key for part in self.parts] + [self.about] * bool(self.change)
        return hashlib.sha256(" ".join(keys).encode(errors="surrogatepass")).hexdigest()

    @property
    def contents(self) -> list[list[str]] | None:
        hashes_of_parts = [part.contents for part in self.parts]
        return None if None in hashes_of_parts else [hashes for part in hashes_of_parts for hashes in part or ()]

    @property
    def meaning(self) -> str:
        return f"{self.parts[0].meaning} {self.about}" if self.change else ""

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    def take(self, numbers: NDArray[np.int64] | slice) -> StoredMeshes:
        positions = np.arange(len(self))[numbers]
        rows = [(part, positions - first) for part, first in self._firsts()]
        return replace(self, parts=tuple(part.take(row[(row >= 0) & (row < len(part))]) for part, row in rows))

    def item(self, number: int) -> LabeledMesh:
        part, row = self._part(number)
        return self.change(part.item(row)) if self.change else part.item(row)

    def file(self, number: int) -> str | None:
        part, row = self._part(number)
        return part.file(row)

    def place(self, number: int) -> tuple[StoredMeshes, int]:
        part, row = self._part(number)
        return part.place(row)

    def _part(self, number: int) -> tuple[StoredMeshes, int]:
        return next((part, number - first) for part, first in self._firsts() if number < first + len(part))

    def _firsts(self) -> Iterator[tuple[StoredMeshes, int]]:
        return zip(self.parts, accumulate((len(part) for part in self.parts), initial=0), strict=False)


def joined(parts: Sequence[Sequence[LabeledMesh]]) -> Sequence[LabeledMesh]:
    """The meshes of several sequences. Those that are stored stay there."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    stored = tuple(part for part in filled if isinstance(part, StoredMeshes))
    if filled and len(stored) == len(filled):
        return MeshView(stored)
    places = [(part, i) for part in filled for i in range(len(part))]
    return OnDemand(len(places), lambda n: places[n][0][places[n][1]])


def with_change(
    items: Sequence[LabeledMesh], change: Callable[[LabeledMesh], LabeledMesh], *about: Any
) -> Sequence[LabeledMesh]:
    """The meshes with a change of their labels. Those that are stored are changed whenever they are read.

    change: picklable; leaves the mesh as it is
    about: plain values that tell the change, and a fixed name first
    """
    if isinstance(items, StoredMeshes):
        return MeshView((items,), change, json.dumps(about))
    return [change(item) for item in items]


def vertex_counts_of(items: Sequence[LabeledMesh]) -> NDArray[np.int64]:
    """(N,), of the meshes. No stored mesh is read."""
    counts: NDArray[np.int64] | None = getattr(items, "vertex_counts", None)
    return np.array([len(item.mesh.verts) for item in items], np.int64) if counts is None else counts


def check_stored_options(parts: Sequence[Sequence[LabeledMesh]], options: Preprocessing) -> None:
    """Raises OptionError, which names both values, if meshes have operators that were computed with other options."""
    for part in parts:
        if isinstance(part, StoredMeshes):
            part.check_options(options)


def some_of(items: Sequence[LabeledMesh], most: int) -> Sequence[LabeledMesh]:
    """At most so many of the meshes, at equal distances."""
    numbers = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(np.int64)
    return items.take(numbers) if isinstance(items, StoredMeshes) else [items[i] for i in numbers.tolist()]


def names_of(items: Sequence[LabeledMesh]) -> list[str]:
    """The names of meshes, which are not read."""
    return items.names if isinstance(items, StoredMeshes) else [item.name for item in items]


def sources_of(items: Sequence[LabeledMesh], numbers: Sequence[int]) -> Sequence[MeshLike]:
    """Some of the meshes for `fill_cache`, which are read when they are needed."""
    file: Callable[[int], str | None] = getattr(items, "file", lambda i: None)
    return OnDemand(len(numbers), lambda n: file(numbers[n]) or items[numbers[n]].mesh)


def computed(
    work: Callable[[S], T], items: Sequence[S], jobs: int | None = None, size: int = CHUNK
) -> Iterator[tuple[int, T]]:
    """The position and the result of each item, as they come. Worker processes take several items in one call.

    work: picklable
    items: read once each
    jobs: number of processes; by default one for each core. If it is 1, this process does the work.
    size: the most items in one call

    See `precompute_all` for calls from a script. Raises the errors of `work`.
    """
    starts = range(0, len(items), size)
    jobs = min(jobs or available_cores(), len(starts))
    if jobs <= 1:
        for start in starts:
            yield from enumerate(map(work, items[start : start + size]), start)
        return
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        running = {pool.submit(_results, work, items[start : start + size]): start for start in starts}
        for future in as_completed(running):
            yield from enumerate(future.result(), running[future])


def _results(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    return list(map(work, items))


def remembered(
    work: Callable[[LabeledMesh], Any],
    items: Sequence[LabeledMesh],
    *about: Any,
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    is_long: bool = False,
) -> list[Any]:
    """The result of a function for each mesh, which the cache keeps if the meshes are stored.

    work: picklable; its results are plain values that JSON can hold
    about: plain values that tell the function, and a fixed name first
    jobs: number of worker processes; by default one for each core
    advance: called for each mesh when it is done, unless the results are in the cache
    is_long: whether the work on a mesh takes longer than sending it to a process, some milliseconds

    Raises the errors of `work`. See `precompute_all` for calls from a script.
    """
    results = recalled(items, *about)
    if results is None:
        results = [None] * len(items)
        jobs = jobs if is_long or isinstance(items, StoredMeshes) else 1  # others take as long to send
        for i, result in computed(work, items, jobs, 1 if is_long else CHUNK):
            results[i] = result
            advance()
        remember(results, items, *about)
    return results


def recalled(items: Sequence[LabeledMesh], *about: Any) -> list[Any] | None:
    """What `remember` has stored about each of these meshes, or None."""
    if not isinstance(items, StoredMeshes) or items.cache_dir is None:
        return None
    place = _facts_path(items.cache_dir, items.key, about)
    results: list[Any] = []

    def check(arrays: Arrays) -> None:
        results[:] = json.loads(arrays["facts"].tobytes())
        if len(results) != len(items):
            raise ValueError(f"it holds {len(results)} facts, not {len(items)}")

    return None if read_entry(place, check) is None else results


def remember(results: Sequence[Any], items: Sequence[LabeledMesh], *about: Any) -> None:
    """Store plain values, one for each mesh, if the meshes are stored."""
    if isinstance(items, StoredMeshes) and items.cache_dir is not None:
        content = np.frombuffer(json.dumps(results).encode(), np.uint8)
        write_entry(_facts_path(items.cache_dir, items.key, about), {"facts": content})


def _facts_path(cache_dir: str, key: str, about: Sequence[Any]) -> Path:
    return entry_path(cache_dir, cache_key({}, facts=about, of=key), "facts")


def content_hash(*arrays: NDArray[Any]) -> str:
    """A hash of the shapes and the content of arrays: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
