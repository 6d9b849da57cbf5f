"""Posed humanoid bodies as implicit surfaces: tapered bones on a jointed skeleton, blended smoothly into one skin.

Lengths are in meters. A body stands along z and faces y. Its pelvis is at the origin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

PARTS = ("head", "torso", "upper arm", "forearm", "hand", "thigh", "shin", "foot")

# The distance over which bones blend into each other. The skin is where Σ exp(-distance / BLEND) = 1.
BLEND = 0.017
# At a larger distance from its surface, a bone adds less than 0.4 % of this sum.
REACH = 6 * BLEND

# Self-contact: two balls on bones are farther apart than FAR at rest, and closer than NEAR in a pose.
FAR, NEAR = 0.12, 0.03

_ATTEMPTS = 200

Floats: TypeAlias = NDArray[np.float64]
Ranges: TypeAlias = "tuple[tuple[float, float], ...]"

# Mean lengths and radii, each drawn with its own relative spread.
_SIZES = {
    "head": (0.084, 0.12),
    "neck": (0.085, 0.25),
    "neck radius": (0.038, 0.15),
    "chest height": (0.34, 0.10),
    "chest width": (0.082, 0.20),
    "chest radius": (0.085, 0.12),
    "waist radius": (0.075, 0.20),
    "shoulder": (0.185, 0.10),
    "shoulder radius": (0.042, 0.12),
    "hip": (0.098, 0.12),
    "hip radius": (0.086, 0.15),
    "upper arm": (0.28, 0.10),
    "forearm": (0.25, 0.10),
    "arm radius": (0.035, 0.15),
    "wrist radius": (0.025, 0.12),
    "hand": (0.15, 0.15),
    "thigh": (0.42, 0.10),
    "thigh radius": (0.072, 0.15),
    "shin": (0.40, 0.10),
    "knee radius": (0.042, 0.12),
    "ankle radius": (0.030, 0.12),
    "foot": (0.17, 0.15),
}

# Those of people besides, who have a front: a face, breasts, a belly, buttocks, knees and calves.
_FRONT_SIZES = {
    "belly": (0.060, 0.25),
    "breast": (0.040, 0.25),
    "buttock": (0.062, 0.15),
    "nose": (0.012, 0.2),
    "chin": (0.026, 0.15),
    "kneecap": (0.030, 0.12),
    "calf": (0.026, 0.2),
}

# Limits of the joints in degrees about y (sideways), x (forward) and z (twist), for the left side of the body.
_LIMITS: dict[str, Ranges] = {
    "spine": ((-14, 14), (-30, 12), (-25, 25)),
    "neck": ((-18, 18), (-25, 20), (-35, 35)),
    "shoulder": ((15, 125), (-30, 65), (-50, 70)),
    "elbow": ((0, 0), (5, 105), (-20, 20)),
    "wrist": ((-15, 15), (-30, 30), (-60, 20)),
    "hip": ((3, 32), (-25, 65), (-10, 25)),
    "knee": ((0, 0), (-85, -4), (0, 0)),
    "ankle": ((-8, 8), (-25, 15), (-5, 15)),
}
_REST = dict.fromkeys(_LIMITS, (0.0, 0.0, 0.0)) | {"shoulder": (50.0, 0.0, 0.0), "hip": (14.0, 0.0, 0.0)}

Sizes: TypeAlias = "dict[str, float]"
Pose: TypeAlias = "dict[tuple[str, int], tuple[float, ...]]"
Lost: TypeAlias = "Collection[tuple[str, int]]"


class Frame(NamedTuple):
    """A joint: its position, and the rotation of the bones below it."""

    origin: Floats
    rotation: Rotation

    def at(self, x: float, y: float, z: float) -> Floats:
        return self.origin + np.asarray(self.rotation.apply([x, y, z]), np.float64)

    def joint(self, place: tuple[float, float, float], degrees: tuple[float, ...], side: int = 1) -> Frame:
        """The frame of a child joint at `place`. Side -1 mirrors the angles."""
        sideways, forward, twist = degrees
        turn = Rotation.from_euler("YXZ", [-side * sideways, forward, side * twist], degrees=True)
        return Frame(self.at(*place), self.rotation * turn)


class Bone(NamedTuple):
    part: str
    joint: Frame
    start: Floats
    end: Floats
    radii: tuple[float, float]
    bulge: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What bodies of one kind have in common.

    parts: their names
    sizes: the mean of each length and radius, in meters, and its relative spread
    limits: of the joints, see `_LIMITS`
    rest: the angles of each joint at rest
    bones: those of a body with these sizes and this pose, without some parts, see `Body.shape`
    groups: sizes that are also multiplied by a common random factor, with its range
    """

    parts: tuple[str, ...]
    sizes: Mapping[str, tuple[float, float]]
    limits: Mapping[str, Ranges]
    rest: Mapping[str, tuple[float, float, float]]
    bones: Callable[[Sizes, Pose, Lost], list[Bone]]
    groups: Sequence[tuple[tuple[float, float], Sequence[str]]] = ()

    def random_sizes(self, rng: np.random.Generator) -> Sizes:
        sizes = {name: mean * rng.uniform(1 - spread, 1 + spread) for name, (mean, spread) in self.sizes.items()}
        for limits, names in self.groups:
            factor = rng.uniform(*limits)
            for name in names:
                sizes[name] *= factor
        return sizes

    def rest_pose(self) -> Pose:
        return {(name, side): self.rest[name] for name in self.limits for side in (-1, 1)}


@dataclass(frozen=True)
class Body:
    """The proportions of a body, in meters, and the angles of its joints, in degrees."""

    sizes: Sizes
    pose: Pose
    plan: Plan

    def toward(self, other: Body, share: float) -> Body:
        """A body between this one and another one: each size and angle moves by a share of the difference."""
        sizes = {name: size + share * (other.sizes[name] - size) for name, size in self.sizes.items()}
        pose = {
            joint: tuple(a + share * (b - a) for a, b in zip(angles, other.pose[joint], strict=True))
            for joint, angles in self.pose.items()
        }
        return Body(sizes, pose, self.plan)

    def shape(self, missing: Lost = ()) -> Shape:
        """The bones of the body, without some of its parts, each given as (part, side).

        Sides are -1 and 1, and 0 for what is in the middle.
        """
        bones = self.plan.bones(self.sizes, self.pose, missing)
        return Shape(
            np.stack([b.start for b in bones]),
            np.stack([b.end for b in bones]),
            np.array([b.radii for b in bones]),
            np.array([b.bulge for b in bones]),
            np.array([self.plan.parts.index(b.part) for b in bones], np.int64),
            np.stack([b.joint.rotation.as_matrix() for b in bones]),
        )


@dataclass(frozen=True)
class Shape:
    """The bones of one posed body.

    starts, ends: (B, 3) float64, the axis of each bone
    radii: (B, 2) float64, at the start and the end
    bulge: (B,) float64, added to the radius a third of the way along, like a muscle
    parts: (B,) int64, indices into PARTS
    turns: (B, 3, 3) float64, the rotation of the joint that each bone hangs on. Identity for shapes without joints.
    """

    starts: Floats
    ends: Floats
    radii: Floats
    bulge: Floats
    parts: NDArray[np.int64]
    turns: Floats = field(default_factory=lambda: np.eye(3)[None])

    def rotated(self, rotation: Rotation) -> Shape:
        """The shape rotated about the origin."""
        starts, ends = rotation.apply(self.starts), rotation.apply(self.ends)
        return Shape(starts, ends, self.radii, self.bulge, self.parts, rotation.as_matrix() @ self.turns)


def sample_shape(rng: np.random.Generator) -> Shape:
    """The bones of a random body, see `sample_body`."""
    return sample_body(rng).shape()


def sample_body(rng: np.random.Generator, factors: Mapping[str, float] | None = None, plan: Plan | None = None) -> Body:
    """A body of random proportions in a random pose without self-contact. If none is found, the body is at rest.

    factors: multiply sizes, by their names
    plan: by default, that of figures
    """
    plan = FIGURE if plan is None else plan
    sizes = plan.random_sizes(rng)
    for name, factor in (factors or {}).items():
        sizes[name] *= factor
    rest = Body(sizes, plan.rest_pose(), plan)
    gaps = _ball_gaps(rest.shape())
    for _ in range(_ATTEMPTS):
        body = Body(sizes, _sample_pose(rng, plan), plan)
        if not _touches_itself(body.shape(), gaps):
            return body
    return rest


def mean_body(plan: Plan) -> Body:
    """The body of mean proportions at rest. It is its own mirror image in x."""
    return Body({name: mean for name, (mean, _) in plan.sizes.items()}, plan.rest_pose(), plan)


def touches_itself_on_the_way(start: Body, end: Body, steps: int, *, own_rest: bool = False) -> bool:
    """Whether the body touches itself at some step on the straight way between two poses.

    own_rest: compare each step with its own proportions at rest instead of the start. Builds that are far from the
        start need this, because a short neck brings the head close to the chest.
    """
    gaps = _ball_gaps(start.shape())
    for i in range(1, steps + 1):
        body = start.toward(end, i / steps)
        rest = _ball_gaps(Body(body.sizes, start.pose, start.plan).shape()) if own_rest else gaps
        if _touches_itself(body.shape(), rest):
            return True
    return False


def bone_distances(shape: Shape, points: Floats) -> Floats:
    """The distance (P, B) of each point (P, 3) to the surface of each bone. Negative inside."""
    columns = [bone_distance(shape, bone, *points.T) for bone in range(len(shape.parts))]
    return np.stack(columns, axis=1)


def bone_distance(shape: Shape, bone: int, x: Floats, y: Floats, z: Floats) -> Floats:
    """The distance to the surface of one bone, at coordinates that broadcast against each other."""
    sx, sy, sz = shape.starts[bone]
    ax, ay, az = shape.ends[bone] - shape.starts[bone]
    along = ((x - sx) * ax + (y - sy) * ay + (z - sz) * az) / (ax * ax + ay * ay + az * az)
    along = np.clip(along, 0.0, 1.0)
    to_axis = np.sqrt((x - sx - along * ax) ** 2 + (y - sy - along * ay) ** 2 + (z - sz - along * az) ** 2)
    return np.asarray(to_axis - bone_radius(shape, bone, along), np.float64)


def bone_radius(shape: Shape, bone: int, along: Floats) -> Floats:
    """The radius of a bone at places along its axis, from 0 to 1."""
    first, last = shape.radii[bone]
    return np.asarray(first + (last - first) * along + shape.bulge[bone] * 6.75 * along * (1 - along) ** 2, np.float64)


def skin_distance(shape: Shape, points: Floats) -> Floats:
    """The approximate distance (P,) of points (P, 3) to the blended skin. Negative inside."""
    x, y, z = points.T
    total = np.full(len(points), 1e-30)
    for bone in range(len(shape.parts)):
        total += np.exp(-bone_distance(shape, bone, x, y, z) / BLEND)
    return np.asarray(-BLEND * np.log(total), np.float64)


def skin_gradient(shape: Shape, points: Floats, step: float = 1e-4) -> Floats:
    """The gradient (P, 3) of `skin_distance`, by central differences. It points outward."""
    offsets = step * np.eye(3)
    slopes = [skin_distance(shape, points + o) - skin_distance(shape, points - o) for o in offsets]
    return np.stack(slopes, axis=1) / (2 * step)


def size_factors(build: Mapping[str, float], groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The factor of each size, as `sample_body` takes it, from those of sizes and of groups of sizes."""
    factors: dict[str, float] = {}
    for name, factor in build.items():
        for size in groups.get(name, (name,)):
            factors[size] = factors.get(size, 1.0) * factor
    return factors


def check_set(train: int, test: int, seed: int, least: int = 1) -> None:
    """Raises ValueError for parts of fewer than `least`, and for a negative seed."""
    for name, value, low in (("train", train, least), ("test", test, least), ("seed", seed, 0)):
        if value < low:
            raise ValueError(f"{name} should be at least {low}, got {value}")


def _sample_pose(rng: np.random.Generator, plan: Plan) -> Pose:
    return {
        (name, side): tuple(rng.uniform(low, high) for low, high in limits)
        for name, limits in plan.limits.items()
        for side in (-1, 1)
    }


def _figure_bones(sizes: Sizes, pose: Pose, missing: Lost) -> list[Bone]:
    """The bones of a figure."""
    pelvis, chest, neck = _figure_frames(sizes, pose)
    groups = {0: _trunk(sizes, pelvis, chest) + _head(sizes, neck)}
    groups |= {side: _arm(sizes, pose, chest, side) + _leg(sizes, pose, pelvis, side) for side in (-1, 1)}
    return [bone for side, group in groups.items() for bone in group if (bone.part, side) not in missing]


def _figure_frames(sizes: Sizes, pose: Pose) -> tuple[Frame, Frame, Frame]:
    """The frames of the pelvis, the chest and the neck."""
    pelvis = Frame(np.zeros(3), Rotation.identity())
    chest = pelvis.joint((0, 0, 0.10), pose["spine", 1])
    return pelvis, chest, chest.joint((0, -0.01, sizes["chest height"] - 0.02), pose["neck", 1])


def _trunk(sizes: Sizes, pelvis: Frame, chest: Frame) -> list[Bone]:
    hip, ribs, waist = sizes["hip radius"], sizes["chest radius"], sizes["waist radius"]
    top, width, shoulder = sizes["chest height"], sizes["chest width"], sizes["shoulder"]
    bones = []
    for side in (-1, 1):
        low, high = pelvis.at(side * 0.065, -0.01, 0.02), chest.at(side * width, 0.01, top - 0.13)
        middle = chest.at(side * 0.045, 0, 0.03)
        bones += [
            Bone("torso", pelvis, low, middle, (hip, waist)),
            Bone("torso", chest, middle, high, (waist, ribs)),
            Bone(
                "torso",
                chest,
                chest.at(0, 0, top - 0.04),
                chest.at(side * shoulder, 0, top - 0.06),
                (0.05, sizes["shoulder radius"]),
            ),
        ]
    return bones


def _head(sizes: Sizes, neck: Frame) -> list[Bone]:
    long, size, radius = sizes["neck"], sizes["head"], sizes["neck radius"]
    return [
        Bone("torso", neck, neck.at(0, 0, -0.02), neck.at(0, 0, long), (radius * 1.15, radius)),
        Bone("head", neck, neck.at(0, 0.025, long + 0.035), neck.at(0, 0, long + 1.35 * size), (0.56 * size, size)),
        Bone("head", neck, neck.at(0, 0.025, long + 0.035), neck.at(0, 0.045, long + 0.06), (0.45 * size, 0.4 * size)),
    ]


def _arm(sizes: Sizes, pose: Pose, chest: Frame, side: int) -> list[Bone]:
    radius, wrist_radius, long = sizes["arm radius"], sizes["wrist radius"], sizes["hand"]
    shoulder = chest.joint((side * sizes["shoulder"], 0, sizes["chest height"] - 0.06), pose["shoulder", side], side)
    elbow = shoulder.joint((0, 0, -sizes["upper arm"]), pose["elbow", side], side)
    wrist = elbow.joint((0, 0, -sizes["forearm"]), pose["wrist", side], side)
    return [
        Bone("upper arm", shoulder, shoulder.origin, elbow.origin, (1.15 * radius, 0.8 * radius), 0.2 * radius),
        Bone("forearm", elbow, elbow.origin, wrist.origin, (0.85 * radius, wrist_radius), 0.25 * radius),
        Bone("hand", wrist, wrist.at(0, 0.008, -0.02), wrist.at(0, 0.030, -long), (0.020, 0.017)),
        Bone("hand", wrist, wrist.at(0, -0.008, -0.02), wrist.at(0, -0.026, -0.95 * long), (0.020, 0.017)),
        Bone("hand", wrist, wrist.at(0, 0.01, -0.03), wrist.at(0, 0.075, -0.55 * long), (0.018, 0.015)),
    ]


def _leg(sizes: Sizes, pose: Pose, pelvis: Frame, side: int) -> list[Bone]:
    radius, knee_radius, ankle_radius, long = (
        sizes["thigh radius"],
        sizes["knee radius"],
        sizes["ankle radius"],
        sizes["foot"],
    )
    hip = pelvis.joint((side * sizes["hip"], 0, 0), pose["hip", side], side)
    knee = hip.joint((0, 0, -sizes["thigh"]), pose["knee", side], side)
    ankle = knee.joint((0, 0, -sizes["shin"]), pose["ankle", side], side)
    heel = ankle.at(0, -0.035, -0.045)
    return [
        Bone("thigh", hip, hip.origin, knee.origin, (radius, knee_radius), 0.15 * radius),
        Bone("shin", knee, knee.origin, ankle.origin, (knee_radius, ankle_radius), 0.35 * knee_radius),
        Bone("foot", ankle, ankle.at(0, 0, -0.01), heel, (0.028, 0.027)),
        Bone("foot", ankle, ankle.at(0, 0.01, -0.02), ankle.at(0, 0.6 * long, -0.05), (0.026, 0.022)),
        Bone("foot", ankle, heel, ankle.at(-side * 0.02, long, -0.055), (0.024, 0.020)),
        Bone("foot", ankle, heel, ankle.at(side * 0.028, 0.88 * long, -0.055), (0.024, 0.019)),
    ]


def _person_bones(sizes: Sizes, pose: Pose, missing: Lost) -> list[Bone]:
    longer = sizes | {"foot": 1.25 * sizes["foot"]}
    bones = _figure_bones(longer, pose, missing)
    pelvis, chest, neck = _figure_frames(longer, pose)
    return [*bones, *_face(sizes, neck), *_torso(sizes, pelvis, chest), *_knees_and_calves(sizes, bones)]


def _face(sizes: Sizes, neck: Frame) -> list[Bone]:
    size = sizes["head"]
    low = sizes["neck"] + 0.035
    middle = low + 0.75 * size
    front = 0.72 * size + 0.02
    return [
        _ball("head", neck, (0, front, low + 0.005), sizes["chin"]),
        Bone(
            "head",
            neck,
            neck.at(0, front + 0.035, middle),
            neck.at(0, front + 0.015, middle + 0.045),
            (sizes["nose"], 0.7 * sizes["nose"]),
        ),
    ]


def _torso(sizes: Sizes, pelvis: Frame, chest: Frame) -> list[Bone]:
    top = sizes["chest height"]
    deep, ribs = sizes["waist radius"], sizes["chest radius"]
    bones = [_ball("torso", chest, (0, 0.55 * deep + 0.02, 0.0), sizes["belly"])]
    for side in (-1, 1):
        bones += [
            _ball("torso", chest, (side * 0.075, 0.75 * ribs + 0.02, top - 0.13), sizes["breast"]),
            _ball("torso", pelvis, (side * 0.062, -0.75 * sizes["hip radius"], -0.015), sizes["buttock"]),
        ]
    return bones


def _knees_and_calves(sizes: Sizes, bones: list[Bone]) -> list[Bone]:
    """Kneecaps and calves, which hang on the shins."""
    found = []
    for bone in bones:
        if bone.part == "shin":
            knee, radius = bone.joint, sizes["knee radius"]
            upper, lower = -0.2 * sizes["shin"], -0.42 * sizes["shin"]
            back = 0.75 * radius
            found += [
                _ball("shin", knee, (0, 0.65 * radius, -0.01), sizes["kneecap"]),
                Bone("shin", knee, knee.at(0, -back, upper), knee.at(0, -0.6 * back, lower), (sizes["calf"],) * 2),
            ]
    return found


def _ball(part: str, joint: Frame, place: tuple[float, float, float], radius: float) -> Bone:
    """A bone so short that it is a ball."""
    x, y, z = place
    return Bone(part, joint, joint.at(x, y, z - 0.002), joint.at(x, y, z + 0.002), (radius, radius))


def _touches_itself(shape: Shape, gaps: Floats) -> bool:
    """gaps: the gaps of the body at rest"""
    return bool(((gaps > FAR) & (_ball_gaps(shape) < NEAR)).any())


def _ball_gaps(shape: Shape, per_bone: int = 6) -> Floats:
    """The gaps between all pairs of balls along the bones. Negative if they overlap."""
    along = np.linspace(0, 1, per_bone)
    centers = shape.starts[:, None] + along[:, None] * (shape.ends - shape.starts)[:, None]
    radii = shape.radii[:, :1] + along * (shape.radii[:, 1:] - shape.radii[:, :1]) + shape.bulge[:, None]
    flat, sizes = centers.reshape(-1, 3), radii.reshape(-1)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    return np.asarray(apart - sizes[:, None] - sizes[None], np.float64)


_GROUPS = (
    ((0.88, 1.22), [name for name in _SIZES if name.endswith("radius")]),
    ((0.85, 1.15), ("upper arm", "forearm")),
    ((0.85, 1.15), ("thigh", "shin")),
)
FIGURE = Plan(PARTS, _SIZES, _LIMITS, _REST, _figure_bones, _GROUPS)
PERSON = Plan(PARTS, _FRONT_SIZES | _SIZES, _LIMITS, _REST, _person_bones, _GROUPS)
