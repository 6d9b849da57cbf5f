"""The generated data set for classification: bodies with four bent limbs, which differ by the kinds of their limbs.

A body is made of tapered bones, which are blended into one skin. Marching cubes make its triangles.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from diffnet.data.labeled import LabeledMesh, LabeledMeshes
from diffnet.geometry import make_mesh

Floats: TypeAlias = NDArray[np.float64]
Surface: TypeAlias = "tuple[Floats, NDArray[np.int64]]"

# A club has a ball at its end, a bead has one in the middle, and a twin has both. A fork has two prongs. A cone gets
# wider toward its end.
LIMBS = ("plain", "club", "bead", "fork", "thick", "cone", "twin")
_LIMB_COUNT = 4
_CLASSES = tuple(combinations(LIMBS, _LIMB_COUNT))

# Lengths of the skeleton. Meshes are scaled at the end.
_BODY = (0.09, 0.105)
_LENGTH = (0.27, 0.36)
_RADIUS = (0.027, 0.031)
_SPACING = (0.025, 0.029)
_SCALE = (0.5, 2.0)
_HOLE = (0.03, 0.045)
_BEND = 35.0  # degrees, at each of two joints of a limb
_APART = 65.0  # degrees, between two limbs at least
_ATTEMPTS = 200

# The distance over which bones blend into each other. The skin is where Σ exp(-distance / _BLEND) = 1. At a larger
# distance than _REACH from its surface, a bone adds less than 0.4 % of this sum.
_BLEND = 0.017
_REACH = 6 * _BLEND


class _Bone(NamedTuple):
    """A bone from `start` to `end`, each (3,), with a radius at each of them."""

    start: Floats
    end: Floats
    first: float
    last: float

    def distances(self, x: Floats, y: Floats, z: Floats) -> Floats:
        """The distances to the surface at coordinates that broadcast against each other. Negative inside."""
        (sx, sy, sz), (ax, ay, az) = self.start, self.end - self.start
        along = ((x - sx) * ax + (y - sy) * ay + (z - sz) * az) / (ax * ax + ay * ay + az * az)
        along = np.clip(along, 0.0, 1.0)
        to_axis = np.sqrt((x - sx - along * ax) ** 2 + (y - sy - along * ay) ** 2 + (z - sz - along * az) ** 2)
        return np.asarray(to_axis - (self.first + (self.last - self.first) * along), np.float64)


def shapes(classes: int = 30, train: int = 16, test: int = 4, seed: int = 0) -> LabeledMeshes:
    """Generate bodies with four limbs, in classes that differ by the kinds of the limbs.

    classes: number of classes, 2 to 35
    train, test: number of meshes of each class in each split, ≥ 1
    seed: ≥ 0. Equal seeds give equal arrays.

    A limb is plain or thick, has a ball at its end (club), in the middle (bead) or at both places (twin), has two
    prongs (fork), or gets wider toward its end (cone). A class is a choice of four different kinds, and its name lists
    them.

    Everything else is random: the size of the body, the length, the thickness, the direction and the bending of each
    limb, rotation and scale of the mesh, and the grid from which marching cubes makes about 1,000 vertices. Half of the
    meshes have one or two holes in the body.

    Raises ValueError for a count out of range and a negative seed.

    >>> data = shapes(classes=3, train=1, test=1)
    >>> data.label_names, len(data.train)
    (['plain+club+bead+fork', 'plain+club+bead+thick', 'plain+club+bead+cone'], 3)
    """
    if not 2 <= classes <= len(_CLASSES):
        raise ValueError(f"classes should be 2 to {len(_CLASSES)}, got {classes}")
    for name, value, least in (("train", train, 1), ("test", test, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} should be at least {least}, got {value}")
    parts = [
        [_mesh(f"{name}_{label:02d}_{i:02d}", label, [seed, part, label, i]) for label in range(classes) for i in every]
        for part, (name, every) in enumerate((("train", range(train)), ("test", range(test))))
    ]
    names = ["+".join(limbs) for limbs in _CLASSES[:classes]]
    return LabeledMeshes(train=parts[0], test=parts[1], label_names=names, labels_at="meshes")


def _mesh(name: str, label: int, seeds: list[int]) -> LabeledMesh:
    rng = np.random.default_rng(seeds)
    for _ in range(_ATTEMPTS):
        bones = _skeleton(_CLASSES[label], rng.uniform(*_BODY), rng)
        turn = _any_rotation(rng)
        bones = [bone._replace(start=turn.apply(bone.start), end=turn.apply(bone.end)) for bone in bones]
        surface = _polygonize(bones, rng.uniform(*_SPACING))
        if surface is None:  # limbs touch each other
            continue
        verts, faces = _with_holes(*surface, rng) if rng.random() < 0.5 else surface
        verts = _any_rotation(rng).apply(verts) * rng.uniform(*_SCALE)
        return LabeledMesh(name, make_mesh(verts, faces, name=name), np.array(label, np.int64))
    raise RuntimeError(f"{name}: no shape passed all checks in {_ATTEMPTS} attempts")


def _any_rotation(rng: np.random.Generator) -> Rotation:
    return Rotation.from_quat(rng.normal(size=4))  # uniform over all rotations


def _skeleton(limbs: tuple[str, ...], body: float, rng: np.random.Generator) -> list[_Bone]:
    bones = [_Bone(np.array([0, 0, -0.01]), np.array([0, 0, 0.01]), body, body)]
    for kind, direction in zip(rng.permutation(limbs).tolist(), _directions(rng), strict=True):
        bones += _limb(kind, direction, body, rng)
    return bones


def _directions(rng: np.random.Generator) -> Floats:
    """A unit vector for each limb, (4, 3), no two of them close to each other."""
    while True:
        directions = rng.normal(size=(_LIMB_COUNT, 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        cosines = directions @ directions.T - 2 * np.eye(_LIMB_COUNT)
        if cosines.max() < np.cos(np.radians(_APART)):
            return directions


def _limb(kind: str, direction: Floats, body: float, rng: np.random.Generator) -> list[_Bone]:
    """The bones of a limb: three that bend, and those of its kind."""
    length, radius = rng.uniform(*_LENGTH), rng.uniform(*_RADIUS)
    first, last = {"thick": (1.75, 1.75), "cone": (0.9, 2.2)}.get(kind, (1.0, 1.0))
    balls = {"bead": (1,), "twin": (1, 2), "club": (2,)}.get(kind, ())
    start, bones = 0.7 * body * direction, []
    for step in range(3):
        end = start + length / 3 * direction
        radii = [radius * (first + (last - first) * share / 3) for share in (step, step + 1)]
        bones.append(_Bone(start, end, *radii))
        if step in balls:
            center = (start + end) / 2 if step == 1 else end
            bones.append(_Bone(center, center + 0.005 * direction, 2.2 * radius, 2.2 * radius))
        start = end
        if step < 2:
            axis = np.cross(direction, rng.normal(size=3))
            axis *= np.radians(rng.uniform(-_BEND, _BEND)) / np.linalg.norm(axis)
            direction = Rotation.from_rotvec(axis).apply(direction)
    if kind == "fork":
        side = np.cross(direction, rng.normal(size=3))
        side /= np.linalg.norm(side)
        for sign in (-1, 1):
            tip = start + 0.13 * (0.62 * direction + sign * 0.78 * side)
            bones.append(_Bone(start, tip, 0.85 * radius, 0.75 * radius))
    return bones


def _polygonize(bones: list[_Bone], spacing: float) -> Surface | None:
    """The skin by marching cubes, oriented outward. None if it is not one closed surface of genus 0."""
    import trimesh
    from skimage.measure import marching_cubes  # both are slow to import, and no other data set needs them here

    ends = np.array([[bone.start, bone.end] for bone in bones])
    reach = max(max(bone.first, bone.last) for bone in bones) + _REACH + spacing
    low, high = ends.min(axis=(0, 1)) - reach, ends.max(axis=(0, 1)) + reach
    axes = [np.arange(a, b, spacing) for a, b in zip(low, high, strict=True)]
    total = np.full([len(a) for a in axes], np.exp(-_REACH / _BLEND))
    for bone, places in zip(bones, ends, strict=True):
        # The part of the grid within reach of the bone is small, which makes this fast.
        radius = max(bone.first, bone.last) + _REACH
        limits = zip(places.min(axis=0) - radius, places.max(axis=0) + radius, strict=True)
        box = tuple(slice(*np.searchsorted(a, limit)) for a, limit in zip(axes, limits, strict=True))
        x, y, z = (a[part] for a, part in zip(axes, box, strict=True))
        total[box] += np.exp(-bone.distances(x[:, None, None], y[:, None], z) / _BLEND)
    field = -_BLEND * np.log(total)
    # If the skin passes close to a grid point, marching cubes makes slivers. This keeps it a little away.
    field = np.where(np.abs(field) < 0.1 * spacing, np.copysign(0.1 * spacing, field), field)
    verts, faces, _, _ = marching_cubes(  # type: ignore[no-untyped-call]
        field, 0.0, spacing=(spacing,) * 3, gradient_direction="descent"
    )
    surface = trimesh.Trimesh(verts.astype(np.float64) + low, faces, process=False)
    is_sphere = surface.is_watertight and surface.euler_number == 2 and surface.body_count == 1
    return (np.asarray(surface.vertices), faces.astype(np.int64)) if is_sphere else None


def _with_holes(verts: Floats, faces: NDArray[np.int64], rng: np.random.Generator) -> Surface:
    """The surface without the triangles in one or two balls around random vertices of the body."""
    near = np.flatnonzero(np.linalg.norm(verts, axis=1) < 1.15 * _BODY[1])
    centers = verts[rng.choice(near, rng.integers(1, 3))]
    away = np.linalg.norm(verts[:, None] - centers, axis=2)
    inside = (away < rng.uniform(*_HOLE, size=len(centers))).any(axis=1)
    vertices, corners = np.unique(faces[~inside[faces].any(axis=1)], return_inverse=True)
    return verts[vertices], corners.reshape(-1, 3)
