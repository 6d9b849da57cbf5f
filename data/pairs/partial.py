"""Partial copies of the meshes of a set of pairs, to train on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diffnet.data.derived import generator_of
from diffnet.data.options import Variants
from diffnet.data.pairs.shapes import MeshPairs, Pair, PairShape
from diffnet.geometry import Mesh, MeshPart, cut_by_plane
from diffnet.geometry.augmentation.reduction import cut_holes, cut_to_view, largest_component
from diffnet.geometry.elements.elements import face_areas

MOST_HOLES = 3
TRIES = 20
WHOLE_SHARE = 1 / 4  # of the pairs of copies: the first mesh is whole, and the same for the second


def with_partial_copies(data: MeshPairs, variants: Variants, seed: int, *, of_one: bool = False) -> MeshPairs:
    """The set with partial copies of its training meshes, and with pairs of these.

    variants: the number of copies of each mesh, `count`, and the largest share of the area that they lack, `cut`
    seed: decides the pairs
    of_one: whether both copies of a pair are of one mesh, so that their correspondences are known. Each mesh then takes
        the places of pairs in turn.

    Each pair becomes `count` pairs of copies at random. In a quarter of them the first mesh is whole, and in another
    quarter the second one. Copies depend on the mesh and `variants` alone, see `partial_copies`.
    """
    if not variants.count:
        return data
    copies = [copy for shape in data.train for copy in partial_copies(shape, variants)]
    rng, first_copy = np.random.default_rng(seed), len(data.train)
    pairs: list[Pair] = []
    turns = ((i % first_copy, i % first_copy) for i in range(len(data.train_pairs)))
    for pair in turns if of_one else data.train_pairs:
        chance = rng.random(variants.count)
        parts = first_copy + variants.count * np.array(pair) + rng.integers(variants.count, size=(variants.count, 2))
        is_whole = np.stack([chance < WHOLE_SHARE, (chance >= WHOLE_SHARE) & (chance < 2 * WHOLE_SHARE)], 1)
        pairs += [(i, j) for i, j in np.where(is_whole, pair, parts).tolist()]
    return replace(data, train=[*data.train, *copies], train_pairs=pairs)


def partial_copies(shape: PairShape, variants: Variants) -> list[PairShape]:
    """Parts of a shape that are cut by a plane, have holes, or are what a camera sees, in turn.

    Shares are random, one in each of `count` equal intervals from 0 to `cut`. The largest connected part stays.
    """
    rng = generator_of(shape.mesh)
    shares = variants.cut * (np.arange(variants.count) + rng.random(variants.count)) / variants.count
    copies = []
    for number, share in enumerate(rng.permutation(shares).tolist(), 1):
        part, name = random_part(shape.mesh, number, share, variants.cut, rng), f"{shape.name}, part {number}"
        mesh = replace(part.mesh, name=name)
        copies.append(PairShape(name, mesh, None, shape.folder, whole=shape, vertices=part.vertices))
    return copies


def random_part(mesh: Mesh, kind: int, share: float, most: float, rng: np.random.Generator) -> MeshPart:
    """The largest connected part of a mesh without about this share of its area.

    kind: modulo 3: 0 for a plane, 1 for up to three holes, 2 for the view of a camera, at random places
    most: the largest share that may be missing. If more falls off, less is cut, at other places.
    """
    area, part = face_areas(mesh).sum(), cut_by_plane(mesh, [1, 0, 0], 0)
    for attempt in range(TRIES):
        less = share * (1 - attempt / TRIES)
        if kind % 3 == 1:
            centers = rng.integers(len(mesh.verts), size=rng.integers(1, MOST_HOLES + 1))
            part = cut_holes(mesh, centers, less)
        else:
            part = (cut_to_view if kind % 3 else cut_by_plane)(mesh, rng.normal(size=3), less)
        part = largest_component(part)
        if face_areas(part.mesh).sum() >= (1 - most) * area:
            break
    return part
