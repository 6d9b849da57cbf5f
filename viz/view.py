"""The direction that a picture is seen from, and the projection to its samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from diffnet.viz.surface import Floats

_MARGIN = 0.05  # of the picture, on each side


class View(NamedTuple):
    """The viewer's direction. Angles are in degrees.

    up: the coordinate axis that points up in the picture, "y" or "z"
    azimuth: 0 looks from +z if y is up, and from -y if z is up. It grows counterclockwise as seen from above.
    elevation: angle above the horizon; 90 looks straight down
    """

    up: str
    azimuth: float
    elevation: float


def chosen_view(points: Any, view: View | tuple[float, float] | None) -> View:
    """The view itself, the view with an azimuth and an elevation and the default up axis, or the default view."""
    if isinstance(view, View):
        return view
    default = default_view(points)
    return default if view is None else View(default.up, *view)


def default_view(points: Any) -> View:
    """The default view of finite points (N, 3).

    Up is the axis, y or z, along which the points extend farther; y wins a tie. The viewer looks along the horizontal
    direction of least variance, where the points look widest. A turn of 15° to the side and 15° up then shows depth.
    """
    extent = np.ptp(points, axis=0)
    up = "z" if extent[2] > extent[1] else "y"
    right, _, front = _axes(up)
    flat = (points - points.mean(axis=0)) @ np.stack([right, front], axis=1)
    across, toward = np.linalg.eigh(flat.T @ flat)[1][:, 0]
    if across + toward < 0:  # of the two sides, the one nearer to azimuths 0 and 90
        across, toward = -across, -toward
    return View(up, float(np.degrees(np.arctan2(across, toward))) + 15.0, 15.0)


def _axes(up: str) -> tuple[Floats, Floats, Floats]:
    """The directions right, up and toward the viewer at azimuth and elevation 0."""
    x, y, z = np.eye(3)
    return (x, y, z) if up == "y" else (x, z, -y)


def rotation_of(view: View) -> Floats:
    """The directions right, up and toward the viewer, as the rows of a rotation matrix (3, 3)."""
    right, up, front = _axes(view.up)
    a, e = np.radians(view.azimuth), np.radians(view.elevation)
    ahead = np.sin(a) * right + np.cos(a) * front
    across = np.cos(a) * right - np.sin(a) * front
    toward = np.cos(e) * ahead + np.sin(e) * up
    return np.stack([across, np.cross(toward, across), toward])


def to_screen(verts: Floats, points: Floats, rotation: Floats, samples: tuple[int, int]) -> tuple[Floats, float]:
    """Project vertices (V, 3) so that the shown points (N, 3) fill the picture.

    samples: height and width of the picture

    Returns (V, 3): x to the right, y down and depth away from the viewer, in samples; and the samples per unit length.
    """
    turned = points @ rotation.T
    low, high = turned.min(axis=0), turned.max(axis=0)
    height, width = samples
    # The lower bound keeps the scale finite for a single point, and for points in line with the viewer.
    extent = np.maximum(high - low, 1e-6 * np.abs(turned).max() + 1e-30)
    scale = float(min(width / extent[0], height / extent[1]) * (1 - 2 * _MARGIN))
    middle = (verts @ rotation.T - (low + high) / 2) * scale
    return middle * [1, -1, -1] + [width / 2, height / 2, 0], scale
