"""Training meshes with other proportions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from diffnet.data.derived import generator_of
from diffnet.data.pairs.shapes import Ints, MeshPairs, PairShape
from diffnet.geometry.mesh.objects import unit_normals


def with_stretched(data: MeshPairs, stretch: float) -> MeshPairs:
    """The set with a stretched copy of each training mesh. The copies take part in the pairs of their meshes.

    stretch: S > 0. A copy is scaled along three random orthogonal axes, by factors from exp(−S) to exp(S).

    A pair of meshes becomes four. A copy has the faces and the correspondences of its mesh. It depends on the mesh and
    S alone, so another run finds its operators in the cache.
    """
    count = len(data.train)
    pairs = [(i + a, j + b) for i, j in data.train_pairs for a in (0, count) for b in (0, count)]
    copies = [_stretched(shape, stretch) for shape in data.train]
    names = {shape.name: copy.name for shape, copy in zip(data.train, copies, strict=True)}
    return replace(
        data, train=data.train + copies, train_pairs=pairs, maps={**data.maps, **dict(_renamed(data.maps, names))}
    )


def _stretched(shape: PairShape, stretch: float) -> PairShape:
    mesh = shape.mesh
    rng = generator_of(mesh)
    axes, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    factors = np.exp(rng.uniform(-stretch, stretch, 3))
    normals = None if mesh.normals is None else unit_normals(mesh.normals @ (axes / factors) @ axes.T)
    name = f"{shape.name}, stretched"
    verts = mesh.verts @ (axes * factors) @ axes.T
    return replace(shape, name=name, mesh=replace(mesh, verts=verts, normals=normals, name=f"{mesh.name}, stretched"))


def _renamed(maps: Mapping[tuple[str, str], Ints], names: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], Ints]]:
    """The maps of pairs in which one or both meshes are copies."""
    for (first, second), own in maps.items():
        if first in names and second in names:
            yield (names[first], second), own
            yield (first, names[second]), own
            yield (names[first], names[second]), own
