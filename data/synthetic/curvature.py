"""The mean curvature of a figure's implicit surface, in closed form."""

from __future__ import annotations

import numpy as np

from diffnet.data.synthetic.shape import BLEND, Floats, Shape, bone_distances


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
