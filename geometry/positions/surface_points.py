"""Points on a surface, each given by a face and barycentric coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.mesh import Mesh


@dataclass(frozen=True)
class SurfacePoints:
    """Points on a triangle mesh.

    faces: (N,) int64, the face of each point, or -1 where the point is unknown
    weights: (N, 3) float64, barycentric coordinates: the weights of the corners of the face, ≥ 0 with sum 1

    >>> from diffnet.geometry import make_mesh
    >>> square = make_mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]])
    >>> SurfacePoints(np.array([0]), np.array([[0.5, 0.25, 0.25]])).interpolate(square.faces, square.verts)
    array([[0.5 , 0.25, 0.  ]])
    """

    faces: NDArray[np.int64]
    weights: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, selection: NDArray[np.int64]) -> SurfacePoints:
        """The selected points. The selection holds their numbers, or is a mask."""
        return SurfacePoints(self.faces[selection], self.weights[selection])

    def check(self, mesh: Mesh, name: str = "points") -> SurfacePoints:
        """The points themselves. Raises ValueError if they can't be points of this mesh. The message begins with name.

        TypeError for faces that are not integers.
        """
        faces, weights = np.asarray(self.faces), np.asarray(self.weights)
        if faces.dtype.kind not in "iu":
            raise TypeError(f"{name}: faces should be integers, got {faces.dtype}")
        if faces.ndim != 1 or weights.shape != (len(faces), 3):
            raise ValueError(
                f"{name}: faces should have shape (N,) and weights (N, 3), shapes are {faces.shape} and {weights.shape}"
            )
        bad = np.flatnonzero((faces < -1) | (faces >= len(mesh.faces)))
        if len(bad):
            raise ValueError(
                f"{name}: faces should be from 0 to {len(mesh.faces) - 1}, or -1 for unknown points, got "
                f"{faces[bad[0]]} for point {bad[0]}"
            )
        off = ~((weights >= -1e-6).all(1) & (np.abs(weights.sum(1) - 1) <= 1e-4))
        bad = np.flatnonzero(off & (faces >= 0))
        if len(bad):
            raise ValueError(
                f"{name}: weights should be at least 0 with sum 1, got {weights[bad[0]].tolist()} for point {bad[0]}"
            )
        return self

    def interpolate(self, faces: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values (V, C) at the vertices, interpolated at the points: (N, C). NaN at unknown points.

        faces: (F, 3), those of the mesh
        """
        result = np.einsum("nk,nkc->nc", self.weights, values[faces[self.faces]])
        return np.where((self.faces >= 0)[:, None], result, np.nan)
