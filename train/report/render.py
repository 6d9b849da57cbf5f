"""Pictures of labeled surfaces, drawn in NumPy without a GPU, a display or OpenGL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt
from diffnet.train.report.palette import colorize
from diffnet.train.report.raster import BATCH, DepthBuffer, barycentric, batches, nearest_faces
from diffnet.train.report.surface import (
    Floats,
    Ints,
    check_labeled,
    corner_normals,
    face_elements,
    shown_points,
    unit,
)
from diffnet.train.report.view import View, default_view, rotation_of, to_screen

BACKGROUND = (250, 250, 251)
_OVERSAMPLE = 3  # samples per pixel and axis
_KEY_LIGHT = np.array([-0.45, 0.62, 0.64])
_FILL_LIGHT = np.array([0.80, 0.05, 0.60])


def render(
    verts: Any,
    faces: Any,
    labels: Any,
    *,
    at: LabelsAt = "vertices",
    size: tuple[int, int] = (600, 600),
    view: tuple[float, float] | None = None,
    colors: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Draw a mesh or point cloud with each element in the color of its label. Returns a picture (H, W, 3) uint8.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud, which is drawn as small balls
    labels: (V,), (F,) or (E,) integers, according to `at`. Edges are in the order of `mesh_edges`. Negative labels are
        gray. Labels are never blended: each point of a triangle has the label of its nearest corner or side.
    size: width and height in pixels
    view: azimuth and elevation in degrees, see `View`. Default: `default_view`, which always chooses the up axis.
    colors: (n, 3) uint8, colors to use instead of `label_colors`

    The projection is orthographic. Both sides of the surface are drawn. Triangles and points with NaN or infinite
    coordinates are left out. Raises ValueError for shapes that do not fit.

    >>> render([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]], [0, 1, 1], size=(60, 40)).shape
    (40, 60, 3)
    """
    verts, faces, labels = check_labeled(verts, faces, labels, at)
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the picture's size should be at least 1 × 1, got {width} × {height}")
    samples = (height * _OVERSAMPLE, width * _OVERSAMPLE)
    image = np.empty((samples[0] * samples[1], 3), np.uint8)
    image[:] = BACKGROUND
    points = shown_points(verts, faces)
    if len(points):
        chosen = default_view(points)
        if view is not None:
            chosen = View(chosen.up, *view)
        rotation = rotation_of(chosen)
        screen, scale = to_screen(verts, points, rotation, samples)
        if len(faces):
            drawn = _draw_faces(verts, faces, screen, rotation, labels, at, samples)
        else:
            drawn = _draw_points(screen, labels, samples, _ball_radius(points, rotation, scale))
        for pixels, normals, seen in drawn:
            image[pixels] = (colorize(seen, colors) * _shade(normals)[:, None]).clip(0, 255)
    blocks = image.reshape(height, _OVERSAMPLE, width, _OVERSAMPLE, 3)
    smooth: NDArray[np.uint8] = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return smooth


def _draw_faces(
    verts: Floats,
    faces: Ints,
    screen: Floats,
    rotation: Floats,
    labels: Ints,
    at: LabelsAt,
    samples: tuple[int, int],
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Batches of covered samples (N,), with the normal toward the viewer (N, 3) and the label (N,) at each."""
    elements = face_elements(faces, at)
    finite = np.isfinite(screen[faces]).all(axis=(1, 2))
    faces, elements = faces[finite], elements[finite]
    triangles = screen[faces]
    normals = corner_normals(verts, faces) @ rotation.T
    corners = verts[faces]
    sides = np.linalg.norm(np.roll(corners, -2, axis=1) - np.roll(corners, -1, axis=1), axis=-1)
    for pixels, owner in nearest_faces(triangles, samples).visible():
        weights = barycentric(triangles[owner], pixels, samples[1])
        normal = unit((normals[owner] * weights[..., None]).sum(axis=1))
        normal *= np.where(normal[:, 2:] < 0, -1.0, 1.0)
        if at == "edges":
            # The distance to a side is the opposite corner's weight times its height, and heights go as 1 / side.
            nearest = (weights / np.maximum(sides, 1e-300)[owner]).argmin(axis=1)
        else:
            nearest = weights.argmax(axis=1)
        yield pixels, normal, labels[elements[owner, nearest]]


def _draw_points(
    screen: Floats, labels: Ints, samples: tuple[int, int], radius: float
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """The same as `_draw_faces`, for balls around the points. The radius is in samples."""
    finite = np.isfinite(screen).all(axis=1)
    screen, labels = screen[finite], labels[finite]
    nearest = DepthBuffer(screen[:, 2] - [[radius], [0.0]], samples)
    reach = np.arange(-int(np.ceil(radius)), int(np.ceil(radius)) + 1)
    dy, dx = (grid.ravel() for grid in np.meshgrid(reach, reach, indexing="ij"))
    for part in batches(np.full(len(screen), len(dx)), BATCH):
        center = screen[part]
        x, y = np.floor(center[:, :1]).astype(int) + dx, np.floor(center[:, 1:2]).astype(int) + dy
        away = (x + 0.5 - center[:, :1]) ** 2 + (y + 0.5 - center[:, 1:2]) ** 2
        inside = (away < radius**2) & (x >= 0) & (x < samples[1]) & (y >= 0) & (y < samples[0])
        point = np.nonzero(inside)[0]
        depth = center[point, 2] - np.sqrt(radius**2 - away[inside])
        nearest.put((y * samples[1] + x)[inside], depth, point + part.start)
    for pixels, owner in nearest.visible():
        place = np.stack([pixels % samples[1], pixels // samples[1]], axis=1) + 0.5
        offset = (place - screen[owner, :2]) / radius
        toward = np.sqrt(np.maximum(1 - (offset**2).sum(axis=1), 0))
        yield pixels, np.stack([offset[:, 0], -offset[:, 1], toward], axis=1), labels[owner]


def _ball_radius(points: Floats, rotation: Floats, scale: float) -> float:
    """The radius of the balls in samples: about half the distance of neighbors, if the points were spread evenly."""
    extent = np.ptp(points @ rotation[:2].T, axis=0) * scale
    even = 0.75 * np.sqrt(extent[0] * extent[1] / len(points))
    return float(np.clip(even, 1.2 * _OVERSAMPLE, 12.0 * _OVERSAMPLE))


def _shade(normals: Floats) -> Floats:
    """The brightness (N,) of a surface with normals (N, 3): two lights, ambient light, and darker near the outline."""
    key = np.maximum(normals @ (_KEY_LIGHT / np.linalg.norm(_KEY_LIGHT)), 0)
    fill = np.maximum(normals @ (_FILL_LIGHT / np.linalg.norm(_FILL_LIGHT)), 0)
    facing = normals[:, 2].clip(0, 1)
    brightness: Floats = (0.48 + 0.52 * key + 0.18 * fill) * (1 - 0.45 * (1 - facing) ** 3)
    return brightness
