"""Laplacian and lumped mass of meshes and point clouds."""

from __future__ import annotations

import numpy as np
import potpourri3d
import robust_laplacian
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.discretize.intrinsic_delaunay import delaunay_laplacian
from diffnet.geometry.errors import IN_BRACKETS, MeshError, raised_as
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.polygons import corner_positions
from diffnet.geometry.options import LaplacianKind

LIBRARY_ERRORS = RuntimeError, ValueError, IndexError  # for points that no local triangulation joins, for example
CLOUD_NEIGHBORS = 30  # of each point in the local triangulations of a point cloud (Sharp & Crane 2020)
ADDED_CROSS = 1e-10  # to the lengths of cross products of edges, for a mesh of radius 1, so that none is 0
MIN_MASS = 1e-8  # of a vertex with faces, relative to the mean
POINTS_AT_ONCE = 4096  # arrays of a batch of points take up to 60 MB


def laplacian_and_mass(
    mesh: Mesh, kind: LaplacianKind = "robust", frames: NDArray[np.float64] | None = None
) -> tuple[scipy.sparse.csr_matrix, NDArray[np.float64]]:
    """The positive semi-definite Laplacian L (V, V) and the lumped vertex areas (V,), both float64.

    kind: "robust", the tufted intrinsic Delaunay Laplacian (Sharp & Crane 2020), which accepts any triangle soup; or
        "cotan", the cotangent Laplacian of the faces as they are. Point clouds always get the robust Laplacian.
    frames: (V, 3, 3), in whose tangent planes a point cloud is triangulated; by default in estimated planes. The
        Laplacian of a mesh doesn't depend on them.

    The rows of L sum to 0. L doesn't change when the mesh is scaled; areas grow with the square of the scale. Vertices
    that no face uses have zero rows and zero mass.

    Raises MeshError if there is no surface: all faces are degenerate, all vertices lie in one point or on one line, or
    a point cloud has fewer than 4 points.

    >>> from diffnet.geometry import load_mesh
    >>> triangle = load_mesh(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]))
    >>> laplacian, mass = laplacian_and_mass(triangle, "cotan")
    >>> bool(np.isclose(mass.sum(), 0.5)), bool(np.allclose(laplacian.sum(1), 0))
    (True, True)
    """
    faces, used = mesh.usable_faces, mesh.on_surface
    if mesh.is_point_cloud and len(mesh.verts) < 4:
        raise MeshError(f"{mesh.name}: a point cloud needs at least 4 different points, this has {len(mesh.verts)}")
    if not mesh.is_point_cloud and len(faces) == 0:
        raise MeshError(f"{mesh.name}: none of the {len(mesh.faces)} faces has three distinct corners")
    if not used.all():
        faces = (np.cumsum(used) - 1)[faces]
    # The libraries below regularize by absolute amounts, so they get the mesh at unit size.
    verts = mesh.verts[used] - mesh.verts[used].mean(axis=0)
    scale = np.linalg.norm(verts, axis=1).max()
    if scale == 0:
        raise MeshError(f"{mesh.name}: all {len(verts)} vertices lie in one point")
    verts /= scale
    if not _has_area(verts, faces):
        far = np.linalg.norm(verts - np.median(verts, axis=0), axis=1).argmax()
        raise MeshError(
            f"{mesh.name}: the surface has no area, its vertices lie on a line or all its faces do. Or a vertex is too "
            f"far from the others; the farthest is vertex {np.flatnonzero(used)[far]}"
        )

    place = f"{mesh.name}: the {kind} Laplacian can't be computed"
    with raised_as(MeshError, place, *LIBRARY_ERRORS, form=IN_BRACKETS):
        if mesh.is_point_cloud:
            laplacian, mass = _cloud_laplacian(verts, frames)
            laplacian = _with_zero_sums(laplacian)
        elif kind == "robust":
            robust = delaunay_laplacian(verts, faces)
            if robust is None:
                laplacian, mass = robust_laplacian.mesh_laplacian(verts, faces)
                robust = _with_zero_sums(laplacian), mass.diagonal()
            laplacian, mass = robust
        else:
            laplacian = _with_zero_sums(potpourri3d.cotan_laplacian(verts, faces, denom_eps=ADDED_CROSS))
            mass = potpourri3d.vertex_areas(verts, faces)
    if not (np.isfinite(laplacian.data).all() and np.isfinite(mass).all()):
        raise MeshError(f"{mesh.name}: the {kind} Laplacian has entries that are not finite")
    if not mass.sum() > 0:
        raise MeshError(f"{mesh.name}: the surface has no area")
    # A vertex whose faces all have zero area would have no mass, and M would have no inverse.
    mass = np.maximum(mass, MIN_MASS * mass.mean())

    if not used.all():
        entries, places = laplacian.tocoo(), np.flatnonzero(used)
        ends = places[entries.row], places[entries.col]
        laplacian = scipy.sparse.csr_matrix((entries.data, ends), (len(used), len(used)))
    areas = np.zeros(len(used))
    areas[used] = mass * scale**2
    return laplacian, areas


def _with_zero_sums(laplacian: scipy.sparse.csc_matrix) -> scipy.sparse.csr_matrix:
    """The symmetric part, less the sums of its rows, which are 0 up to rounding.

    Rows of points that a local triangulation left out hold a 1, which is removed, too.
    """
    laplacian = (laplacian + laplacian.T) / 2
    laplacian = scipy.sparse.csr_matrix(laplacian - scipy.sparse.diags(np.asarray(laplacian.sum(axis=1)).reshape(-1)))
    laplacian.sort_indices()
    return laplacian


def _cloud_laplacian(
    verts: NDArray[np.float64], frames: NDArray[np.float64] | None
) -> tuple[scipy.sparse.csc_matrix, NDArray[np.float64]]:
    """The robust Laplacian of all triangles that the points (V, 3) have in their local triangulations, and the areas.

    robust_laplacian (1.1.0) has local triangulations of its own, but it divides the sum of k neighbors by k + 1 to find
    their center. Its normals are therefore wrong where points are much closer to their neighbors than to the origin. On
    the unit sphere with 60,000 points, half of the area was missing. Only clouds that are too small for potpourri3d are
    left to it: the neighbors of a point are then all other points, and their center is near the origin.
    """
    if frames is not None:
        triangles = local_triangles(verts, frames, CLOUD_NEIGHBORS)
    elif len(verts) <= CLOUD_NEIGHBORS:
        laplacian, mass = robust_laplacian.point_cloud_laplacian(verts, n_neighbors=len(verts) - 1)
        return laplacian, mass.diagonal()
    else:
        triangles = potpourri3d.PointCloudLocalTriangulation(verts).get_local_triangulation()
        triangles = triangles[(triangles >= 0).all(axis=-1)]  # -1 fills the rows of points with few triangles
    if len(triangles) == 0:
        raise ValueError("no point has a triangle with its neighbors")
    laplacian, mass = robust_laplacian.mesh_laplacian(verts, triangles)
    return laplacian / 3, mass.diagonal() / 3  # each triangle is in the triangulations of its three corners


def _has_area(verts: NDArray[np.float64], faces: NDArray[np.int64]) -> bool:
    """Whether the triangles, or the points of a cloud, extend from a line by more than rounding to single precision."""
    if len(faces) == 0:
        spread = np.linalg.svd(verts - verts.mean(axis=0), compute_uv=False)
        return bool(spread[1] > 1e-6 * spread[0])
    first, second, third = corner_positions(verts, faces)
    u, v = second - first, third - first
    doubled, squares = np.linalg.norm(np.cross(u, v, axis=0), axis=0), np.maximum((u * u).sum(0), (v * v).sum(0))
    return bool(doubled.sum() > 1e-6 * squares.sum())


def local_triangles(points: NDArray[np.float64], frames: NDArray[np.float64], neighbors: int) -> NDArray[np.int64]:
    """The triangles (T, 3) around each point in the Delaunay triangulation of its neighbors in its tangent plane.

    potpourri3d has local triangulations, too, but only in tangent planes that it estimates itself.

    points: (V, 3)
    frames: (V, 3, 3), see `tangent_frames`
    neighbors: the number of nearest neighbors of a point

    Neighbors keep their distance to the point in its plane. So where the surface bends, or another sheet is near,
    points of the other side don't come between the point and its own neighbors.

    A triangle is listed for each of its corners in whose plane it is a Delaunay triangle, so three times at most.
    """
    # Imported here: it takes a fifth of the time in which a process starts, and meshes don't need it.
    from scipy.spatial import cKDTree

    count = len(points)
    near = cKDTree(points).query(points, k=range(2, min(neighbors + 1, count) + 1))[1]
    # Four points on a circle, as in a grid, have two Delaunay triangulations. All corners should see the same one.
    spacing = np.ptp(points, axis=0).max() / np.sqrt(count)
    points = points + 1e-7 * spacing * np.random.default_rng(0).uniform(-1, 1, points.shape)
    parts = []
    for first in range(0, count, POINTS_AT_ONCE):
        rows = slice(first, first + POINTS_AT_ONCE)
        plane = _in_plane(points[near[rows]] - points[rows, None], frames[rows, :2])
        point, corner, following = _stars(plane)
        parts.append(np.stack([point + first, near[point + first, corner], near[point + first, following]], axis=1))
    return np.concatenate(parts)


def _in_plane(offsets: NDArray[np.float64], axes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The offsets (N, n, 3), turned into the planes with these axes (N, 2, 3) without a change of length, (N, n, 2)."""
    plane = np.einsum("vni,vai->vna", offsets, axes)
    length, size = np.linalg.norm(offsets, axis=-1), np.linalg.norm(plane, axis=-1)
    has_direction = size > 1e-6 * length
    factor = np.where(has_direction, length / np.where(has_direction, size, 1.0), 0.0)
    return plane * factor[..., None]


def _stars(plane: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The Delaunay triangles with a corner at the origin, for many sets of points (N, n, 2) in the plane.

    Returns the set, and the two other corners of each triangle.

    The inversion x ↦ x/|x|² maps circles through the origin to lines. A circle without points inside becomes a line
    with all points on one side. So the triangles are the edges of the convex hull of the origin and the inverted
    points, without the edges at the origin.
    """
    squares = (plane**2).sum(-1, keepdims=True)
    largest = squares.max(axis=1, keepdims=True)
    # Points at the origin stay there.
    inverted = np.where(squares > 1e-12 * largest, plane * largest / np.where(squares > 0, squares, 1.0), 0.0)

    # From a corner of the hull, all points lie to the left of the edge to the next corner.
    following = np.full(inverted.shape[:2], -1)
    edge = -inverted  # to the origin
    for j in range(inverted.shape[1]):
        candidate = inverted[:, j : j + 1] - inverted
        right = _cross(edge, candidate) < 0
        following = np.where(right, j, following)
        edge = np.where(right[..., None], candidate, edge)

    swapped = np.stack([-edge[..., 1], edge[..., 0]], axis=-1)
    left = swapped @ inverted.transpose(0, 2, 1) - _cross(edge, inverted)[..., None]
    size = np.linalg.norm(edge, axis=-1) * np.linalg.norm(inverted, axis=-1).max(axis=1, keepdims=True)
    is_edge = (following >= 0) & (left.min(axis=2) >= -1e-12 * size) & (_cross(edge, -inverted) > 1e-12 * size)
    sets, corner = np.nonzero(is_edge)
    return sets, corner, following[sets, corner]


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
