"""Four-legged figures of several builds, one of them rare. They stand along z and face y."""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.data.synthetic.shape import Bone, Floats, Frame, Lost, Plan, Pose, Ranges, Sizes, size_factors

PARTS = ("head", "neck", "torso", "tail", "upper leg", "lower leg", "foot")

# Mean lengths and radii, each drawn with its own relative spread.
_SIZES = {
    "trunk": (0.62, 0.06),
    "chest radius": (0.125, 0.08),
    "belly radius": (0.115, 0.10),
    "hip radius": (0.110, 0.08),
    "neck": (0.24, 0.10),
    "neck radius": (0.062, 0.10),
    "skull": (0.066, 0.08),
    "muzzle": (0.15, 0.10),
    "muzzle radius": (0.036, 0.10),
    "ear": (0.060, 0.15),
    "tail": (0.34, 0.12),
    "tail radius": (0.018, 0.10),
    "width": (0.085, 0.08),
    "upper leg": (0.26, 0.07),
    "lower leg": (0.22, 0.07),
    "hock": (0.12, 0.08),
    "thigh radius": (0.064, 0.10),
    "leg radius": (0.030, 0.08),
    "foot": (0.075, 0.10),
    "foot radius": (0.026, 0.08),
}

# Factors of the mean sizes. One animal in eight is of the rare build, which is far from all others.
BUILDS: dict[str, dict[str, float]] = {
    "horse": {"neck": 1.35, "legs": 1.18, "muzzle": 1.15, "skull": 0.95, "ear": 0.8, "foot": 0.85},
    "dog": {"trunk": 0.9, "neck": 0.85, "chest radius": 0.95, "belly radius": 0.82, "tail": 1.05},
    "cat": {"trunk": 0.88, "neck": 0.62, "muzzle": 0.5, "tail": 1.5, "legs": 0.78, "girth": 0.82, "ear": 1.0},
    "cow": {"trunk": 1.1, "girth": 1.3, "neck": 0.75, "neck radius": 1.25, "skull": 1.15, "legs": 0.85, "width": 1.2},
}
RARE = "hippopotamus"
_RARE = {"trunk": 1.1, "girth": 1.45, "neck": 0.6, "neck radius": 1.45, "skull": 1.35, "muzzle": 1.2,
         "muzzle radius": 2.0, "ear": 0.6, "tail": 0.45, "legs": 0.68, "thigh radius": 1.15, "leg radius": 1.6,
         "foot radius": 1.45, "width": 1.35}  # fmt: skip
_GROUPS = {
    "legs": ("upper leg", "lower leg", "hock"),
    "girth": ("chest radius", "belly radius", "hip radius"),
}

# Limits of the joints in degrees about y (sideways), x (forward, or up) and z (twist), for the left side.
_LIMITS: dict[str, Ranges] = {
    "spine": ((-6, 6), (-8, 8), (-14, 14)),
    "neck": ((-8, 8), (5, 60), (-28, 28)),
    "head": ((-12, 12), (-70, -15), (-25, 25)),
    "tail": ((-8, 8), (10, 75), (-30, 30)),
    "tail tip": ((-8, 8), (-30, 30), (-25, 25)),
    "hip": ((-3, 9), (-5, 38), (-6, 6)),
    "knee": ((0, 0), (-72, -25), (0, 0)),
    "ankle": ((0, 0), (12, 52), (0, 0)),
    "shoulder": ((-3, 9), (-38, 18), (-6, 6)),
    "elbow": ((0, 0), (0, 55), (0, 0)),
    "wrist": ((0, 0), (-50, 0), (0, 0)),
}
_REST = {
    **dict.fromkeys(_LIMITS, (0.0, 0.0, 0.0)),
    **{"neck": (0.0, 35.0, 0.0), "head": (0.0, -45.0, 0.0), "tail": (0.0, 45.0, 0.0), "tail tip": (0.0, 10.0, 0.0)},
    **{"hip": (2.0, 18.0, 0.0), "knee": (0.0, -45.0, 0.0), "ankle": (0.0, 30.0, 0.0)},
    **{"shoulder": (2.0, -12.0, 0.0), "elbow": (0.0, 18.0, 0.0), "wrist": (0.0, -8.0, 0.0)},
}


def build_of(number: int) -> str:
    """The build of an animal by its number in a set. One in eight is rare."""
    usual = list(BUILDS)
    return RARE if number % 8 == 7 else usual[number % len(usual)]


def build_factors(build: str) -> dict[str, float]:
    """The factors of the sizes of a build, as `sample_body` takes them."""
    return size_factors(_RARE if build == RARE else BUILDS[build], _GROUPS)


def _bones(sizes: Sizes, pose: Pose, missing: Lost) -> list[Bone]:
    half = sizes["trunk"] / 2
    hip, belly, ribs = sizes["hip radius"], sizes["belly radius"], sizes["chest radius"]
    pelvis = Frame(np.zeros(3), Rotation.identity())
    chest = pelvis.joint((0, half, 0), pose["spine", 1])
    groups = {
        0: [
            Bone("torso", pelvis, pelvis.at(0, 0, 0), pelvis.at(0, half, -0.1 * belly), (hip, belly)),
            Bone("torso", chest, chest.at(0, 0, -0.1 * belly), chest.at(0, 0.85 * half, 0), (belly, ribs)),
            *_head(sizes, pose, chest.at(0, half, 0.35 * ribs), chest),
            *_tail(sizes, pose, pelvis),
        ]
    }
    groups |= {side: [*_hind_leg(sizes, pose, pelvis, side), *_front_leg(sizes, pose, chest, side)] for side in (-1, 1)}
    return [bone for side, group in groups.items() for bone in group if (bone.part, side) not in missing]


def _head(sizes: Sizes, pose: Pose, base: Floats, chest: Frame) -> list[Bone]:
    long, radius, skull, muzzle = sizes["neck"], sizes["neck radius"], sizes["skull"], sizes["muzzle"]
    neck = Frame(base, chest.rotation).joint((0, 0, 0), pose["neck", 1])
    head = neck.joint((0, long, 0), pose["head", 1])
    bones = [
        Bone("neck", neck, neck.at(0, -0.04, 0), neck.at(0, long, 0), (1.35 * radius, radius)),
        Bone("head", head, head.at(0, 0, 0), head.at(0, 0.6 * skull, 0), (skull, 0.95 * skull)),
        Bone(
            "head",
            head,
            head.at(0, 0.5 * skull, -0.15 * skull),
            head.at(0, 0.6 * skull + muzzle, -0.25 * skull),
            (0.75 * skull, sizes["muzzle radius"]),
        ),
    ]
    for side in (-1, 1):
        root = head.at(side * 0.6 * skull, -0.25 * skull, 0.7 * skull)
        tip = head.at(side * 0.85 * skull, -0.3 * skull, 0.85 * skull + sizes["ear"])
        bones.append(Bone("head", head, root, tip, (0.020, 0.010)))
    return bones


def _tail(sizes: Sizes, pose: Pose, pelvis: Frame) -> list[Bone]:
    half, radius = sizes["tail"] / 2, sizes["tail radius"]
    root = pelvis.joint((0, -0.8 * sizes["hip radius"], 0.45 * sizes["hip radius"]), pose["tail", 1])
    tip = root.joint((0, -half, 0), pose["tail tip", 1])
    return [
        Bone("tail", root, root.at(0, 0.02, 0), root.at(0, -half, 0), (1.2 * radius, radius)),
        Bone("tail", tip, tip.at(0, 0, 0), tip.at(0, -half, 0), (radius, 0.9 * radius)),
    ]


def _hind_leg(sizes: Sizes, pose: Pose, pelvis: Frame, side: int) -> list[Bone]:
    hip = pelvis.joint((side * sizes["width"], 0, -0.25 * sizes["hip radius"]), pose["hip", side], side)
    knee = hip.joint((0, 0, -sizes["upper leg"]), pose["knee", side], side)
    ankle = knee.joint((0, 0, -sizes["lower leg"]), pose["ankle", side], side)
    thick, thin = sizes["thigh radius"], sizes["leg radius"]
    return [
        Bone("upper leg", hip, hip.origin, knee.origin, (1.15 * thick, 1.25 * thin), 0.1 * thick),
        Bone("lower leg", knee, knee.origin, ankle.origin, (1.25 * thin, 0.85 * thin), 0.2 * thin),
        *_foot(sizes, ankle),
    ]


def _front_leg(sizes: Sizes, pose: Pose, chest: Frame, side: int) -> list[Bone]:
    place = (side * 0.95 * sizes["width"], 0.78 * sizes["trunk"] / 2, -0.35 * sizes["chest radius"])
    shoulder = chest.joint(place, pose["shoulder", side], side)
    elbow = shoulder.joint((0, 0, -0.85 * sizes["upper leg"]), pose["elbow", side], side)
    wrist = elbow.joint((0, 0, -0.95 * sizes["lower leg"]), pose["wrist", side], side)
    thick, thin = sizes["thigh radius"], sizes["leg radius"]
    return [
        Bone("upper leg", shoulder, shoulder.origin, elbow.origin, (0.85 * thick, 1.1 * thin), 0.1 * thick),
        Bone("lower leg", elbow, elbow.origin, wrist.origin, (1.1 * thin, 0.85 * thin), 0.15 * thin),
        *_foot(sizes, wrist),
    ]


def _foot(sizes: Sizes, ankle: Frame) -> list[Bone]:
    """The cannon bone, and a paw that points forward."""
    low, radius = -sizes["hock"], sizes["foot radius"]
    return [
        Bone("foot", ankle, ankle.at(0, 0, 0), ankle.at(0, 0, low), (0.85 * sizes["leg radius"], 0.95 * radius)),
        Bone("foot", ankle, ankle.at(0, 0, low), ankle.at(0, sizes["foot"], low - 0.008), (radius, 0.9 * radius)),
    ]


ANIMAL = Plan(PARTS, _SIZES, _LIMITS, _REST, _bones)
