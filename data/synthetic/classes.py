"""The generated data set for classification: bodies with four bent limbs, which differ by the kinds of their limbs."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from diffnet.data.labeled import LabeledMesh, LabeledMeshes
from diffnet.data.synthetic.shape import Floats, Shape, bone_distances, check_set
from diffnet.data.synthetic.shift import MESHERS, Shift, remesh, shift_of
from diffnet.data.synthetic.surface import Surface, polygonize, with_faces
from diffnet.geometry import make_mesh

# A club has a ball at its end, a bead has one in the middle, and a twin has both. A fork has two prongs. A cone gets
# wider toward its end.
LIMBS = ("plain", "club", "bead", "fork", "thick", "cone", "twin")
_LIMB_COUNT = 4
_CLASSES = tuple(combinations(LIMBS, _LIMB_COUNT))

# Lengths of the skeleton; the blending of `polygonize` is made for these. Meshes are scaled at the end.
_BODY = (0.09, 0.105)
_LENGTH = (0.27, 0.36)
_RADIUS = (0.027, 0.031)
_SPACING = (0.025, 0.029)
_SCALE = (0.5, 2.0)
_HOLE = (0.03, 0.045)
_COUNTS = (1600, 2600)  # vertices of adaptive triangulations
_SCAN_DAMAGE = 0.15  # see `remesh`; noise and holes of scanned figures would hide the kinds of limbs
_BEND = 35.0  # degrees, at each of two joints of a limb
_APART = 65.0  # degrees, between two limbs at least
_ATTEMPTS = 200

CLASS_SHIFTS = ("builds", "mesher", "missing")  # of those of figures; a mesh with one label has no boundaries
# Ranges outside those above: (body, length, factor of all radii, degrees at each joint of a limb).
_BUILDS = (
    ((0.064, 0.074), (0.41, 0.45), (0.97, 1.03), 50.0),
    ((0.120, 0.130), (0.235, 0.250), (0.93, 0.98), 30.0),
    ((0.090, 0.105), (0.37, 0.41), (1.20, 1.30), 50.0),
    ((0.075, 0.087), (0.262, 0.290), (0.76, 0.82), 50.0),
)
_MISSING = (0.2, 0.35)  # radius of a ball without surface, in radii of the body


class _Build(NamedTuple):
    body: float
    length: tuple[float, float]
    radius: tuple[float, float]
    bend: float


def shapes(
    classes: int = 30, train: int = 16, test: int = 4, seed: int = 0, *, shift: str | None = None
) -> LabeledMeshes:
    """Generate bodies with four limbs, in classes that differ by the kinds of the limbs.

    classes: number of classes, 2 to 35
    train, test: number of meshes of each class in each split, ≥ 1
    seed: ≥ 0. Equal seeds give equal arrays.
    shift: how the source of the test meshes differs from that of the training meshes, see below

    A limb is plain or thick, has a ball at its end (club), in the middle (bead) or at both places (twin), has two
    prongs (fork), or gets wider toward its end (cone). A class is a choice of four different kinds, and its name lists
    them.

    Everything else is random: the size of the body, the length, the thickness, the direction and the bending of each
    limb, rotation and scale of the mesh, and the grid from which marching cubes makes about 1,000 vertices. Half of the
    meshes have one or two holes in the body.

    With a shift, training meshes have no holes. They are the same for every shift. Test meshes differ from them by one
    of these kinds, or by several, such as "builds+mesher":
        "builds": bodies and limbs of sizes and bends outside the training range
        "mesher": see `figures`
        "missing": a hole in the side of the body that is farthest from the limbs

    Raises ValueError for a count out of range and a negative seed, OptionError for an unknown shift.

    >>> data = shapes(classes=3, train=1, test=1)
    >>> data.label_names, len(data.train)
    (['plain+club+bead+fork', 'plain+club+bead+thick', 'plain+club+bead+cone'], 3)
    """
    if not 2 <= classes <= len(_CLASSES):
        raise ValueError(f"classes should be 2 to {len(_CLASSES)}, got {classes}")
    check_set(train, test, seed)
    changes = None if shift is None else shift_of(shift, CLASS_SHIFTS)
    return LabeledMeshes(
        train=_part(0, "train", classes, train, seed, None if changes is None else frozenset()),
        test=_part(1, "test", classes, test, seed, changes),
        label_names=["+".join(limbs) for limbs in _CLASSES[:classes]],
        labels_at="meshes",
    )


def _part(part: int, name: str, classes: int, count: int, seed: int, changes: Shift | None) -> list[LabeledMesh]:
    found = []
    for label in range(classes):
        for i in range(count):
            rng, own_name = np.random.default_rng([seed, part, label, i]), f"{name}_{label:02d}_{i:02d}"
            found.append(_mesh(own_name, label, rng, changes, label + i))
    return found


def _mesh(name: str, label: int, rng: np.random.Generator, changes: Shift | None, number: int) -> LabeledMesh:
    """One mesh. changes: None for a set without a shift. number: builds and meshers take turns by it."""
    for _ in range(_ATTEMPTS):
        surface = _surface(label, rng, changes or frozenset(), number)
        if surface is not None and changes is None and rng.random() < 0.5:
            surface = _with_holes(surface, rng)
        if surface is None:
            continue
        verts, faces = surface
        verts = _any_rotation(rng).apply(verts) * rng.uniform(*_SCALE)
        return LabeledMesh(name, make_mesh(verts, faces, name=name), np.array(label, np.int64))
    raise RuntimeError(f"{name}: no shape passed all checks in {_ATTEMPTS} attempts")


def _surface(label: int, rng: np.random.Generator, changes: Shift, number: int) -> Surface | None:
    """None if limbs touch each other."""
    build = _unusual(number, rng) if "builds" in changes else _usual(rng)
    shape = _skeleton(_CLASSES[label], build, rng).rotated(_any_rotation(rng))
    if "mesher" in changes:
        skin = polygonize(shape)
        mesher = MESHERS[number % len(MESHERS)]
        count = int(rng.integers(*_COUNTS))
        surface = None if skin is None else remesh(shape, skin, mesher, count, rng, _SCAN_DAMAGE)
    else:
        surface = polygonize(shape, rng.uniform(*_SPACING))
    return _without_a_side(surface, shape, build.body, rng) if surface and "missing" in changes else surface


def _usual(rng: np.random.Generator) -> _Build:
    return _Build(rng.uniform(*_BODY), _LENGTH, _RADIUS, _BEND)


def _unusual(number: int, rng: np.random.Generator) -> _Build:
    body, length, factors, bend = _BUILDS[number % len(_BUILDS)]
    factor = rng.uniform(*factors)
    return _Build(rng.uniform(*body), length, (factor * _RADIUS[0], factor * _RADIUS[1]), bend)


def _any_rotation(rng: np.random.Generator) -> Rotation:
    return Rotation.from_quat(rng.normal(size=4))  # uniform over all rotations


def _skeleton(limbs: tuple[str, ...], build: _Build, rng: np.random.Generator) -> Shape:
    bones: list[tuple[Floats, Floats, float, float]] = []
    body = build.body
    bones.append((np.array([0, 0, -0.01]), np.array([0, 0, 0.01]), body, body))
    for kind, direction in zip(rng.permutation(limbs).tolist(), _directions(rng), strict=True):
        bones += _limb(kind, direction, build, rng)
    starts, ends, first, last = (np.array(column) for column in zip(*bones, strict=True))
    count = len(bones)
    return Shape(starts, ends, np.stack([first, last], axis=1), np.zeros(count), np.zeros(count, np.int64))


def _directions(rng: np.random.Generator) -> Floats:
    """A unit vector for each limb, (4, 3), no two of them close to each other."""
    while True:
        found = rng.normal(size=(_LIMB_COUNT, 3))
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        cosines = found @ found.T - 2 * np.eye(_LIMB_COUNT)
        if cosines.max() < np.cos(np.radians(_APART)):
            return found


def _limb(
    kind: str, direction: Floats, build: _Build, rng: np.random.Generator
) -> list[tuple[Floats, Floats, float, float]]:
    """The bones of a limb: three that bend, and those of its kind. Each has two ends and a radius at each of them."""
    length, radius = rng.uniform(*build.length), rng.uniform(*build.radius)
    first, last = {"thick": (1.75, 1.75), "cone": (0.9, 2.2)}.get(kind, (1.0, 1.0))
    balls = {"bead": (1,), "twin": (1, 2), "club": (2,)}.get(kind, ())
    start, bones = 0.7 * build.body * direction, []
    for step in range(3):
        end = start + length / 3 * direction
        radii = [radius * (first + (last - first) * share / 3) for share in (step, step + 1)]
        bones.append((start, end, radii[0], radii[1]))
        if step in balls:
            center = (start + end) / 2 if step == 1 else end
            bones.append((center, center + 0.005 * direction, 2.2 * radius, 2.2 * radius))
        start = end
        if step < 2:
            direction = _bent(direction, build.bend, rng)
    if kind == "fork":
        side = np.cross(direction, rng.normal(size=3))
        side /= np.linalg.norm(side)
        for sign in (-1, 1):
            tip = start + 0.13 * (0.62 * direction + sign * 0.78 * side)
            bones.append((start, tip, 0.85 * radius, 0.75 * radius))
    return bones


def _bent(direction: Floats, degrees: float, rng: np.random.Generator) -> Floats:
    axis = np.cross(direction, rng.normal(size=3))
    axis *= np.radians(rng.uniform(-degrees, degrees)) / np.linalg.norm(axis)
    return np.asarray(Rotation.from_rotvec(axis).apply(direction), np.float64)


def _with_holes(surface: Surface, rng: np.random.Generator) -> Surface:
    """The surface without the triangles in one or two balls around random vertices of the body."""
    verts, _ = surface
    near = np.flatnonzero(np.linalg.norm(verts, axis=1) < 1.15 * _BODY[1])
    centers = verts[rng.choice(near, rng.integers(1, 3))]
    away = np.linalg.norm(verts[:, None] - centers, axis=2)
    return _without(surface, (away < rng.uniform(*_HOLE, size=len(centers))).any(axis=1))


def _without_a_side(surface: Surface, shape: Shape, body: float, rng: np.random.Generator) -> Surface:
    """The surface without a ball around the point of the body that is farthest from all limbs."""
    verts, _ = surface
    near = np.flatnonzero(np.linalg.norm(verts, axis=1) < 1.15 * body)
    gaps = bone_distances(shape, verts[near])[:, 1:].min(axis=1)
    center = verts[near[gaps.argmax()]]
    return _without(surface, np.linalg.norm(verts - center, axis=1) < rng.uniform(*_MISSING) * body)


def _without(surface: Surface, inside: NDArray[np.bool_]) -> Surface:
    """The surface without some vertices (V,) and their triangles."""
    verts, faces = surface
    return with_faces(verts, faces[~inside[faces].any(axis=1)])
