"""Partial copies of the meshes of a set of pairs, to train on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diffnet.data.derived import generator_of
from diffnet.data.options import Variants
from diffnet.data.pairs.shapes import MeshPairs, Pair, PairShape
from diffnet.geometry import Mesh, MeshPart, cut_by_plane, make_mesh
from diffnet.geometry.augmentation.reduction import cut_holes, cut_to_view, largest_component
from diffnet.geometry.elements.elements import face_areas

MOST_HOLES = 3
TRIES = 20
WHOLE_SHARE = 1 / 4  # of the pairs of copies: the first mesh is whole, and the same for the second


def with_partial_copies(data: MeshPairs, variants: Variants, seed: int) -> MeshPairs:
    """The set with mirror images of its training meshes and partial copies of both, and with pairs of these.

    variants: the number of copies of each mesh, `count`, and the largest share of the area that they lack, `cut`
    seed: decides the pairs

    Each pair becomes `count` pairs of copies at random, in turn of the meshes and of their mirror images. So left and
    right keep their partners, and there are twice as many poses. In a quarter of the pairs the first mesh is whole, and
    in another quarter the second one. Copies depend on the mesh and `variants` alone, see `partial_copies`.
    """
    if not variants.count:
        return data
    wholes, count = [*data.train, *map(mirror_image, data.train)], (variants.count + 1) // 2
    copies = [copy for shape in wholes for copy in partial_copies(shape, count, variants.cut)]
    rng = np.random.default_rng(seed)
    pairs: list[Pair] = []
    for pair in data.train_pairs:
        chance, sides = rng.random(variants.count), np.arange(variants.count) % 2
        chosen = np.array(pair) + len(data.train) * sides[:, None]
        parts = len(wholes) + count * chosen + rng.integers(count, size=chosen.shape)
        is_whole = np.stack([chance < WHOLE_SHARE, (chance >= WHOLE_SHARE) & (chance < 2 * WHOLE_SHARE)], 1)
        pairs += [(i, j) for i, j in np.where(is_whole, chosen, parts).tolist()]
    return replace(data, train=[*wholes, *copies], train_pairs=pairs)


def mirror_image(shape: PairShape) -> PairShape:
    """A whole shape at negative x, with the numbers of its vertices."""
    mesh, name = shape.mesh, f"{shape.name}, mirrored"
    image = make_mesh(mesh.verts * [-1, 1, 1], mesh.faces[:, ::-1], name=name)
    return PairShape(name, image, None, shape.folder, whole=shape, vertices=np.arange(len(mesh.verts)))


def partial_copies(shape: PairShape, count: int, cut: float) -> list[PairShape]:
    """Parts of a whole shape that are cut by a plane, have holes, or are what a camera sees, in turn.

    Shares are random, one in each of `count` equal intervals from 0 to `cut`. The largest connected part stays.
    """
    rng, whole = generator_of(shape.mesh), shape.whole or shape
    shares = cut * (np.arange(count) + rng.random(count)) / count
    copies = []
    for number, share in enumerate(rng.permutation(shares).tolist(), 1):
        part, name = random_part(shape.mesh, number, share, cut, rng), f"{shape.name}, part {number}"
        mesh = replace(part.mesh, name=name)
        copies.append(PairShape(name, mesh, None, shape.folder, whole=whole, vertices=part.vertices))
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
