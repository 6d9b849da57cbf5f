"""Potential flow past closed bodies by a panel method: constant sources on flat triangles.

Source: Hess and Smith 1967, "Calculation of potential flow about arbitrary bodies".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import gmres
from scipy.spatial import cKDTree

Floats = NDArray[np.floating]

NEAR = 3.0  # within so many of its longest edges, the integral over a panel is exact; beyond, it is a point source


def surface_velocity(verts: Floats, faces: NDArray[np.int64], stream: Floats) -> Floats:
    """The velocity (F, 3) at the centers of the faces of closed bodies, with normals outward, in a uniform stream (3,).

    The sources are such that no fluid crosses the faces at their centers.
    """
    areas = area_vectors(verts, faces)
    normals = (areas / np.linalg.norm(areas, axis=1)[:, None]).astype(np.float32)
    influence = panel_influence(verts[faces], areas)
    across = np.einsum("ic,cij->ij", normals, influence)
    sources, iterations = gmres(across, -normals @ stream.astype(np.float32), rtol=1e-5, restart=60, maxiter=5)
    if iterations:  # 0 after it has converged
        raise RuntimeError(f"the sources of {len(faces)} panels have not converged after {iterations} iterations")
    return stream + np.stack([part @ sources for part in influence], 1)


def area_vectors(verts: Floats, faces: NDArray[np.int64]) -> Floats:
    """The normals of the faces (F, 3), times their areas."""
    a, b, c = verts[faces].swapaxes(0, 1)
    return np.cross(b - a, c - a) / 2


def panel_influence(corners: Floats, areas: Floats) -> Floats:
    """The velocity (3, F, F) float32 at the centers of panels (F, 3, 3) of unit sources on them.

    [c, i, j] is component c at center i of panel j. areas: see `area_vectors`
    """
    centers = corners.mean(1)
    influence = np.stack([np.subtract.outer(x, x) for x in centers.T.astype(np.float32)])
    squares = np.einsum("cij,cij->ij", influence, influence)
    np.fill_diagonal(squares, 1)
    influence *= (np.linalg.norm(areas, axis=1) / (4 * np.pi)).astype(np.float32) / (squares * np.sqrt(squares))
    reach = NEAR * np.linalg.norm(np.roll(corners, -1, 1) - corners, axis=2).max(1)
    near = cKDTree(centers).query_ball_point(centers, reach)
    i, j = np.concatenate(near).astype(np.int64), np.repeat(np.arange(len(near)), [len(each) for each in near])
    influence[:, i, j] = source_velocity(centers[i], corners[j], i == j).T
    return influence


def source_velocity(points: Floats, corners: Floats, on_panel: NDArray[np.bool_]) -> Floats:
    """The velocity (N, 3) at points, each of a unit source on a triangle (N, 3, 3) of its own: ∫ (x − y) / 4π|x − y|³.

    Its part in the plane is an integral over the edges, and its part along the normal is the solid angle.

    on_panel: (N,), which points are on the outer side of their triangle
    """
    edges = np.roll(corners, -1, 1) - corners
    lengths = np.linalg.norm(edges, axis=2)
    normal = np.cross(edges[:, 0], edges[:, 1])
    normal /= np.linalg.norm(normal, axis=1)[:, None]
    outward = np.cross(edges, normal[:, None]) / lengths[:, :, None]
    to = corners - points[:, None]
    r = np.linalg.norm(to, axis=2)
    sums = r + np.roll(r, -1, 1)
    logs = np.log((sums + lengths) / (sums - lengths))
    cosines = np.einsum("nkc,nkc->nk", to, np.roll(to, -1, 1)) * np.roll(r, -2, 1)
    angle = 2 * np.arctan2(-np.linalg.det(to), r.prod(1) + cosines.sum(1))  # Van Oosterom and Strackee 1983
    angle[on_panel] = 2 * np.pi
    return (np.einsum("nkc,nk->nc", outward, logs) + angle[:, None] * normal) / (4 * np.pi)
