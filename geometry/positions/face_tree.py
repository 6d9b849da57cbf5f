"""A tree of boxes around the faces of a mesh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class FaceTree(NamedTuple):
    """A tree of boxes with sides along the axes. The boxes of the last level hold one face each.

    Each level has a whole multiple of the boxes of the level before: box i holds boxes i * n to i * n + n - 1.

    lows, highs: the corners of the boxes of each level, (1, 3), (2, 3), (4, 3) …
    faces: the face in each box of the last level. A face may occur twice.
    """

    lows: list[Floats]
    highs: list[Floats]
    faces: Ints

    @property
    def last(self) -> int:
        """The number of the last level."""
        return len(self.lows) - 1

    def parts(self, level: int, boxes: Ints) -> Ints:
        """The boxes (N, n) of the next level in boxes (N,) of a level."""
        count = len(self.lows[level + 1]) // len(self.lows[level])
        return count * boxes[:, None] + np.arange(count)

    def squared_distances(self, level: int, boxes: Ints, points: Floats) -> Floats:
        """Squared distances (N,) from points (N, 3) to boxes (N,) of a level. They are 0 for points in their boxes."""
        gaps = np.maximum(self.lows[level][boxes] - points, points - self.highs[level][boxes])
        np.maximum(gaps, 0, out=gaps)
        squares: Floats = np.einsum("nx,nx->n", gaps, gaps)
        return squares


def face_tree(corners: Floats) -> FaceTree:
    """The tree of faces with these corners (F, 3, 3). There must be at least one face.

    Each box is divided where half of its faces are on either side, across its longest extent.
    """
    depth = max(0, len(corners).bit_length() - 2)
    count = -(-len(corners) // 2**depth)  # 2 or 3 faces, or 4 in the largest meshes of a depth
    order = np.resize(np.arange(len(corners)), count * 2**depth)
    low, high = corners.min(axis=1), corners.max(axis=1)
    middles = (low + high) / 2
    for level in range(depth):
        order = order.reshape(2**level, -1)
        places = middles[order]
        axes = np.ptp(places, axis=1).argmax(axis=1)
        along = np.take_along_axis(places, axes[:, None, None], axis=2)[:, :, 0]
        order = np.take_along_axis(order, np.argpartition(along, order.shape[1] // 2, axis=1), axis=1)
    faces = order.ravel()
    lows, highs = [low[faces]], [high[faces]]
    for parts in [count] + depth * [2]:
        lows.append(lows[-1].reshape(-1, parts, 3).min(axis=1))
        highs.append(highs[-1].reshape(-1, parts, 3).max(axis=1))
    return FaceTree(lows[::-1], highs[::-1], faces)
