"""Meshes that are made from others, with their labels and own arrays: decimated ones and variants."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import own_arrays
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.data.options import Variants
from diffnet.data.places import changed_rows, row_numbers, rows_at
from diffnet.data.shards.records import labeled_mesh, mesh_arrays
from diffnet.data.stored import StoredMeshes, remembered
from diffnet.geometry import (
    ElementsAt,
    Mesh,
    closest_points,
    cut_by_plane,
    decimate,
    element_points,
    element_weights,
    mesh_edges,
)
from diffnet.geometry.elements.elements import edge_numbers, majority
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, has_entry, read_entry, write_entry

# The form of the meshes in the cache. It changes with what is made from a mesh, so that earlier results are not taken.
FORM = "derived 4"
FEWEST_FACES = 4  # of a decimated mesh
# Three elements (N, 3) int64 of a mesh for each of N elements of another one, and their weights (N, 3), with sum 1.
Weights: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.float64]]"
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

    def back(self, number: int) -> Weights | None:
        """The weights that take outputs to the elements of the mesh that this one is made from, or None."""
        return self._read(number)[1]

    def origin(self, number: int) -> LabeledMesh:
        """The mesh that this one is made from."""
        return self._items[int(self.origins[number])]

    def _read(self, number: int) -> Made:
        path = entry_path(self.cache_dir, os.fsdecode(self._entries[number]), "derived")
        entry = read_entry(path)
        if entry is not None:
            return _from_arrays(entry)
        pair = self._make(self.origin(number))[int(self._ranks[number])]
        write_entry(path, _as_arrays(pair))
        return pair

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self._entries.tobytes()).hexdigest()


def derived(
    items: Sequence[LabeledMesh], make: Make, *about: Any, cache_dir: str | os.PathLike[str], **how: Any
) -> DerivedMeshes:
    """The meshes that a function makes from each mesh, in order. They are made in worker processes and stored.

    make: picklable. about, how: see `remembered`. By default, the work on a mesh takes long.

    If the cache can't be written, there are warnings, and each mesh is made again whenever it is asked for. Raises the
    errors of `make`.
    """
    work = partial(_stored, make=make, about=json.dumps(about), cache_dir=os.fspath(cache_dir))
    rows = remembered(work, items, FORM, *about, **{"is_long": True, **how})
    flat = [(*row, origin, rank) for origin, meshes in enumerate(rows) for rank, row in enumerate(meshes)]
    entries = np.array([name.encode() for name, *_ in flat], dtype="S64")
    vertices, faces, origins, ranks = np.array([numbers for _, *numbers in flat], np.int64).reshape(-1, 4).T.copy()
    return DerivedMeshes(vertices, faces, origins, os.fspath(cache_dir), items, make, entries, ranks)


def _stored(item: LabeledMesh, make: Make, about: str, cache_dir: str) -> list[tuple[str, int, int]]:
    """The name, vertices and faces of each mesh that is made from this one."""
    content = _content(item)
    rows = []
    for rank, pair in enumerate(make(item)):
        name = cache_key(content, about=about, name=item.name, rank=rank, form=FORM)
        path = entry_path(cache_dir, name, "derived")
        if not has_entry(path):
            write_entry(path, _as_arrays(pair))
        rows.append((name, len(pair[0].mesh.verts), len(pair[0].mesh.faces)))
    return rows


def _content(item: LabeledMesh) -> Arrays:
    return mesh_arrays(item, item.arrays) | ({"conditions": item.conditions} if len(item.conditions) else {})


def _as_arrays(pair: Made) -> Arrays:
    item, back = pair
    arrays = _content(item) | {"name": np.frombuffer(item.name.encode(errors="surrogatepass"), np.uint8)}
    named = {} if back is None else {"elements": back[0], "weights": back[1]}
    return arrays | {name: np.ascontiguousarray(x) for name, x in named.items()}


def _from_arrays(arrays: Arrays) -> Made:
    item = labeled_mesh(arrays, arrays["name"].tobytes().decode(errors="surrogatepass"), "vertices")
    back = (arrays["elements"], arrays["weights"]) if "weights" in arrays else None
    return replace(item, conditions=arrays.get("conditions", item.conditions)), back


def interpolation_weights(target: Mesh, source: Mesh, at: TargetsAt) -> Weights:
    """The elements of `source` and their weights that give the values at each element of `target`.

    They are those of the point of the source's surface that is nearest to the element, see `element_weights`. Values at
    vertices are linear on each face. Elements are at their centers, see `element_points`. At several places, elements
    are rows of `rows_at`.
    """
    if at == "meshes":
        return np.zeros((1, 3), np.int64), np.array([[1.0, 0.0, 0.0]])
    if isinstance(at, tuple):
        each = rows_at(row_numbers(source, at), len(source.verts), at)
        parts = [(rows, *interpolation_weights(target, source, place)) for place, rows in each]
        return np.concatenate([rows[of] for rows, of, _ in parts]), np.concatenate([weights for *_, weights in parts])
    return element_weights(source, closest_points(source, element_points(target, at)), at)


def decimated(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int | None,
    features: str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> LabeledMesh:
    """A labeled mesh with at most `max_faces` faces, see `decimate`. A mesh with fewer stays as it is.

    Each element of the full mesh votes at the element of the decimated mesh that is nearest to it. The most frequent
    label wins, of equally frequent ones the smallest. An element without votes gets the label of the full mesh at its
    own place. Own arrays among the features are interpolated.

    Raises DataError for an own array that can't be used, MeshError if decimation leaves no face.
    """
    small, arrays = with_few_faces(item.mesh, own_arrays(item.mesh, features, given=item.arrays), max_faces, cache_dir)
    if small is item.mesh:
        return item
    labels = changed_rows(
        item.labels, len(item.mesh.verts), at, lambda labels, place: transferred_labels(labels, item.mesh, small, place)
    )
    return LabeledMesh(item.name, small, labels, arrays, conditions=item.conditions)


def decimated_to_score(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int | None,
    features: str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[LabeledMesh, Weights | None]:
    """A decimated mesh with the labels of the full mesh, and the weights that take outputs back to the full mesh.

    A mesh with at most `max_faces` faces stays as it is, and has no weights. For the rest, see `decimated`.
    """
    small, arrays = with_few_faces(item.mesh, own_arrays(item.mesh, features, given=item.arrays), max_faces, cache_dir)
    if small is item.mesh:
        return item, None
    back = None if at == "meshes" else interpolation_weights(item.mesh, small, at)
    return replace(item, mesh=small, arrays=arrays, prepared=None), back


def with_few_faces(
    mesh: Mesh,
    arrays: Mapping[str, NDArray[np.float64]],
    max_faces: int | None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Mesh, dict[str, NDArray[np.float64]]]:
    """A mesh with at most `max_faces` faces, see `decimate`, and its own arrays (V, C), interpolated."""
    small = mesh if max_faces is None else decimate(mesh, max_faces, cache_dir)
    if small is mesh or not arrays:
        return small, dict(arrays)
    elements, weights = interpolation_weights(small, mesh, "vertices")
    return small, {name: np.einsum("nk,nkc->nc", weights, array[elements]) for name, array in arrays.items()}


def transferred_labels(labels: NDArray[Any], source: Mesh, target: Mesh, at: ElementsAt) -> NDArray[Any]:
    """Labels (N,) of one mesh at the elements of another mesh of the same surface, see `decimated`.

    Floating-point targets (N,) or (N, C) are interpolated instead. Where one of those that are used is NaN, so is the
    result.
    """
    if labels.dtype.kind == "f":
        elements, weights = interpolation_weights(target, source, at)
        return np.einsum("nk,nk...->n...", weights, labels[elements])
    elements, weights = element_weights(target, closest_points(target, element_points(source, at)), at)
    votes = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
    points = element_points(target, at)
    winners = majority(labels, np.arange(len(labels)), votes, len(points))
    silent = np.flatnonzero(np.bincount(votes, minlength=len(points)) == 0)
    if len(silent):
        elements, weights = element_weights(source, closest_points(source, points[silent]), at)
        winners[silent] = labels[np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]]
    return winners


def make_decimated(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int,
    features: str,
    cache_dir: str | os.PathLike[str] | None,
    to_score: bool,
) -> list[Made]:
    """A mesh with at most `max_faces` faces, with its own arrays. to_score: as `decimated_to_score`"""
    # The file beside which own arrays are isn't stored.
    item = replace(item, arrays=own_arrays(item.mesh, features, given=item.arrays))
    if to_score:
        return [decimated_to_score(item, at, max_faces, features, cache_dir)]
    return [(decimated(item, at, max_faces, features, cache_dir), None)]


def generator_of(mesh: Mesh) -> np.random.Generator:
    """A generator of random numbers that depend on the vertices and the faces of a mesh alone."""
    return np.random.default_rng(zlib.crc32(mesh.faces.tobytes(), zlib.crc32(mesh.verts.tobytes())))


def make_variants(item: LabeledMesh, at: TargetsAt, variants: Variants, features: str = "xyz") -> list[LabeledMesh]:
    """Variants of a labeled mesh, each with its labels and own arrays.

    at: where its labels are
    features: the input features; their own arrays (`file:NAME`) follow the mesh, see `own_arrays`

    Each variant is cut by a plane of random direction, and then decimated. Shares are random, one in each of `count`
    equal intervals from 0 to the largest share. A cut leaves the elements that stay as they are, with their labels and
    arrays. Labels and arrays of decimated meshes are those of `decimated`. Point clouds are not decimated.

    Variants depend on the mesh and these options alone, so another run finds their operators in the cache.

    Raises DataError for an own array that is missing.
    """
    if not variants.count:
        return []
    arrays: Mapping[str, NDArray[Any]] = own_arrays(item.mesh, features, given=item.arrays)
    whole = replace(item, arrays=arrays)
    rng = generator_of(item.mesh)
    levels = (np.arange(variants.count) + rng.random((2, variants.count))) / variants.count
    results = []
    for number, (cut, share) in enumerate(zip(levels[0], rng.permutation(levels[1]), strict=True), 1):
        direction, variant = rng.normal(size=3), whole
        if variants.cut:
            variant = _cut(variant, at, direction, cut * variants.cut)
        if variants.decimate and not item.mesh.is_point_cloud:
            most = max(round((1 - share * variants.decimate) * len(variant.mesh.faces)), FEWEST_FACES)
            variant = decimated(variant, at, most, features)
        name = f"{item.name}, variant {number}"
        results.append(replace(variant, name=name, mesh=replace(variant.mesh, name=name)))
    return results


def make_all_variants(item: LabeledMesh, at: TargetsAt, variants: Variants, features: str) -> list[Made]:
    """The variants of a mesh, see `make_variants`."""
    return [(variant, None) for variant in make_variants(item, at, variants, features)]


def _cut(item: LabeledMesh, at: TargetsAt, direction: NDArray[np.float64], share: float) -> LabeledMesh:
    """The part beside a plane. Its elements and the arrays at its vertices have the labels and rows of the item."""
    part = cut_by_plane(item.mesh, direction, share)
    rows = {"vertices": part.vertices, "faces": part.faces}
    if at == "edges":
        rows["edges"] = edge_numbers(item.mesh.faces, part.vertices[mesh_edges(part.mesh.faces)])
    labels = changed_rows(item.labels, len(item.mesh.verts), at, lambda labels, place: labels[rows[place]])
    arrays = {name: x[part.vertices] for name, x in item.arrays.items()}
    return LabeledMesh(item.name, part.mesh, labels, arrays, conditions=item.conditions)
