"""Colors that a map of points takes from one mesh to another, and pages that show them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry import Mesh
from diffnet.viz.fields import MISSING_COLOR
from diffnet.viz.palette import make_scale

CELLS = 14  # squares of the texture along the longest side
WHITE_SHARE = 0.7  # in the pale squares
MAX_ERROR = 0.2  # error / √area of the brightest color

Colors = NDArray[np.uint8]
Floats = NDArray[np.float64]


def position_colors(mesh: Mesh) -> Colors:
    """Colors (V, 3) in which red, green and blue grow with x, y and z."""
    low, high = mesh.verts.min(axis=0), mesh.verts.max(axis=0)
    shares = (mesh.verts - low) / np.where(high > low, high - low, 1)
    return (255 * (0.12 + 0.8 * shares)).round().astype(np.uint8)


def texture_colors(mesh: Mesh) -> Colors:
    """The colors of `position_colors` (V, 3), with every second cube of a grid pale."""
    low = mesh.verts.min(axis=0)
    side = max(float((mesh.verts.max(axis=0) - low).max()) / CELLS, np.finfo(np.float64).tiny)
    is_pale = np.floor((mesh.verts - low) / side).astype(np.int64).sum(axis=1) % 2 == 1
    colors = position_colors(mesh)
    return np.where(is_pale[:, None], (255 * WHITE_SHARE + (1 - WHITE_SHARE) * colors).astype(np.uint8), colors)


def pair_colors(
    first: Mesh, second: Mesh, matches: NDArray[np.int64], errors: Floats | None = None
) -> list[dict[str, Colors]]:
    """The texture and the colors of the second mesh, on both meshes, and on the first one its errors.

    matches: (V,) a vertex of the second mesh for each vertex of the first, or −1
    errors: (V,) geodesic errors at the vertices of the first mesh, or None
    """
    of_second = {"texture": texture_colors(second), "position": position_colors(second)}
    missing = np.array([MISSING_COLOR], np.uint8)  # of a vertex without a partner, -1
    colors = [{name: np.append(values, missing, axis=0)[matches] for name, values in of_second.items()}, of_second]
    if errors is not None:
        # Scalars would be shown first.
        name = f"error, from 0 to {MAX_ERROR:g} √area"
        colors_of = make_scale(errors, range=(0, MAX_ERROR)).colors
        colors[0][name], colors[1][name] = colors_of(errors), colors_of(np.full(len(second.verts), np.nan))
    return colors
