"""Meshes that are made from others, such as decimated ones and variants, in the cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import own_arrays
from diffnet.data.decimation import Weights, decimated, decimated_to_score
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.data.options import Variants
from diffnet.data.stored import StoredMeshes, remembered
from diffnet.data.variants import make_variants
from diffnet.geometry import Mesh
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, has_entry, read_entry, write_entry

Made: TypeAlias = "tuple[LabeledMesh, Weights | None]"  # a mesh, and what takes outputs back to the one it is made from
Make: TypeAlias = Callable[[LabeledMesh], "Sequence[Made]"]


@dataclass(frozen=True, eq=False, repr=False)
class DerivedMeshes(StoredMeshes):
    """Meshes that a function makes from others, see `derived`. The cache keeps them, with their labels and arrays.

    origins: (N,) int64, the number of the mesh that each is made from
    """

    vertex_counts: NDArray[np.int64]
    face_counts: NDArray[np.int64]
    origins: NDArray[np.int64]
    cache_dir: str
    _items: Sequence[LabeledMesh]
    _make: Make
    _entries: NDArray[np.bytes_]  # their names without folders
    _ranks: NDArray[np.int64]  # among those that are made from the same mesh

    def item(self, number: int) -> LabeledMesh:
        return self._read(number)[0]

    @property
    def names(self) -> list[str]:
        return [item.name for item in self]

    def file(self, number: int) -> None:
        return None

    def back(self, number: int) -> Weights | None:
        """The weights that take outputs to the elements of the mesh that this one is made from, or None."""
        return self._read(number)[1]

    def origin(self, number: int) -> LabeledMesh:
        """The mesh that this one is made from."""
        return self._items[int(self.origins[number])]

    def _read(self, number: int) -> Made:
        path = _path(self.cache_dir, os.fsdecode(self._entries[number]))
        entry = read_entry(path)
        if entry is not None:
            return _from_arrays(entry)
        made = self._make(self.origin(number))[int(self._ranks[number])]
        write_entry(path, _as_arrays(made))
        return made

    def take(self, numbers: NDArray[np.int64] | slice) -> DerivedMeshes:
        arrays: dict[str, Any] = {name: x[numbers] for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return replace(self, **arrays)

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self._entries.tobytes()).hexdigest()


def derived(
    items: Sequence[LabeledMesh],
    make: Make,
    *about: Any,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    is_long: bool = True,
) -> DerivedMeshes:
    """The meshes that a function makes from each mesh, in order. They are made in worker processes and stored.

    make: picklable
    about: plain values that tell the function, and a fixed name first
    is_long: whether it takes longer than sending a mesh to a process, which takes some milliseconds

    If the cache can't be written, there are warnings, and each mesh is made again whenever it is asked for. Raises the
    errors of `make`.
    """
    work = partial(_stored, make=make, about=json.dumps(about), cache_dir=os.fspath(cache_dir))
    rows = remembered(work, items, "derived", *about, jobs=jobs, advance=advance, is_long=is_long)
    flat = [(*own, origin, rank) for origin, made in enumerate(rows) for rank, own in enumerate(made)]
    entries, vertices, faces, origins, ranks = zip(*flat, strict=True) if flat else ((), (), (), (), ())
    return DerivedMeshes(
        vertex_counts=np.array(vertices, np.int64),
        face_counts=np.array(faces, np.int64),
        origins=np.array(origins, np.int64),
        cache_dir=os.fspath(cache_dir),
        _items=items,
        _make=make,
        _entries=np.array([name.encode() for name in entries], dtype="S64"),
        _ranks=np.array(ranks, np.int64),
    )


def _stored(item: LabeledMesh, make: Make, about: str, cache_dir: str) -> list[tuple[str, int, int]]:
    """The name, vertices and faces of each mesh that is made from this one."""
    mesh = item.mesh
    content = {"verts": mesh.verts, "faces": mesh.faces, "labels": np.asarray(item.labels)}
    content |= {f"array {name}": np.asarray(x) for name, x in item.arrays.items()}
    rows = []
    for rank, made in enumerate(make(item)):
        name = cache_key(content, about=about, name=item.name, rank=rank)
        path = _path(cache_dir, name)
        if not has_entry(path):
            write_entry(path, _as_arrays(made))
        rows.append((name, len(made[0].mesh.verts), len(made[0].mesh.faces)))
    return rows


def _path(cache_dir: str, name: str) -> Path:
    return entry_path(cache_dir, name, "derived")


def _as_arrays(made: Made) -> Arrays:
    item, back = made
    mesh = item.mesh
    arrays: Arrays = {"verts": mesh.verts, "faces": mesh.faces, "labels": np.asarray(item.labels)}
    arrays["name"] = np.frombuffer(item.name.encode(errors="surrogatepass"), np.uint8)
    arrays |= {f"array {name}": np.asarray(x) for name, x in item.arrays.items()}
    arrays |= {} if mesh.normals is None else {"normals": mesh.normals}
    arrays |= {} if item.accepted is None else {"accepted": item.accepted.astype(np.uint8)}
    arrays |= {} if back is None else {"elements": back[0], "weights": back[1]}
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def _from_arrays(arrays: Arrays) -> Made:
    name = arrays["name"].tobytes().decode(errors="surrogatepass")
    faces = arrays["faces"]
    mesh = Mesh(arrays["verts"], faces, np.arange(len(faces)), len(faces), name, arrays.get("normals"))
    own = {key.removeprefix("array "): x for key, x in arrays.items() if key.startswith("array ")}
    accepted = arrays["accepted"].astype(bool) if "accepted" in arrays else None
    back = (arrays["elements"], arrays["weights"]) if "weights" in arrays else None
    return LabeledMesh(name, mesh, arrays["labels"], own, accepted), back


def make_decimated(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int,
    features: str,
    cache_dir: str | os.PathLike[str] | None,
    to_score: bool,
) -> list[Made]:
    """A mesh with at most `max_faces` faces, with its own arrays. to_score: as `decimated_to_score`"""
    if to_score:
        made = decimated_to_score(item, at, max_faces, features, cache_dir)
    else:
        made = decimated(item, at, max_faces, features, cache_dir), None
    if made[0].mesh is item.mesh:  # the file beside which own arrays are isn't stored
        made = replace(item, arrays=own_arrays(item.mesh, features, given=item.arrays)), None
    return [made]


def make_all_variants(item: LabeledMesh, at: TargetsAt, variants: Variants, features: str) -> list[Made]:
    """The variants of a mesh, see `make_variants`."""
    return [(variant, None) for variant in make_variants(item, at, variants, features)]
