"""Moves the surface of one body onto the surface of another, so that corresponding points are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from diffnet.data.synthetic.shape import BLEND, REACH, Body, Floats, Shape
from diffnet.data.synthetic.surface import Ints

STEPS = 24
# Points change from one bone to the next over the first distance, and a bone affects points within the second.
FOLLOW = 0.03
NOTICE = 6 * FOLLOW
_LAST_STEPS = 3


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


def deformed(points: Floats, start: Body, end: Body, steps: int = STEPS) -> Floats:
    """Move points (P, 3) on the skin of one body to the skin of another, in small steps from pose to pose.

    In each step, a point follows the bones near it: it keeps its place along each bone and around it. Then it moves
    onto the skin of the next pose along the gradient. Each step is smooth and one-to-one, so the whole way is, too, if
    the body does not touch itself on the way.
    """
    shape = start.shape()
    for step in range(1, steps + 1):
        following = start.toward(end, step / steps).shape()
        points = _follow(points, shape, following)
        for _ in range(_LAST_STEPS if step == steps else 1):
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
        growth = _radius(following, bone, near.along) / near.radius
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
    radius = _radius(shape, bone, along)
    first, last = shape.radii[bone]
    growth = last - first + 6.75 * shape.bulge[bone] * (1 - along) * (1 - 3 * along)
    gradient = offset / to_axis[:, None] - (np.where(free == along, growth, 0.0) / square)[:, None] * axis
    return _Near(numbers, to_axis - radius, along, offset, radius, gradient)


def _radius(shape: Shape, bone: int, along: Floats) -> Floats:
    first, last = shape.radii[bone]
    return np.asarray(first + (last - first) * along + shape.bulge[bone] * 6.75 * along * (1 - along) ** 2, np.float64)
