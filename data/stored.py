"""Meshes that are read when they are asked for, changes of their labels, and facts about each that the cache keeps."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from diffnet.data.counts import counted
from diffnet.data.labeled import LabeledMesh
from diffnet.data.on_demand import LazySequence, OnDemand
from diffnet.data.options import Preprocessing
from diffnet.data.parallel import CHUNK, computed_for_all, computed_in_chunks
from diffnet.geometry import MeshLike
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry


class OperatorFacts(NamedTuple):
    """The name of a mesh, its vertices, faces, edges (0 if their number isn't known), and nonzeros of its gradient."""

    name: str
    vertices: int
    faces: int
    edges: int
    entries: int


class StoredMeshes(LazySequence[LabeledMesh]):
    """Labeled meshes that are read each time they are asked for. Objects are small, so worker processes can get them.

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

    def operator_facts(self) -> list[OperatorFacts | None]:
        """What is known of the meshes whose items give their operators, see `LabeledMesh.prepared`. None for others."""
        return [None] * len(self)

    @abstractmethod
    def take(self, numbers: NDArray[np.int64] | slice) -> StoredMeshes:
        """Some of the meshes."""

    @abstractmethod
    def item(self, number: int) -> LabeledMesh:
        """Read a mesh."""

    @abstractmethod
    def file(self, number: int) -> str | None:
        """The file of a mesh, or None if its mesh is not the content of one."""

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
class JoinedMeshes(StoredMeshes):
    """Several sequences of stored meshes, one after the other, see `joined`."""

    parts: tuple[StoredMeshes, ...]

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

    def operator_facts(self) -> list[OperatorFacts | None]:
        return [facts for part in self.parts for facts in part.operator_facts()]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(" ".join(part.key for part in self.parts).encode()).hexdigest()

    @property
    def contents(self) -> list[list[str]] | None:
        known = [part.contents for part in self.parts]
        return None if None in known else [own for part in known for own in part or ()]

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    def take(self, numbers: NDArray[np.int64] | slice) -> StoredMeshes:
        chosen = np.arange(len(self))[numbers]
        own = [chosen[(chosen >= first) & (chosen < first + len(part))] - first for part, first in self._firsts()]
        return JoinedMeshes(tuple(part.take(n) for part, n in zip(self.parts, own, strict=True)))

    def item(self, number: int) -> LabeledMesh:
        part, own = self.place(number)
        return part.item(own)

    def file(self, number: int) -> str | None:
        part, own = self.place(number)
        return part.file(own)

    def place(self, number: int) -> tuple[StoredMeshes, int]:
        """The part that has a mesh, and its number there."""
        return next((part, number - first) for part, first in self._firsts() if number < first + len(part))

    def _firsts(self) -> Iterator[tuple[StoredMeshes, int]]:
        return zip(self.parts, accumulate((len(part) for part in self.parts), initial=0), strict=False)


def check_stored_options(parts: Sequence[Sequence[LabeledMesh]], options: Preprocessing) -> None:
    """Raises OptionError, which names both values, if meshes have operators that were computed with other options."""
    for part in parts:
        if isinstance(part, StoredMeshes):
            part.check_options(options)


def joined(parts: Sequence[Sequence[LabeledMesh]]) -> Sequence[LabeledMesh]:
    """The meshes of several sequences. Those that are stored stay there."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    stored = tuple(part for part in filled if isinstance(part, StoredMeshes))
    if filled and len(stored) == len(filled):
        return JoinedMeshes(stored)
    places = [(part, i) for part in filled for i in range(len(part))]
    return OnDemand(len(places), lambda n: places[n][0][places[n][1]])


def names_of(items: Sequence[LabeledMesh]) -> list[str]:
    """The names of meshes, which are not read."""
    return items.names if isinstance(items, StoredMeshes) else [item.name for item in items]


def sources_of(items: Sequence[LabeledMesh], numbers: Sequence[int]) -> Sequence[MeshLike]:
    """Some of the meshes for `fill_cache`, which are read when they are needed."""

    file: Callable[[int], str | None] = getattr(items, "file", lambda i: None)

    def source(n: int) -> MeshLike:
        path = file(numbers[n])
        return items[numbers[n]].mesh if path is None else path

    return OnDemand(len(numbers), source)


@dataclass(frozen=True, eq=False, repr=False)
class ChangedMeshes(StoredMeshes):
    """Stored meshes with other labels, see `with_change`."""

    meshes: StoredMeshes
    change: Callable[[LabeledMesh], LabeledMesh]
    about: str

    @property
    def vertex_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.meshes.vertex_counts

    @property
    def face_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.meshes.face_counts

    @property
    def cache_dir(self) -> str | None:  # type: ignore[override]
        return self.meshes.cache_dir

    def check_options(self, options: Preprocessing) -> None:
        self.meshes.check_options(options)

    def operator_facts(self) -> list[OperatorFacts | None]:
        return self.meshes.operator_facts()

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(f"{self.meshes.key} {self.about}".encode(errors="surrogatepass")).hexdigest()

    @property
    def contents(self) -> list[list[str]] | None:
        return self.meshes.contents

    @property
    def meaning(self) -> str:
        return f"{self.meshes.meaning} {self.about}"

    @property
    def names(self) -> list[str]:
        return self.meshes.names

    def take(self, numbers: NDArray[np.int64] | slice) -> StoredMeshes:
        return ChangedMeshes(self.meshes.take(numbers), self.change, self.about)

    def item(self, number: int) -> LabeledMesh:
        return self.change(self.meshes.item(number))

    def file(self, number: int) -> str | None:
        return self.meshes.file(number)


def with_change(
    items: Sequence[LabeledMesh], change: Callable[[LabeledMesh], LabeledMesh], *about: Any
) -> Sequence[LabeledMesh]:
    """The meshes with a change of their labels. Those that are stored are changed whenever they are read.

    change: picklable; leaves the mesh as it is
    about: plain values that tell the change, and a fixed name first
    """
    if isinstance(items, StoredMeshes):
        return ChangedMeshes(items, change, json.dumps(about))
    return [change(item) for item in items]


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
    if not isinstance(items, StoredMeshes):
        return computed_for_all(work, items, lambda _: is_long, jobs, advance)
    found = recalled(items, *about)
    if found is None:
        found = [None] * len(items)
        size = 1 if is_long else CHUNK
        for i, result in computed_in_chunks(partial(results_of, work), items, jobs, size):
            found[i] = result
            advance()
        remember(found, items, *about)
    return found


def recalled(items: Sequence[LabeledMesh], *about: Any) -> list[Any] | None:
    """What `remember` has stored about each of these meshes, or None."""
    if not isinstance(items, StoredMeshes) or items.cache_dir is None:
        return None
    place = _facts_path(items.cache_dir, items.key, about)
    found: list[Any] = []

    def check(arrays: Arrays) -> None:
        found[:] = json.loads(arrays["facts"].tobytes())
        if len(found) != len(items):
            raise ValueError(f"it holds {len(found)} facts, not {len(items)}")

    return None if read_entry(place, check) is None else found


def remember(found: Sequence[Any], items: Sequence[LabeledMesh], *about: Any) -> None:
    """Store plain values, one for each mesh, if the meshes are stored."""
    if isinstance(items, StoredMeshes) and items.cache_dir is not None:
        content = np.frombuffer(json.dumps(found).encode(), np.uint8)
        write_entry(_facts_path(items.cache_dir, items.key, about), {"facts": content})


def _facts_path(cache_dir: str, key: str, about: Sequence[Any]) -> Path:
    return entry_path(cache_dir, cache_key({}, facts=about, of=key), "facts")


def results_of(work: Callable[[LabeledMesh], Any], items: Sequence[LabeledMesh]) -> list[Any]:
    return [work(item) for item in items]
