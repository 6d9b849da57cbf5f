"""Figures with a front: a face, breasts, a belly, buttocks, knees and calves, and longer feet."""

from __future__ import annotations

from diffnet.data.synthetic.shape import FIGURE, Bone, Frame, Lost, Plan, Pose, Sizes, figure_bones, figure_frames

# Mean sizes besides those of figures, each with its own relative spread.
_SIZES = {
    "belly": (0.060, 0.25),
    "breast": (0.040, 0.25),
    "buttock": (0.062, 0.15),
    "nose": (0.012, 0.2),
    "chin": (0.026, 0.15),
    "kneecap": (0.030, 0.12),
    "calf": (0.026, 0.2),
}


def _bones(sizes: Sizes, pose: Pose, missing: Lost) -> list[Bone]:
    longer = sizes | {"foot": 1.25 * sizes["foot"]}
    bones = figure_bones(longer, pose, missing)
    pelvis, chest, neck = figure_frames(longer, pose)
    return [*bones, *_face(sizes, neck), *_torso(sizes, pelvis, chest), *_legs(sizes, bones)]


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


def _legs(sizes: Sizes, bones: list[Bone]) -> list[Bone]:
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


PERSON = Plan(FIGURE.parts, _SIZES | FIGURE.sizes, FIGURE.limits, FIGURE.rest, _bones, FIGURE.groups)
