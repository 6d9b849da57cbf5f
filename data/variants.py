"""Variants of labeled training meshes: cut by random planes, and decimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import own_arrays
from diffnet.data.content import generator_of
from diffnet.data.decimation import decimated
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.data.options import Variants
from diffnet.geometry import Mesh, cut_by_plane, mesh_edges

FEWEST_FACES = 4  # of a decimated mesh


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
    found = []
    for number, (cut, decimate) in enumerate(zip(levels[0], rng.permutation(levels[1]), strict=True), 1):
        direction, variant = rng.normal(size=3), whole
        if variants.cut:
            variant = _cut(variant, at, direction, cut * variants.cut)
        if variants.decimate and not item.mesh.is_point_cloud:
            variant = _decimated(variant, at, decimate * variants.decimate, features)
        name = f"{item.name}, variant {number}"
        found.append(replace(variant, name=name, mesh=replace(variant.mesh, name=name)))
    return found


def _cut(item: LabeledMesh, at: TargetsAt, direction: NDArray[np.float64], share: float) -> LabeledMesh:
    part = cut_by_plane(item.mesh, direction, share)
    if at == "edges":
        count = len(item.mesh.verts)
        codes = _codes(mesh_edges(item.mesh.faces), count)
        order = np.argsort(codes)
        rows = order[np.searchsorted(codes, _codes(part.vertices[mesh_edges(part.mesh.faces)], count), sorter=order)]
    else:
        rows = part.faces if at == "faces" else part.vertices
    return _taken(item, part.mesh, at, rows, part.vertices)


def _decimated(item: LabeledMesh, at: TargetsAt, share: float, features: str) -> LabeledMesh:
    return decimated(item, at, max(round((1 - share) * len(item.mesh.faces)), FEWEST_FACES), features)


def _taken(
    item: LabeledMesh, mesh: Mesh, at: TargetsAt, rows: NDArray[np.int64], vertices: NDArray[np.int64]
) -> LabeledMesh:
    """The item with another mesh. Its elements have the labels of these rows, its vertices those of the arrays."""
    labels = item.labels if at == "meshes" else item.labels[rows]
    arrays = {name: x[vertices] for name, x in item.arrays.items()}
    return LabeledMesh(item.name, mesh, labels, arrays)


def _codes(edges: NDArray[np.int64], vertices: int) -> NDArray[np.int64]:
    """One number for each edge (E, 2), smaller index first."""
    return np.asarray(edges[:, 0] * vertices + edges[:, 1])
