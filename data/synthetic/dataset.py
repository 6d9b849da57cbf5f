"""The generated data set: posed humanoid figures, labeled by body part at the vertices."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.data.labeled import LabeledMesh, LabeledMeshes
from diffnet.data.synthetic.shape import (
    BLEND,
    PARTS,
    Floats,
    Shape,
    bone_distances,
    check_set,
    sample_body,
    sample_shape,
    size_factors,
)
from diffnet.data.synthetic.shift import (
    BOUNDARY_OFFSETS,
    BUILDS,
    MESHERS,
    SIZE_GROUPS,
    Shift,
    lost_parts,
    remesh,
    shift_of,
)
from diffnet.data.synthetic.surface import STYLES, Surface, cut_holes, polygonize, sample_points, triangulate
from diffnet.geometry import make_mesh

Kind: TypeAlias = Literal["mesh", "holes", "cloud"]

# The kinds repeat along a split, so a longer split begins with the figures of a shorter one.
_KINDS: tuple[Kind, ...] = ("mesh", "mesh", "holes", "mesh", "mesh", "cloud", "mesh")

_COUNTS = (700, 2500)
FINE = (3000, 5000)  # vertices of figures for regression
_FINE_STYLES = ("even", "irregular", "adaptive")  # the vertices of others depend on a grid
_MIN_OF_A_LABEL = 8
_YAW = np.pi / 9
_ATTEMPTS = 100


def figures(train: int = 48, test: int = 16, seed: int = 0, *, shift: str | None = None) -> LabeledMeshes:
    """Generate posed humanoid figures, labeled by body part at the vertices.

    train, test: number of figures in each split, ≥ 1
    seed: ≥ 0. Equal seeds give equal arrays. A longer split begins with the figures of a shorter one.
    shift: how the source of the test figures differs from that of the training figures, see below

    The labels are head, torso, upper arm, forearm, hand, thigh, shin and foot. Left and right have the same label.
    Training figures stand upright and face y within 20°. Test figures are rotated at random, uniformly over all
    rotations, so a network must learn from the surface, or from randomly rotated coordinates, to label them. In each
    split, about one figure in seven has holes and one in seven is a point cloud. See `figure` for a single one.

    With a shift, training figures are closed meshes of one mesher, with triangles of about equal size. They are the
    same for every shift. Test figures differ from them by one of these kinds, or by several, such as "builds+mesher":
        "builds": children, heavy and thin people, apes, and figures with giant hands and feet
        "mesher": triangles that are smaller on thin parts, decimation to 750 vertices, subdivision of 300 vertices, and
            scans with noise, holes and irregular sampling
        "boundaries": the annotator draws the boundaries of parts elsewhere: the neck is head, for example
        "missing": one to three of these are missing: the head, a hand, a forearm with its hand, a foot, a shin with
            its foot

    Raises ValueError for a count below 1 and a negative seed, OptionError for an unknown shift.
    """
    check_set(train, test, seed)
    train_seed, test_seed = np.random.SeedSequence(seed).spawn(2)
    changes = None if shift is None else shift_of(shift)
    return LabeledMeshes(
        train=_split("train", train, train_seed, upright=True, changes=None if changes is None else frozenset()),
        test=_split("test", test, test_seed, upright=False, changes=changes),
        label_names=list(PARTS),
        labels_at="vertices",
    )


def figure(seed: int, *, kind: Kind = "mesh", upright: bool = True) -> LabeledMesh:
    """Generate one figure with about 700 to 2700 vertices, in one of several styles of triangulation.

    seed: ≥ 0. Equal arguments give equal arrays.
    kind: "mesh" is a closed surface of genus 0, and "holes" the same with one or two holes in the head, torso or thigh.
        "cloud" is points spread at random over the surface, without faces.
    upright: stand along z and face roughly y. Otherwise the figure is rotated at random.

    Coordinates are in meters, and bodies are about 1.4 to 1.85 m tall. The labels (V,) are int64 indices into head,
    torso, upper arm, forearm, hand, thigh, shin and foot. Each label occurs.

    Raises ValueError for an unknown kind or a negative seed.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind should be one of {', '.join(get_args(Kind))}, got {kind!r}")
    check_set(1, 1, seed)
    return _figure(np.random.default_rng(seed), f"figure_{seed}", kind, upright)


def curved_figure(seed: int, *, vertices: tuple[int, int] = FINE, upright: bool = False) -> LabeledMesh:
    """Generate one closed figure, with the mean curvature of its surface as targets for regression.

    seed, upright: see `figure`. By default, the figure is rotated at random.
    vertices: the smallest and the largest number of vertices, about. The default is twice as many as those of `figure`,
        so that hands and feet are more than a few triangles.

    The targets (V, 1) float64 are the mean curvature of the implicit surface at the vertices, in closed form, times the
    distance of the farthest vertex from the mean of the vertices. They don't depend on the unit of length, and they are
    positive where the surface bulges.

    Raises ValueError for a negative seed, and for a range of vertices that is empty or begins below 100.

    >>> item = curved_figure(0)
    >>> item.labels.shape == (len(item.mesh.verts), 1)
    True
    """
    if not 100 <= vertices[0] <= vertices[1]:
        raise ValueError(f"vertices should be a range that begins at 100 or above, got {vertices}")
    check_set(1, 1, seed)
    rng = np.random.default_rng(seed)
    name = f"figure_{seed:04d}"
    for _ in range(_ATTEMPTS):
        shape = sample_shape(rng)
        style, count = _FINE_STYLES[rng.integers(len(_FINE_STYLES))], int(rng.integers(*vertices, endpoint=True))
        skin = polygonize(shape)
        surface = None if skin is None else triangulate(shape, skin, style, count, rng)
        if surface is not None:
            verts, faces = surface
            radius = np.linalg.norm(verts - verts.mean(axis=0), axis=1).max()
            targets = skin_curvature(shape, verts)[:, None] * radius
            return LabeledMesh(name, make_mesh(_turn(verts, upright, rng), faces, name=name), targets)
    raise RuntimeError(f"{name}: no figure passed all checks in {_ATTEMPTS} attempts")


def _split(
    name: str, count: int, seed: np.random.SeedSequence, *, upright: bool, changes: Shift | None
) -> list[LabeledMesh]:
    found = []
    for i, child in enumerate(seed.spawn(count)):
        rng, own_name = np.random.default_rng(child), f"figure_{name}_{i:03d}"
        found.append(_figure(rng, own_name, _KINDS[i % len(_KINDS)], upright, changes, i))
    return found


def _figure(
    rng: np.random.Generator, name: str, kind: Kind, upright: bool, changes: Shift | None = None, number: int = 0
) -> LabeledMesh:
    """One figure.

    changes: None for a set without a shift. One of a shifted set is a mesh, whatever the kind.
    number: builds and meshers of a shifted set take turns by it
    """
    build = size_factors([*BUILDS.values()][number % len(BUILDS)], SIZE_GROUPS)
    shifts = changes or frozenset()
    offsets = BOUNDARY_OFFSETS if "boundaries" in shifts else np.zeros(len(PARTS))
    for _ in range(_ATTEMPTS):
        body = sample_body(rng, build if "builds" in shifts else None)
        shape = body.shape(lost_parts(rng) if "missing" in shifts else ())
        count = int(rng.integers(*_COUNTS, endpoint=True))
        skin = polygonize(shape)
        if skin is None:
            continue
        if "mesher" in shifts:
            surface = remesh(shape, skin, MESHERS[number % len(MESHERS)], count, rng)
        elif changes is not None:
            surface = triangulate(shape, skin, "even", count, rng)
        else:
            surface = _surface(shape, skin, kind, count, rng)
        if surface is None:
            continue
        verts, faces = surface
        labels = shape.parts[(bone_distances(shape, verts) + offsets[shape.parts]).argmin(axis=1)]
        present = np.unique(shape.parts)
        if np.bincount(labels, minlength=len(PARTS))[present].min() >= _MIN_OF_A_LABEL:
            return LabeledMesh(name, make_mesh(_turn(verts, upright, rng), faces, name=name), labels)
    raise RuntimeError(f"{name}: no figure passed all checks in {_ATTEMPTS} attempts")


def _surface(shape: Shape, skin: Surface, kind: Kind, count: int, rng: np.random.Generator) -> Surface | None:
    if kind == "cloud":
        return sample_points(shape, skin, count, rng)
    style = STYLES[rng.integers(len(STYLES))]
    surface = triangulate(shape, skin, style, count, rng)
    return cut_holes(shape, surface, rng) if kind == "holes" and surface is not None else surface


def _turn(verts: Floats, upright: bool, rng: np.random.Generator) -> Floats:
    # A normalized quaternion of four normal variates is a uniformly random rotation.
    turn = Rotation.from_euler("z", rng.uniform(-_YAW, _YAW)) if upright else Rotation.from_quat(rng.normal(size=4))
    return np.asarray(turn.apply(verts), np.float64)


def skin_curvature(shape: Shape, points: Floats) -> Floats:
    """The mean curvature (P,) at points (P, 3) of the blended skin, in 1/meter. It is positive where the skin bulges.

    With g and A the gradient and the Hessian of `skin_distance`, it is (tr A − gᵀAg / |g|²) / (2 |g|), see Goldman
    2005, https://doi.org/10.1016/j.cagd.2005.06.005. At a point off the skin, it is that of the level set there.
    """
    weights = np.exp(-bone_distances(shape, points) / BLEND)
    weights /= weights.sum(axis=1, keepdims=True)
    gradient, hessian = np.zeros((len(points), 3)), np.zeros((len(points), 3, 3))
    for bone, weight in enumerate(weights.T):
        slope, bend = _derivatives(shape, bone, points)
        gradient += weight[:, None] * slope
        hessian += weight[:, None, None] * (bend - _outer(slope, slope) / BLEND)
    hessian += _outer(gradient, gradient) / BLEND
    square = (gradient**2).sum(axis=1)
    along = np.einsum("pi,pij,pj->p", gradient, hessian, gradient)
    return np.asarray((np.einsum("pii->p", hessian) - along / square) / (2 * np.sqrt(square)), np.float64)


def _derivatives(shape: Shape, bone: int, points: Floats) -> tuple[Floats, Floats]:
    """The gradient (P, 3) and the Hessian (P, 3, 3) of `bone_distance`."""
    axis = shape.ends[bone] - shape.starts[bone]
    square = axis @ axis
    along = (points - shape.starts[bone]) @ axis / square
    beside = (along > 0) & (along < 1)  # elsewhere, an end of the bone is nearest
    t = np.clip(along, 0.0, 1.0)
    away = points - shape.starts[bone] - t[:, None] * axis
    distance = np.linalg.norm(away, axis=1)
    direction = away / distance[:, None]
    first, last = shape.radii[bone]
    bulge = 6.75 * shape.bulge[bone]
    growth = beside * (last - first + bulge * (1 - t) * (1 - 3 * t)) / square
    second = beside * bulge * (6 * t - 4) / square**2
    flat = np.eye(3) - _outer(direction, direction) - beside[:, None, None] * np.outer(axis, axis) / square
    bend = flat / distance[:, None, None] - second[:, None, None] * np.outer(axis, axis)
    return direction - growth[:, None] * axis, bend


def _outer(a: Floats, b: Floats) -> Floats:
    return a[:, :, None] * b[:, None, :]
