"""Pictures of surfaces, drawn in NumPy without a GPU, a display or OpenGL."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffnet.viz.fields import MISSING_COLOR
from diffnet.viz.raster import DepthBuffer, barycentric, put_balls, put_faces
from diffnet.viz.surface import Floats, Ints, Surface, ValuesAt, corner_normals, face_elements, shown_points
from diffnet.viz.view import View, chosen_view, rotation_of, to_screen

BACKGROUND = (250, 250, 251)
ARROW_COLOR = (26, 29, 33)
_OVERSAMPLE = 3  # samples per pixel and axis
_KEY_LIGHT = np.array([-0.45, 0.62, 0.64])
_FILL_LIGHT = np.array([0.80, 0.05, 0.60])


class Drawing(NamedTuple):
    """A surface seen from one direction, before it is colored. Pictures of several fields share it.

    size: width and height in pixels
    pixels, brightness, elements: (N,), for each covered sample its pixel (from 0, row by row), its brightness, and the
        element that colors it. The element of arrows is -1.
    corners, weights: (3, N) or None, the vertices around each sample and their barycentric weights
    """

    size: tuple[int, int]
    pixels: Ints
    brightness: Floats
    elements: Ints
    corners: Ints | None = None
    weights: Floats | None = None


# Covered samples: the fields of `Drawing` after `size`, but for each sample the number of itself instead of its pixel.
_Samples: TypeAlias = "tuple[Ints, Floats, Ints, Ints | None, Floats | None]"


def draw(
    surface: Surface,
    at: ValuesAt,
    size: tuple[int, int],
    view: View | tuple[float, float] | None = None,
    *,
    arrows: Surface | None = None,
    blend: bool = False,
) -> Drawing:
    """Draw a surface from a view, to be colored by values at its elements. The projection is orthographic.

    The points of a cloud are drawn as small balls. Triangles are drawn from both sides. Triangles and points with NaN
    or infinite coordinates are left out. Values are not blended: each point of a triangle has the element of its
    nearest corner or side.

    size: width and height in pixels
    view: a `View`, or its azimuth and elevation in degrees. Default: `default_view`, which always chooses the up axis.
    arrows: triangles to draw in addition, see `arrow_surface`
    blend: whether to keep `corners` and `weights`, for values that are blended between vertices

    Raises ValueError for a size below 1 × 1.
    """
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the picture's size should be at least 1 × 1, got {width} × {height}")
    samples = (height * _OVERSAMPLE, width * _OVERSAMPLE)
    points = shown_points(surface)
    none = (np.zeros((3, 0), np.int64), np.zeros((3, 0))) if blend else (None, None)
    drawn: list[_Samples] = [(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), *none)]
    if len(points):
        shown = points if arrows is None else np.concatenate([points, arrows.verts])
        drawn += _draw(surface, at, arrows, shown, rotation_of(chosen_view(points, view)), samples, blend)
    fields: list[Any] = [None if x[0] is None else np.concatenate(x, -1) for x in zip(*drawn, strict=True)]
    pixels, *others = fields
    y, x = np.divmod(pixels, samples[1])
    return Drawing(size, y // _OVERSAMPLE * width + x // _OVERSAMPLE, *others)


def paint(drawing: Drawing, colors: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture (H, W, 3) uint8 of a drawing whose elements have the colors (N, 3) uint8."""
    width, height = drawing.size
    table = np.concatenate([colors, np.array([ARROW_COLOR], np.uint8)])  # the element -1 is the last row
    empty = _OVERSAMPLE**2 - np.bincount(drawing.pixels, minlength=width * height)
    image = np.empty((width * height, 3), np.uint8)
    for i in range(3):
        if drawing.corners is None or drawing.weights is None:
            color = table[drawing.elements, i]
        else:
            color = (table[drawing.corners, i] * drawing.weights).sum(axis=0)
        sample = np.minimum(color * drawing.brightness, 255)
        total = np.bincount(drawing.pixels, sample, width * height) + empty * float(BACKGROUND[i])
        image[:, i] = (total / _OVERSAMPLE**2).round()
    return image.reshape(height, width, 3)


def paint_scalars(drawing: Drawing, shares: Floats, table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture (H, W, 3) uint8 of a drawing whose elements have places (N,) from 0 to 1 in a table of colors.

    If the drawing has `corners`, the places are blended, and not the colors. NaN has `MISSING_COLOR`.
    """
    last = len(table) - 1
    given = np.append(shares, 0.0)  # the last one is for arrows
    place = given[drawing.elements]
    if drawing.corners is not None and drawing.weights is not None:
        around = given[drawing.corners]
        weights = np.where(np.isnan(around), 0, drawing.weights)
        total = weights.sum(axis=0)
        mean = np.divide(
            (np.nan_to_num(around) * weights).sum(axis=0), total, out=np.zeros_like(total), where=total > 0
        )
        place = np.where(np.isnan(place), np.nan, mean)
    missing = np.isnan(place)
    rows = np.where(missing, last + 1, (np.where(missing, 0, place) * last).round()).astype(np.int64)
    rows[drawing.elements < 0] = -1
    flat = drawing._replace(elements=rows, corners=None, weights=None)
    return paint(flat, np.concatenate([table, np.array([MISSING_COLOR], np.uint8)]))


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """The content of a PNG file that holds a picture (H, W, 3)."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="png")  # optimize=True takes three times as long and saves 2 %
    return out.getvalue()


def _draw(
    surface: Surface,
    at: ValuesAt,
    arrows: Surface | None,
    shown: Floats,
    rotation: Floats,
    samples: tuple[int, int],
    blend: bool,
) -> Iterator[_Samples]:
    """Batches of covered samples. The picture is filled by the points `shown` (N, 3)."""
    verts, faces = surface[:2]
    elements, corners = face_elements(faces, at), faces
    if arrows is not None:
        faces = np.concatenate([faces, arrows.faces + len(verts)])
        verts = np.concatenate([verts, arrows.verts])
        none = np.full((len(arrows.faces), 3), -1)
        elements, corners = np.concatenate([elements, none]), np.concatenate([corners, none])
    screen, scale = to_screen(verts, shown, rotation, samples)
    finite = np.isfinite(screen[faces]).all(axis=(1, 2))
    faces, elements, corners = faces[finite], elements[finite], corners[finite].T
    triangles = _by_corner(screen[faces])
    normals = _by_corner(corner_normals(verts, faces) @ rotation.T)
    heights = _heights(verts[faces]) if at == "edges" else None

    balls = np.zeros(0, np.int64)
    radius = 0.0
    if surface.is_cloud:
        balls = np.flatnonzero(np.isfinite(screen[: len(surface.verts)]).all(axis=1))
        radius = _ball_radius(surface.verts[balls], rotation, scale)
    centers = screen[balls]
    nearest = DepthBuffer(np.concatenate([triangles[:, 2].ravel(), *(centers[:, 2] - [[radius], [0.0]])]), samples)
    put_faces(nearest, triangles)
    put_balls(nearest, centers, radius, first=len(faces))
    for pixels, items in nearest.visible():
        is_face = items < len(faces)
        owner = items[is_face]
        weights = barycentric(triangles, owner, pixels[is_face], samples[1])
        # The distance to a side is the opposite corner's weight times its height.
        nearness = weights if heights is None else -weights * heights[:, owner]
        nearest_elements = elements[owner, nearness.argmax(axis=0)]
        blended = (corners[:, owner], weights) if blend else (None, None)
        yield pixels[is_face], _shade(_facing(normals, owner, weights)), nearest_elements, *blended
        if len(balls):
            ball = items[~is_face] - len(faces)
            yield _ball_samples(pixels[~is_face], centers[ball], radius, balls[ball], samples[1], blend)


def _facing(normals: Floats, owner: Ints, weights: Floats) -> Floats:
    """The unit normals (3, N) toward the viewer at points of triangles `owner` (N,) with barycentric weights (3, N).

    normals: (3, 3, F), by corner and coordinate
    """
    normal = np.stack([sum(normals[k, i, owner] * weights[k] for k in range(3)) for i in range(3)])
    normal *= np.where(normal[2] < 0, -1.0, 1.0) / np.maximum(np.sqrt((normal**2).sum(axis=0)), 1e-300)
    return normal


def _heights(corners: Floats) -> Floats:
    """The heights (3, F) of the corners of triangles (F, 3, 3) over the opposite sides, times a number per triangle."""
    sides = np.linalg.norm(np.roll(corners, -2, axis=1) - np.roll(corners, -1, axis=1), axis=-1)
    heights: Floats = 1 / np.maximum(sides.T, 1e-300)
    return heights


def _ball_samples(pixels: Ints, centers: Floats, radius: float, elements: Ints, width: int, blend: bool) -> _Samples:
    """The samples of balls with centers (N, 3), one for each sample. The radius is in samples."""
    across = (pixels % width + 0.5 - centers[:, 0]) / radius
    down = (pixels // width + 0.5 - centers[:, 1]) / radius
    toward = np.sqrt(np.maximum(1 - across**2 - down**2, 0))
    corners = np.stack([elements] * 3) if blend else None
    weights = np.repeat([[1.0], [0.0], [0.0]], len(elements), axis=1) if blend else None
    return pixels, _shade(np.stack([across, -down, toward])), elements, corners, weights


def _by_corner(values: Floats) -> Floats:
    """Values (F, 3, 3) by corner and coordinate, (3, 3, F). Operations on such rows are several times faster."""
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
