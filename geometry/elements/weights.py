"""The elements of a mesh that points of its surface lie on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import ElementsAt, edges_of_faces
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.positions.surface_points import SurfacePoints


def element_weights(
    mesh: Mesh, on_surface: SurfacePoints, at: ElementsAt
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Three elements (N, 3) of a mesh for each point on its surface, and their weights (N, 3), whose sum is 1.

    at: "vertices": the corners of the face, with the barycentric coordinates; "faces": the face alone; "edges": the
        nearest side of the face alone. Elements that have weight 0 repeat the first one.

    Raises ValueError for unknown points.
    """
    faces, weights = on_surface.faces, on_surface.weights
    if (faces < 0).any():
        raise ValueError(f"{mesh.name}: {int((faces < 0).sum())} of the {len(faces)} points are unknown (face -1)")
    if at == "vertices":
        return mesh.faces[faces], weights
    alone = np.broadcast_to([1.0, 0.0, 0.0], weights.shape).copy()
    if at == "faces":
        return np.repeat(faces[:, None], 3, axis=1), alone
    corners = mesh.verts[mesh.faces[faces]]
    lengths = np.linalg.norm(corners - np.roll(corners, -1, axis=1), axis=2)  # of the sides 0-1, 1-2 and 2-0
    # Twice the area is a side's length times the height of the opposite corner, so weight / length orders distances.
    side = (weights[:, [2, 0, 1]] / np.maximum(lengths, 1e-300)).argmin(axis=1)
    edges = edges_of_faces(mesh.faces)[faces, side]
    return np.repeat(edges[:, None], 3, axis=1), alone
