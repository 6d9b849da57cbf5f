"""Pictures of labeled surfaces, drawn in NumPy without a GPU, a display or OpenGL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    return paint(draw(verts, faces, at, size, view), labels, colors)


class Drawing(NamedTuple):
    """A surface seen from one direction, before it is colored. Pictures of several labelings share it.

    size: width and height in pixels
    pixels, elements, brightness: (N,), for each covered sample its pixel (from 0, row by row), the element that colors
        it, and its brightness
    """

    size: tuple[int, int]
    pixels: Ints
    elements: Ints
    brightness: Floats


def draw(
    verts: Floats, faces: Ints, at: LabelsAt, size: tuple[int, int], view: tuple[float, float] | None = None
) -> Drawing:
    """Draw checked vertices (V, 3) and faces (F, 3), see `check_labeled`. `render` explains the arguments.

    Raises ValueError for a size below 1 × 1.
    """
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the picture's size should be at least 1 × 1, got {width} × {height}")
    samples = (height * _OVERSAMPLE, width * _OVERSAMPLE)
    points = shown_points(verts, faces)
    drawn: list[tuple[Ints, Floats, Ints]] = []
    if len(points):
        chosen = default_view(points)
        if view is not None:
            chosen = View(chosen.up, *view)
        rotation = rotation_of(chosen)
        screen, scale = to_screen(verts, points, rotation, samples)
        if len(faces):
            drawn = list(_draw_faces(verts, faces, screen, rotation, at, samples))
        else:
            drawn = list(_draw_points(screen, samples, _ball_radius(points, rotation, scale)))
    empty = np.zeros(0, np.int64)
    pixels = np.concatenate([empty, *(part[0] for part in drawn)])
    y, x = np.divmod(pixels, samples[1])
    return Drawing(
        size,
        y // _OVERSAMPLE * width + x // _OVERSAMPLE,
        np.concatenate([empty, *(part[2] for part in drawn)]),
        np.concatenate([np.zeros(0), *(_shade(part[1]) for part in drawn)]),
    )


def paint(drawing: Drawing, labels: Ints, colors: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The picture (H, W, 3) uint8 of a drawing, with each element in the color of its label (N,)."""
    width, height = drawing.size
    table = colorize(labels, colors)
    empty = _OVERSAMPLE**2 - np.bincount(drawing.pixels, minlength=width * height)
    image = np.empty((width * height, 3), np.uint8)
    for i in range(3):
        sample = np.minimum(table[drawing.elements, i] * drawing.brightness, 255)
        total = np.bincount(drawing.pixels, sample, width * height) + empty * float(BACKGROUND[i])
        image[:, i] = (total / _OVERSAMPLE**2).round()
    return image.reshape(height, width, 3)


def _draw_faces(
    verts: Floats, faces: Ints, screen: Floats, rotation: Floats, at: LabelsAt, samples: tuple[int, int]
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Batches of covered samples (N,), with the normal toward the viewer (3, N) and the element (N,) at each."""
    elements = face_elements(faces, at)
    finite = np.isfinite(screen[faces]).all(axis=(1, 2))
    faces, elements = faces[finite], elements[finite]
    triangles = _by_corner(screen[faces])
    normals = _by_corner(corner_normals(verts, faces) @ rotation.T)
    heights = _heights(verts[faces]) if at == "edges" else None
    for pixels, owner in nearest_faces(triangles, samples).visible():
        weights = barycentric(triangles, owner, pixels, samples[1])
        normal = np.stack([sum(normals[k, i, owner] * weights[k] for k in range(3)) for i in range(3)])
        normal *= np.where(normal[2] < 0, -1.0, 1.0) / np.maximum(np.sqrt((normal**2).sum(axis=0)), 1e-300)
        # The distance to a side is the opposite corner's weight times its height.
        nearness = weights if heights is None else -weights * heights[:, owner]
        nearest = nearness.argmax(axis=0)
        yield pixels, normal, elements[owner, nearest]


def _heights(corners: Floats) -> Floats:
    """The heights (3, F) of triangles (F, 3, 3) over the side opposite to each corner, up to a factor per triangle."""
    sides = np.linalg.norm(np.roll(corners, -2, axis=1) - np.roll(corners, -1, axis=1), axis=-1)
    heights: Floats = 1 / np.maximum(sides.T, 1e-300)
    return heights


def _draw_points(screen: Floats, samples: tuple[int, int], radius: float) -> Iterator[tuple[Ints, Floats, Ints]]:
    """The same as `_draw_faces`, for balls around the points. The radius is in samples."""
    finite = np.flatnonzero(np.isfinite(screen).all(axis=1))
    screen = screen[finite]
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
        across = (pixels % samples[1] + 0.5 - screen[owner, 0]) / radius
        down = (pixels // samples[1] + 0.5 - screen[owner, 1]) / radius
        toward = np.sqrt(np.maximum(1 - across**2 - down**2, 0))
        yield pixels, np.stack([across, -down, toward]), finite[owner]


def _by_corner(values: Floats) -> Floats:
    """Values (F, 3, 3) by corner and coordinate, (3, 3, F). Operations on such long rows are several times faster."""
    return np.ascontiguousarray(values.transpose(1, 2, 0))


def _ball_radius(points: Floats, rotation: Floats, scale: float) -> float:
    """The radius of the balls in samples: about half the distance of neighbors, if the points were spread evenly."""
    extent = np.ptp(points @ rotation[:2].T, axis=0) * scale
    even = 0.75 * np.sqrt(extent[0] * extent[1] / len(points))
    return float(np.clip(even, 1.2 * _OVERSAMPLE, 12.0 * _OVERSAMPLE))


def _shade(normals: Floats) -> Floats:
    """The brightness (N,) of a surface with normals (3, N): two lights, ambient light, and darker near the outline."""
    key = np.maximum(_KEY_LIGHT / np.linalg.norm(_KEY_LIGHT) @ normals, 0)
    fill = np.maximum(_FILL_LIGHT / np.linalg.norm(_FILL_LIGHT) @ normals, 0)
    facing = normals[2].clip(0, 1)
    brightness: Floats = (0.48 + 0.52 * key + 0.18 * fill) * (1 - 0.45 * (1 - facing) ** 3)
    return brightness
