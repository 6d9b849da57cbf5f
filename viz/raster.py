"""Drawing triangles and balls into a grid of samples, with a depth buffer.

Arrays have one row per coordinate, (3, N). NumPy is several times faster on long rows than on many short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.viz.surface import Floats, Ints

BATCH = 4_000_000  # samples drawn at once, which bounds the memory


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
    shares: Floats = np.divide(weights, total, out=np.full_like(weights, 1 / 3), where=total > 0)
    return shares


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
