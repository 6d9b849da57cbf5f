"""The generated data set: posed humanoid figures, labeled by body part at the vertices."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.data.labeled import LabeledMesh, LabeledMeshes
from diffnet.data.synthetic.curvature import skin_curvature
from diffnet.data.synthetic.shape import PARTS, Floats, Shape, bone_distances, sample_body, sample_shape
from diffnet.data.synthetic.shift import (
    BUILDS,
    MESHERS,
    Shift,
    boundary_offsets,
    lost_parts,
    remesh,
    shift_of,
    unusual_body,
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
    for name, count in (("train", train), ("test", test)):
        if count < 1:
            raise ValueError(f"{name} should be at least 1, got {count}")
    train_seed, test_seed = _seed_sequence(seed).spawn(2)
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
    return _figure(np.random.default_rng(_seed_sequence(seed)), f"figure_{seed}", kind, upright)


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
    rng = np.random.default_rng(_seed_sequence(seed))
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


def _seed_sequence(seed: int) -> np.random.SeedSequence:
    if seed < 0:
        raise ValueError(f"seed should be at least 0, got {seed}")
    return np.random.SeedSequence(seed)


def _split(
    name: str, count: int, seed: np.random.SeedSequence, *, upright: bool, changes: Shift | None
) -> list[LabeledMesh]:
    found = []
    for i, child in enumerate(seed.spawn(count)):
        rng, own_name = np.random.default_rng(child), f"figure_{name}_{i:03d}"
        if changes is None:
            found.append(_figure(rng, own_name, _KINDS[i % len(_KINDS)], upright))
        else:
            found.append(_figure_of_source(rng, own_name, i, changes, upright))
    return found


def _figure(rng: np.random.Generator, name: str, kind: Kind, upright: bool) -> LabeledMesh:
    for _ in range(_ATTEMPTS):
        shape = sample_shape(rng)
        surface = _surface(shape, kind, rng)
        if surface is None:
            continue
        verts, faces = surface
        labels = shape.parts[bone_distances(shape, verts).argmin(axis=1)]
        if np.bincount(labels, minlength=len(PARTS)).min() >= _MIN_OF_A_LABEL:
            return LabeledMesh(name, make_mesh(_turn(verts, upright, rng), faces, name=name), labels)
    raise RuntimeError(f"{name}: no figure passed all checks in {_ATTEMPTS} attempts")


def _figure_of_source(rng: np.random.Generator, name: str, number: int, changes: Shift, upright: bool) -> LabeledMesh:
    """A figure of a shifted set. Builds and meshers take turns along a split."""
    build = list(BUILDS)[number % len(BUILDS)]
    mesher = MESHERS[number % len(MESHERS)]
    offsets = boundary_offsets() if "boundaries" in changes else np.zeros(len(PARTS))
    for _ in range(_ATTEMPTS):
        body = unusual_body(build, rng) if "builds" in changes else sample_body(rng)
        lost = lost_parts(rng) if "missing" in changes else set()
        shape = body.shape(lost)
        count = int(rng.integers(*_COUNTS, endpoint=True))
        skin = polygonize(shape)
        if skin is None:
            continue
        if "mesher" in changes:
            surface = remesh(shape, skin, mesher, count, rng)
        else:
            surface = triangulate(shape, skin, "even", count, rng)
        if surface is None:
            continue
        verts, faces = surface
        labels = shape.parts[(bone_distances(shape, verts) + offsets[shape.parts]).argmin(axis=1)]
        present = np.unique(shape.parts)
        if np.bincount(labels, minlength=len(PARTS))[present].min() >= _MIN_OF_A_LABEL:
            return LabeledMesh(name, make_mesh(_turn(verts, upright, rng), faces, name=name), labels)
    raise RuntimeError(f"{name}: no figure passed all checks in {_ATTEMPTS} attempts")


def _surface(shape: Shape, kind: Kind, rng: np.random.Generator) -> Surface | None:
    count = int(rng.integers(*_COUNTS, endpoint=True))
    skin = polygonize(shape)
    if skin is None:
        return None
    if kind == "cloud":
        return sample_points(shape, skin, count, rng)
    style = STYLES[rng.integers(len(STYLES))]
    surface = triangulate(shape, skin, style, count, rng)
    return cut_holes(shape, surface, rng) if kind == "holes" and surface is not None else surface


def _turn(verts: Floats, upright: bool, rng: np.random.Generator) -> Floats:
    # A normalized quaternion of four normal variates is a uniformly random rotation.
    turn = Rotation.from_euler("z", rng.uniform(-_YAW, _YAW)) if upright else Rotation.from_quat(rng.normal(size=4))
    return np.asarray(turn.apply(verts), np.float64)
