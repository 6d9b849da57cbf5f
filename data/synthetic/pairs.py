"""The generated sets of pairs: bodies of several builds, poses and triangulations, with known correspondences."""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.data.pairs.shapes import MeshPairs, PairShape
from diffnet.data.synthetic.animals import ANIMAL, RARE, build_factors, build_of
from diffnet.data.synthetic.shape import (
    BLEND,
    FIGURE,
    PERSON,
    REACH,
    Body,
    Floats,
    Shape,
    bone_distances,
    bone_radius,
    check_set,
    mean_body,
    sample_body,
    skin_gradient,
    touches_itself_on_the_way,
)
from diffnet.data.synthetic.surface import STYLES, Ints, Surface, face_normals, polygonize, triangulate
from diffnet.geometry import Mesh, SurfacePoints, closest_points, make_mesh
from diffnet.geometry.errors import OptionError
from diffnet.geometry.processes import WorkerPool, available_cores
from diffnet.geometry.store.cache import Arrays, cache_key, entry_path, read_entry, write_entry

One: TypeAlias = "tuple[str, str, int]"  # the bodies, the part ("train" or "test") and the number of a figure

VERTICES = 5000
TEST_PAIRS = 50
_VERSION = 1  # increase when other figures are made
_TEMPLATE_VERTICES = 8000
_TEMPLATE_SPACING = 0.0075
_FINE = 0.0095  # spacing of the skin that is triangulated
_YAW = np.pi / 9
_PLANS = {"figures": FIGURE, "people": PERSON, "animals": ANIMAL}
_ATTEMPTS = 100

# The template moves in steps. Points change from one bone to the next over the first distance, and a bone affects
# points within the second.
STEPS = 24
FOLLOW = 0.03
NOTICE = 6 * FOLLOW
_LAST_STEPS = 3

# A figure is drawn again if more of the template's triangles than this are folded, if a vertex is farther from the
# template than this, in meters, or if more of its vertices than this change their part on the way from the template.
# On the rare build, thick bones reach over their neighbors, so other bones are nearest.
_MAX_FOLDED, _MAX_FOLDED_RARE = 1e-3, 4e-3
_MAX_DISTANCE = 0.012
_MAX_IN_OTHER_PARTS, _MAX_IN_OTHER_PARTS_RARE = 0.05, 0.16


def figure_pairs(
    train: int = 80,
    test: int = 20,
    seed: int = 0,
    *,
    bodies: str = "figures",
    jobs: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> MeshPairs:
    """Generate posed figures of about 5,000 vertices, and their true correspondences.

    train, test: number of figures in each part, ≥ 2
    seed: ≥ 0. Equal seeds give equal arrays. A longer part begins with the figures of a shorter one.
    bodies: "figures" are humanoids whose front and back are nearly alike. "people" have a front: a face, breasts, a
        belly, buttocks, knees, calves and longer feet. "animals" have four legs. They have the builds of a horse, a
        dog, a cat and a cow in turns, and one in eight has the build of a hippopotamus, which is far from the others.
    jobs: number of worker processes; by default one for each core. See `precompute_all` for calls from a script.
    cache_dir: folder that keeps the figures, each of which takes about 2 s to make; see `precompute`

    Each figure has its own build, pose and triangulation (marching cubes, even, irregular or adaptive). It is closed,
    of genus 0, and stands upright within 20°. No figure is in both parts. All pairs of training figures are for
    training. At most 50 pairs of test figures, drawn at random, are for testing.

    The truth is a point in a face: a template of 8,000 vertices is moved in small steps onto each figure, so each of
    its points is known on all figures. `MeshPairs.mirrored_truth` has left and right exchanged.

    Raises ValueError for fewer than 2 figures and a negative seed, OptionError for unknown bodies.
    """
    if bodies not in _PLANS:
        raise OptionError(f"the figures should be one of {', '.join(_PLANS)}, got {bodies!r}")
    check_set(train, test, seed, least=2)
    todo = [(bodies, "train", i) for i in range(train)] + [(bodies, "test", i) for i in range(test)]
    found = {one: None if cache_dir is None else _read(_entry(one, seed, cache_dir), one) for one in todo}
    missing = [one for one in todo if found[one] is None]
    jobs = min(available_cores() if jobs is None else jobs, len(missing))
    if jobs <= 1:
        found |= {one: pair_figure(one, seed, cache_dir) for one in missing}
    else:
        with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
            futures = {one: pool.submit(pair_figure, one, seed, cache_dir) for one in missing}
            found |= {one: future.result() for one, future in futures.items()}
    shapes = [shape for shape in found.values() if shape is not None]
    standard, mirror = template(bodies)
    tests = np.array(list(combinations(range(test), 2)))
    drawn = np.sort(np.random.default_rng([seed, 2]).permutation(len(tests))[:TEST_PAIRS])
    return MeshPairs(
        train=shapes[:train],
        test=shapes[train:],
        train_pairs=list(combinations(range(train), 2)),
        test_pairs=[(int(a), int(b)) for a, b in tests[drawn]],
        template_faces=standard.faces,
        mirror=mirror,
    )


def pair_figure(one: One, seed: int = 0, cache_dir: str | os.PathLike[str] | None = None) -> PairShape:
    """One figure of `figure_pairs`, which worker processes make and put into the cache."""
    _, part, number = one
    shape = _sample(one, np.random.default_rng([seed, part == "test", number]))
    if cache_dir is not None:
        assert isinstance(shape.template, SurfacePoints)
        arrays = (shape.mesh.verts, shape.mesh.faces, shape.template.faces, shape.template.weights)
        write_entry(
            _entry(one, seed, cache_dir),
            {name: np.ascontiguousarray(x) for name, x in zip(_STORED, arrays, strict=True)},
        )
    return shape


def _name(one: One) -> str:
    bodies, part, number = one
    kind = {"figures": "figure", "people": "person"}.get(bodies) or build_of(number)
    return f"{kind}_{part}_{number:03d}"


_STORED = ("verts", "faces", "template_faces", "template_weights")


def _entry(one: One, seed: int, cache_dir: str | os.PathLike[str]) -> Path:
    bodies, part, number = one
    kind = [] if bodies == "figures" else [bodies]
    return entry_path(cache_dir, cache_key({}, figure=[part, number, seed, *kind], version=_VERSION), "figure")


def _read(path: Path, one: One) -> PairShape | None:
    """A figure in the cache, or None."""
    shapes = []

    def check(arrays: Arrays) -> None:
        verts, faces, *points = (arrays[name] for name in _STORED)
        mesh = make_mesh(verts, faces, name=_name(one))
        shapes.append(PairShape(mesh.name, mesh, SurfacePoints(*points).check(mesh)))

    return shapes[0] if read_entry(path, check) is not None else None


def _sample(one: One, rng: np.random.Generator) -> PairShape:
    bodies, _, number = one
    plan, name = _PLANS[bodies], _name(one)
    standard, _ = template(bodies)
    start = mean_body(plan)
    for _ in range(_ATTEMPTS):
        factors = build_factors(build_of(number)) if bodies == "animals" else None
        body = sample_body(rng, factors, plan)
        if touches_itself_on_the_way(start, body, STEPS // 2, own_rest=bodies == "animals"):
            continue
        surface = _surface(body, rng)
        if surface is None:
            continue
        moved = _deformed(standard.verts, start, body)
        mesh = make_mesh(*surface, name=name)
        rare = bodies == "animals" and build_of(number) == RARE
        if _is_sound(start, body, standard, moved, mesh, rare):
            turn = Rotation.from_euler("z", rng.uniform(-_YAW, _YAW))
            turned = make_mesh(turn.apply(mesh.verts), mesh.faces, name=name)
            return PairShape(name, turned, closest_points(mesh, moved))
    raise RuntimeError(f"{name}: no figure passed all checks in {_ATTEMPTS} attempts")


def _surface(body: Body, rng: np.random.Generator) -> Surface | None:
    shape = body.shape()
    style = STYLES[rng.integers(len(STYLES))]
    skin = polygonize(shape, _FINE)
    if skin is None:
        return None
    spacing = _FINE * np.sqrt(len(skin[0]) / VERTICES)
    return triangulate(shape, skin, style, VERTICES, rng, (0.99 * spacing, 1.01 * spacing))


@lru_cache(maxsize=3)
def template(bodies: str = "figures") -> tuple[Mesh, SurfacePoints]:
    """The mean body at rest, and the mirror image of each of its vertices."""
    shape = mean_body(_PLANS[bodies]).shape()
    skin = polygonize(shape, _TEMPLATE_SPACING)
    surface = None if skin is None else triangulate(shape, skin, "even", _TEMPLATE_VERTICES, np.random.default_rng(0))
    assert surface is not None  # nothing about it is random
    standard = make_mesh(*surface, name="template")
    return standard, closest_points(standard, standard.verts * [-1, 1, 1])


def _is_sound(start: Body, body: Body, standard: Mesh, moved: Floats, mesh: Mesh, rare: bool) -> bool:
    """Whether the moved template is a one-to-one map onto the mesh that keeps the parts of the body."""
    shape = body.shape()
    on_template = make_mesh(moved, standard.faces)
    if _folded(moved, standard.faces, skin_gradient(shape, moved)) > (_MAX_FOLDED_RARE if rare else _MAX_FOLDED):
        return False
    place = closest_points(on_template, mesh.verts)
    away = np.linalg.norm(place.interpolate(on_template.faces, moved) - mesh.verts, axis=1)
    if away.max() > _MAX_DISTANCE:
        return False
    original, rest = place.interpolate(standard.faces, standard.verts), start.shape()
    before = rest.parts[bone_distances(rest, original).argmin(axis=1)]
    after = shape.parts[bone_distances(shape, mesh.verts).argmin(axis=1)]
    every = np.bincount(after, minlength=len(body.plan.parts)).min() > 0
    return bool(every and (before != after).mean() <= (_MAX_IN_OTHER_PARTS_RARE if rare else _MAX_IN_OTHER_PARTS))


def _folded(verts: Floats, faces: Ints, outward: Floats) -> float:
    """The share of triangles whose normals point inward."""
    return float(((face_normals(verts, faces) * outward[faces].sum(axis=1)).sum(axis=1) <= 0).mean())


class _Near(NamedTuple):
    """The points near one bone.

    points: (N,) int64, their numbers
    distance: (N,) to the surface of the bone, see `bone_distance`
    along: (N,) the place along the axis, from 0 to 1
    offset: (N, 3) from the axis
    radius: (N,) at this place
    gradient: (N, 3) of the distance
    """

    points: Ints
    distance: Floats
    along: Floats
    offset: Floats
    radius: Floats
    gradient: Floats


def _deformed(points: Floats, start: Body, end: Body) -> Floats:
    """Move points (P, 3) on the skin of one body to the skin of another, in small steps from pose to pose.

    In each step, a point follows the bones near it: it keeps its place along each bone and around it. Then it moves
    onto the skin of the next pose along the gradient. Each step is smooth and one-to-one, so the whole way is, too, if
    the body does not touch itself on the way.
    """
    shape = start.shape()
    for step in range(1, STEPS + 1):
        following = start.toward(end, step / STEPS).shape()
        points = _follow(points, shape, following)
        for _ in range(_LAST_STEPS if step == STEPS else 1):
            points = _toward_skin(points, following)
        shape = following
    return points


def _follow(points: Floats, shape: Shape, following: Shape) -> Floats:
    bones = [_near(shape, bone, points, NOTICE) for bone in range(len(shape.parts))]
    closest = np.full(len(points), np.inf)
    for near in bones:
        closest[near.points] = np.minimum(closest[near.points], near.distance)
    total, moved = np.zeros(len(points)), np.zeros_like(points)
    for bone, near in enumerate(bones):
        turn = following.turns[bone] @ shape.turns[bone].T
        axis = following.ends[bone] - following.starts[bone]
        growth = bone_radius(following, bone, near.along) / near.radius
        places = following.starts[bone] + near.along[:, None] * axis + growth[:, None] * (near.offset @ turn.T)
        weights = np.exp((closest[near.points] - near.distance) / FOLLOW)
        moved[near.points] += weights[:, None] * places
        total[near.points] += weights
    return moved / total[:, None]


def _toward_skin(points: Floats, shape: Shape) -> Floats:
    """One step of Newton's method onto the skin. Unlike `skin_gradient`, it computes exact slopes, which is faster."""
    total, slope = np.full(len(points), 1e-30), np.zeros_like(points)
    for bone in range(len(shape.parts)):
        near = _near(shape, bone, points, REACH)
        share = np.exp(-near.distance / BLEND)
        total[near.points] += share
        slope[near.points] += share[:, None] * near.gradient
    slope /= total[:, None]
    step = BLEND * np.log(total) / np.maximum((slope**2).sum(axis=1), 0.05)
    return np.asarray(points + np.clip(step, -BLEND, BLEND)[:, None] * slope, np.float64)


def _near(shape: Shape, bone: int, points: Floats, reach: float) -> _Near:
    """The points within a ball around a bone that holds everything closer than `reach`."""
    start, axis = shape.starts[bone], shape.ends[bone] - shape.starts[bone]
    square = axis @ axis
    ball = np.sqrt(square) / 2 + shape.radii[bone].max() + shape.bulge[bone] + reach
    numbers = np.flatnonzero(((points - start - axis / 2) ** 2).sum(axis=1) < ball**2)
    own = points[numbers] - start
    free = own @ axis / square
    along = np.clip(free, 0.0, 1.0)
    offset = own - along[:, None] * axis
    to_axis = np.sqrt((offset**2).sum(axis=1)) + 1e-12
    radius = bone_radius(shape, bone, along)
    first, last = shape.radii[bone]
    growth = last - first + 6.75 * shape.bulge[bone] * (1 - along) * (1 - 3 * along)
    gradient = offset / to_axis[:, None] - (np.where(free == along, growth, 0.0) / square)[:, None] * axis
    return _Near(numbers, to_axis - radius, along, offset, radius, gradient)
