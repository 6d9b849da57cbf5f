"""Pictures of surfaces, drawn in NumPy without a GPU, a display or OpenGL.

Triangles and balls are drawn into a grid of samples with a depth buffer, because Matplotlib has none and sorts whole
triangles by depth. Arrays of the depth buffer have one row per coordinate, (3, N). NumPy is several times faster on
long rows than on many short ones.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffnet.geometry.mesh.polygons import Floats, Ints
from diffnet.viz.fields import MISSING_COLOR
from diffnet.viz.surface import (
    Surface,
    ValuesAt,
    View,
    corner_normals,
    face_elements,
    rotation_of,
    shown_points,
    to_screen,
    view_for,
)

BACKGROUND = (250, 250, 251)
ARROW_COLOR = (26, 29, 33)
_OVERSAMPLE = 3  # samples per pixel and axis
_KEY_LIGHT = np.array([-0.45, 0.62, 0.64])
_FILL_LIGHT = np.array([0.80, 0.05, 0.60])
# Covered samples: the fields of `Drawing` after `size`, but for each sample the number of itself instead of its pixel.
_Samples: TypeAlias = "tuple[Ints, Floats, Ints, Ints | None, Floats | None]"
BATCH = 4_000_000  # samples drawn at once, which bounds the memory


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
        drawn += _draw(surface, at, arrows, shown, rotation_of(view_for(points, view)), samples, blend)
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
    places = np.append(shares, 0.0)  # the last one is for arrows
    place = places[drawing.elements]
    if drawing.corners is not None and drawing.weights is not None:
        around = places[drawing.corners]
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
    heights = None
    if at == "edges":  # of the corners over the opposite sides, times a number per triangle
        sides = np.linalg.norm(np.roll(verts[faces], -2, axis=1) - np.roll(verts[faces], -1, axis=1), axis=-1)
        heights = 1 / np.maximum(sides.T, 1e-300)

    balls = np.zeros(0, np.int64)
    radius = 0.0
    if len(surface.faces) == 0:
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
        # Unit normals toward the viewer.
        normal = np.stack([sum(normals[k, i, owner] * weights[k] for k in range(3)) for i in range(3)])
        normal *= np.where(normal[2] < 0, -1.0, 1.0) / np.maximum(np.sqrt((normal**2).sum(axis=0)), 1e-300)
        yield pixels[is_face], _shade(normal), nearest_elements, *blended
        if len(balls):
            ball = items[~is_face] - len(faces)
            yield _ball_samples(pixels[~is_face], centers[ball], radius, balls[ball], samples[1], blend)


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
    return (0.48 + 0.52 * key + 0.18 * fill) * (1 - 0.45 * (1 - facing) ** 3)


class DepthBuffer:
    """For every sample of a picture, the nearest item (triangle or ball) drawn there.

    depths: all depths that will be drawn lie within their range; samples: height and width
    """

    def __init__(self, depths: Floats, samples: tuple[int, int]) -> None:
        self.samples = samples
        self._low = float(depths.min(initial=0.0))
        self._steps = (2**30 - 1) / max(float(depths.max(initial=0.0)) - self._low, 1.0)
        # The upper half of each integer is the depth, the lower half the item. One minimum finds both and breaks ties.
        self._keys = np.full(samples[0] * samples[1], np.iinfo(np.int64).max)

    def put(self, pixels: Ints, depth: Floats, items: Ints) -> None:
        """Draw items (N,), numbers below 2³², at samples (N,) and depths (N,)."""
        np.minimum.at(self._keys, pixels, (((depth - self._low) * self._steps).astype(np.int64) << 32) | items)

    def visible(self) -> Iterator[tuple[Ints, Ints]]:
        """Batches of the samples (N,) where anything was drawn, with the nearest item (N,) at each."""
        pixels = np.flatnonzero(self._keys != np.iinfo(np.int64).max)
        for start in range(0, len(pixels), BATCH // 8):
            part = pixels[start : start + BATCH // 8]
            yield part, self._keys[part] & 0xFFFFFFFF


def put_faces(nearest: DepthBuffer, triangles: Floats) -> None:
    """Draw triangles (3, 3, F), by corner and screen coordinate, into a depth buffer as the items 0 … F - 1.

    Triangles are cut into rows, and rows into samples. The work is proportional to the covered samples, even for thin
    triangles.
    """
    height, width = nearest.samples
    triangles = np.take_along_axis(triangles, triangles[:, 1:2].argsort(axis=0, kind="stable"), axis=0)  # by height
    first = _first_center(triangles[0, 1], height)
    rows = _first_center(triangles[2, 1], height) - first
    for part in batches(rows, BATCH // 4):
        face, step = _spread(rows[part])
        face += part.start
        y = first[face] + step
        left, right, near_left, near_right = _row_ends(triangles, face, y + 0.5)
        start = _first_center(left, width)
        counts = np.maximum(_first_center(right, width) - start, 0)
        slope = np.divide(near_right - near_left, right - left, out=np.zeros_like(left), where=right > left)
        depth = near_left + slope * (start + 0.5 - left)
        pixel = y * width + start
        for columns in batches(counts, BATCH):
            row, step = _spread(counts[columns])
            row += columns.start
            nearest.put(pixel[row] + step, depth[row] + slope[row] * step, face[row])


def put_balls(nearest: DepthBuffer, centers: Floats, radius: float, first: int) -> None:
    """Draw balls around centers (N, 3) in screen coordinates into a depth buffer as the items first … first + N - 1."""
    height, width = nearest.samples
    reach = np.arange(-int(np.ceil(radius)), int(np.ceil(radius)) + 1)
    dy, dx = (grid.ravel() for grid in np.meshgrid(reach, reach, indexing="ij"))
    for part in batches(np.full(len(centers), len(dx)), BATCH):
        center = centers[part]
        x, y = np.floor(center[:, :1]).astype(int) + dx, np.floor(center[:, 1:2]).astype(int) + dy
        away = (x + 0.5 - center[:, :1]) ** 2 + (y + 0.5 - center[:, 1:2]) ** 2
        inside = (away < radius**2) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
        ball = np.nonzero(inside)[0]
        depth = center[ball, 2] - np.sqrt(radius**2 - away[inside])
        nearest.put((y * width + x)[inside], depth, ball + part.start + first)


def _row_ends(triangles: Floats, face: Ints, y: NDArray[np.floating[Any]]) -> tuple[Floats, Floats, Floats, Floats]:
    """The x (N,) where horizontal lines enter triangles, the x (N,) where they leave, and the depths (N,) at both.

    triangles: (3, 3, F), the corners of each from top to bottom
    face, y: (N,), the lines; line i crosses triangle face[i]

    Two triangles that share a side get the same x there, so no sample between them is missed.
    """
    # A line crosses the side from the top to the bottom, and the side above or below the middle corner.
    above = y < triangles[1, 1, face]
    sides = []
    for upper, lower in ((0, 2), (np.where(above, 0, 1), np.where(above, 1, 2))):
        (x0, y0, z0), (x1, y1, z1) = ([triangles[corner, i, face] for i in range(3)] for corner in (upper, lower))
        share = (y - y0) / (y1 - y0)
        sides.append((x0 + share * (x1 - x0), z0 + share * (z1 - z0)))
    (x, z), (other_x, other_z) = sides
    swap = other_x < x
    return (
        np.where(swap, other_x, x),
        np.where(swap, x, other_x),
        np.where(swap, other_z, z),
        np.where(swap, z, other_z),
    )


def barycentric(triangles: Floats, face: Ints, pixels: Ints, width: int) -> Floats:
    """The barycentric weights (3, N) of triangles face (N,) at the centers of samples (N,). None is negative.

    triangles: (3, 3, F), by corner and screen coordinate
    """
    x, y = pixels % width + 0.5, pixels // width + 0.5
    to = [(triangles[k, 0, face] - x, triangles[k, 1, face] - y) for k in range(3)]
    opposite = np.stack([to[k - 2][0] * to[k - 1][1] - to[k - 2][1] * to[k - 1][0] for k in range(3)])
    weights = np.maximum(opposite * np.sign(opposite.sum(axis=0)), 0)
    total = weights.sum(axis=0)
    return np.divide(weights, total, out=np.full_like(weights, 1 / 3), where=total > 0)


def _first_center(edge: Floats, limit: int) -> Ints:
    """The first of the samples 0 … limit - 1 whose center is at or after an edge. `limit` if there is none."""
    return np.ceil(edge - 0.5).clip(0, limit).astype(np.int64)


def batches(sizes: Ints, limit: int) -> Iterator[slice]:
    """Slices over items of given sizes (N,). Each holds about `limit` in total, or a single item."""
    group = (np.cumsum(sizes) - sizes) // limit
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For each item of N groups with counts (N,), its group and its place there: [2, 1] gives [0, 0, 1], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
