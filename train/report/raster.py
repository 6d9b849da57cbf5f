"""Drawing triangles and balls into a grid of samples, with a depth buffer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.train.report.surface import Floats, Ints

BATCH = 4_000_000  # samples drawn at once, which bounds the memory


class DepthBuffer:
    """For every sample of a picture, the nearest item (triangle or ball) drawn there.

    depths: all depths that will be drawn lie within their range; samples: height and width
    """

    def __init__(self, depths: Floats, samples: tuple[int, int]) -> None:
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


def nearest_faces(triangles: Floats, samples: tuple[int, int]) -> DepthBuffer:
    """Draw triangles (F, 3, 3) in screen coordinates into a depth buffer.

    Triangles are cut into rows, and rows into samples. The work is proportional to the covered samples, even for thin
    triangles.
    """
    nearest = DepthBuffer(triangles[..., 2], samples)
    first = _first_center(triangles[..., 1].min(axis=1), samples[0])
    rows = _first_center(triangles[..., 1].max(axis=1), samples[0]) - first
    slopes = _depth_slopes(triangles)
    near, far = triangles[..., 2].min(axis=1), triangles[..., 2].max(axis=1)
    for part in batches(rows, BATCH // 4):
        face, step = _spread(rows[part])
        face += part.start
        y = first[face] + step
        left, right = _crossings(triangles[face], y + 0.5)
        corner = triangles[face, 0]
        # The depth at the row's left end, x = 0. It starts from a corner, because planes seen edge-on are steep.
        depth = corner[:, 2] + (y + 0.5 - corner[:, 1]) * slopes[face, 1] + (0.5 - corner[:, 0]) * slopes[face, 0]
        start = _first_center(left, samples[1])
        counts = np.maximum(_first_center(right, samples[1]) - start, 0)
        for columns in batches(counts, BATCH):
            row, step = _spread(counts[columns])
            row += columns.start
            x = start[row] + step
            owner = face[row]
            at = (depth[row] + slopes[owner, 0] * x).clip(near[owner], far[owner])
            nearest.put(y[row] * samples[1] + x, at, owner)
    return nearest


def barycentric(triangles: Floats, pixels: Ints, width: int) -> Floats:
    """The barycentric weights (N, 3) of triangles (N, 3, 3) at the centers of samples (N,). None is negative."""
    at = np.stack([pixels % width, pixels // width], axis=1) + 0.5
    to = triangles[..., :2] - at[:, None]
    after, last = np.roll(to, -1, axis=1), np.roll(to, -2, axis=1)
    opposite = after[..., 0] * last[..., 1] - after[..., 1] * last[..., 0]
    weights = np.maximum(opposite * np.sign(opposite.sum(axis=1, keepdims=True)), 0)
    total = weights.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(weights, total, out=np.full_like(weights, 1 / 3), where=total > 0)
    return shares


def _crossings(triangles: Floats, y: NDArray[np.floating[Any]]) -> tuple[Floats, Floats]:
    """The x (N,) where the horizontal lines y (N,) enter the triangles (N, 3, 3), and the x (N,) where they leave."""
    ends = np.roll(triangles, -1, axis=1)
    # Sides are half-open, so a line through a vertex meets exactly two of them.
    meets = (triangles[..., 1] <= y[:, None]) != (ends[..., 1] <= y[:, None])
    rise = np.where(meets, ends[..., 1] - triangles[..., 1], 1.0)
    x = triangles[..., 0] + (y[:, None] - triangles[..., 1]) / rise * (ends[..., 0] - triangles[..., 0])
    return np.where(meets, x, np.inf).min(axis=1), np.where(meets, x, -np.inf).max(axis=1)


def _depth_slopes(triangles: Floats) -> Floats:
    """The slopes (F, 2) of depth along x and y in each triangle's plane. 0 for a plane seen edge-on."""
    b, c = triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]
    area = b[:, 0] * c[:, 1] - b[:, 1] * c[:, 0]
    area[area == 0] = np.inf
    slopes = np.stack([b[:, 2] * c[:, 1] - b[:, 1] * c[:, 2], b[:, 0] * c[:, 2] - b[:, 2] * c[:, 0]], axis=1)
    return slopes / area[:, None]


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
    """The owner and the number within its owner, for each item of counts (N,): [2, 1] gives [0, 0, 1], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
