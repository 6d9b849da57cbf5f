"""Normals and tangent frames at the vertices."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.discretize.laplacian import CLOUD_NEIGHBORS
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.objects import real_array, unit_normals
from diffnet.geometry.mesh.polygons import corner_positions, sums_at_vertices

MIN_NORMAL = 1e-3  # length of the sum of face normals, relative to the sum of lengths; shorter sums have cancelled out


def tangent_frames(mesh: Mesh, normals: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Orthonormal right-handed frames (V, 3, 3) at the vertices, float64.

    The rows of a frame are tangent x, tangent y and normal. A vertex normal of a mesh is the area-weighted mean of the
    normals of its faces. Those of `Mesh.turned_faces` are turned first, so normals of closed surfaces point outward. If
    they cancel out (thin sheets, faces of opposite orientation), the largest face's normal is used. A normal of a point
    cloud is the least principal axis of the point's neighborhood. Signs are chosen such that the normals of neighbors
    agree and point outward. A vertex without geometry has normal z. The direction of tangent x is arbitrary, but the
    same at every call.

    normals: (V, 3) of any length, which are used instead, except where they are 0

    Raises ValueError for normals of another shape and for complex ones.

    >>> from diffnet.geometry import load_mesh
    >>> triangle = load_mesh(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]))
    >>> tangent_frames(triangle)[0, 2].tolist()
    [0.0, 0.0, 1.0]
    """
    if normals is not None:
        normals = real_array("normals", normals)
        if normals.shape != mesh.verts.shape:
            raise ValueError(f"normals should have shape {mesh.verts.shape}, shape is {normals.shape}")
    normals = unit_normals(normals)
    if normals is None:
        normals = _normals(mesh)
    missing = ~normals.any(axis=1, keepdims=True)
    if missing.any():
        normals = np.where(missing, _normals(mesh), normals)
    # The coordinate axis farthest from the normal gives the best conditioned cross product.
    normal = np.ascontiguousarray(normals.T)  # one row for each coordinate
    axis = np.argmin(np.abs(normal), axis=0), np.arange(len(normals))
    tangent = -normal[axis] * normal
    tangent[axis] += 1
    tangent /= np.linalg.norm(tangent, axis=0)
    frames = np.stack([tangent, np.cross(normal, tangent, axis=0), normal])
    return np.ascontiguousarray(np.moveaxis(frames, -1, 0))


def _normals(mesh: Mesh) -> NDArray[np.float64]:
    return _cloud_normals(mesh.verts) if mesh.is_point_cloud else _mesh_normals(mesh)


def _mesh_normals(mesh: Mesh) -> NDArray[np.float64]:
    # Areas of very small or very large meshes underflow or overflow. Normals don't depend on the scale.
    corners = corner_positions(mesh.verts, mesh.faces)
    edges = corners[1:] - corners[0]
    edges /= np.abs(edges).max() or 1.0
    cross = np.cross(edges[0], edges[1], axis=0)
    cross[:, mesh.turned_faces] *= -1
    area = np.linalg.norm(cross, axis=0)
    total = np.stack([sums_at_vertices(values, mesh.faces, len(mesh.verts)) for values in cross], axis=1)
    size = np.linalg.norm(total, axis=1)
    cancelled = size < MIN_NORMAL * sums_at_vertices(area, mesh.faces, len(mesh.verts))
    if not cancelled.any():
        return _unit(total)

    largest = np.zeros_like(total)
    order = np.argsort(area, kind="stable")  # the last write to a vertex wins, which is the largest face's
    largest[mesh.faces[order].reshape(-1)] = np.repeat(cross.T[order], 3, axis=0)
    return _unit(np.where(cancelled[:, None], largest, total))


def _cloud_normals(points: NDArray[np.float64]) -> NDArray[np.float64]:
    # Imported here: it takes a fifth of the time in which a process starts, and meshes don't need it.
    from scipy.spatial import cKDTree

    neighbors = cKDTree(points).query(points, k=range(1, min(CLOUD_NEIGHBORS, len(points)) + 1))[1]
    offsets = points[neighbors] - points[neighbors].mean(axis=1, keepdims=True)
    normals = np.linalg.eigh(np.einsum("vni,vnj->vij", offsets, offsets))[1][:, :, 0]
    return _agreeing(points, _unit(normals), neighbors)


def _agreeing(
    points: NDArray[np.float64], normals: NDArray[np.float64], neighbors: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Flip normals so that they agree along a minimum spanning tree of the neighborhoods (Hoppe et al. 1992)."""
    count, k = neighbors.shape
    rows, columns = np.repeat(np.arange(count), k), neighbors.reshape(-1)
    # The weight of an edge is the turn of the normal along it. SciPy drops weights of 0, hence the shift.
    turn = 1.001 - np.abs((normals[rows] * normals[columns]).sum(1))
    graph = scipy.sparse.csr_matrix((turn, (rows, columns)), shape=(count, count))
    tree = scipy.sparse.csgraph.minimum_spanning_tree(graph)
    _, component = scipy.sparse.csgraph.connected_components(tree, directed=False)
    parent = np.arange(count)
    for root in np.unique(component, return_index=True)[1]:
        order, before = scipy.sparse.csgraph.breadth_first_order(tree, root, directed=False)
        parent[order[1:]] = before[order[1:]]

    # The sign of a vertex is the product of the signs along its path to the root. Pointer jumping finds it in log₂ V
    # passes.
    sign = np.where((normals * normals[parent]).sum(1) < 0, -1.0, 1.0)
    while not np.array_equal(parent, parent[parent]):
        sign, parent = sign * sign[parent], parent[parent]
    normals = normals * (sign * sign[parent])[:, None]

    size = np.bincount(component)[:, None]
    center = np.stack([np.bincount(component, points[:, i]) for i in range(3)], axis=1) / size
    outward = np.bincount(component, ((points - center[component]) * normals).sum(1))
    return normals * np.where(outward < 0, -1.0, 1.0)[component, None]


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    size = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.where(size > 0, vectors / np.where(size > 0, size, 1.0), (0.0, 0.0, 1.0))
