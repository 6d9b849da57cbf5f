"""The tangent-plane gradient by least squares over one-ring edges (Sharp et al. 2022, "Spatial Gradient Features")."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

# The edges of a vertex measure the gradient badly in a direction in which they hardly extend, as at slivers. Their
# spread (sum of squared lengths) in that direction is taken as at least this share of the spread in their main
# direction, so gradients don't blow up. Of the values from 1e-4 to 5e-2, 5e-3 gives the most accurate gradients of
# linear functions on the RNA surfaces.
MIN_SPREAD = 5e-3
# Rows keep their order if the numbers of neighbors differ by less than this on average. 8192 rows of 128 float32 are
# 4 MiB, a tenth of the cache of a large GPU.
MAX_GAP = 8192


def one_ring(faces: NDArray[np.int64], vertices: int) -> scipy.sparse.csr_matrix:
    """A matrix (V, V) with ones for each vertex itself and for the vertices joined to it by an edge of a face.

    >>> one_ring(np.array([[0, 1, 2]]), vertices=4).toarray().tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    a, b, c = faces.T
    rows = np.concatenate([a, b, c, b, c, a, np.arange(vertices)])
    columns = np.concatenate([b, c, a, a, b, c, np.arange(vertices)])
    pattern = scipy.sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(vertices, vertices))
    pattern.sum_duplicates()
    pattern.data[:] = 1
    return pattern


def pattern_with_diagonal(*matrices: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The pattern of all entries of square matrices, and the diagonal. A point cloud's edges are its Laplacian's."""
    pattern = scipy.sparse.eye(matrices[0].shape[0], format="csr")
    for matrix in matrices:
        ones = scipy.sparse.csr_matrix((np.ones(matrix.nnz), matrix.indices, matrix.indptr), matrix.shape)
        pattern = pattern + ones
    pattern.sort_indices()
    return scipy.sparse.csr_matrix(pattern)


def gradient_values(
    verts: NDArray[np.float64],
    frames: NDArray[np.float64],
    pattern: scipy.sparse.csr_matrix,
    regularizer: float | None = None,
) -> NDArray[np.float64]:
    """Values (2, nnz) of the gradient operators G_X and G_Y on a given pattern.

    verts: (V, 3)
    frames: (V, 3, 3), see `tangent_frames`
    pattern: (V, V) with a full diagonal, see `one_ring`
    regularizer: in length², added to the diagonal of the normal equations in place of MIN_SPREAD

    At vertex i, the gradient g minimizes Σ (e_ij · g − (f_j − f_i))² over the neighbors j, where e_ij are the
    tangential components of x_j − x_i in the frame of i. It is exact for linear functions on a plane, unless edges
    hardly extend in some direction (see MIN_SPREAD). Rows sum to 0. Scaling the mesh by s scales the gradient by 1/s. A
    vertex without edges has gradient 0.
    """
    degree = np.diff(pattern.indptr)
    rows = np.repeat(np.arange(len(verts)), degree)

    def at_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.repeat(values, degree, axis=-1)

    def per_vertex(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(rows, weights, len(verts)).astype(np.float64)

    # One contiguous row for each coordinate, which is several times faster.
    positions, axes = (np.ascontiguousarray(np.moveaxis(array, 0, -1)) for array in (verts, frames[:, :2]))
    x, y = np.einsum("icn,cn->in", at_rows(axes), positions.take(pattern.indices, axis=1) - at_rows(positions))
    inverse = _inverse(per_vertex(x * x), per_vertex(x * y), per_vertex(y * y), regularizer)
    to_x, both, to_y = (at_rows(entry) for entry in inverse)
    values = np.stack([to_x * x + both * y, both * x + to_y * y])
    on_diagonal = np.flatnonzero(rows == pattern.indices)
    for component in values:
        component[on_diagonal] = 0
        component[on_diagonal] = -per_vertex(component)
    return values


def _inverse(
    xx: NDArray[np.float64], xy: NDArray[np.float64], yy: NDArray[np.float64], regularizer: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Entries of the inverses of symmetric matrices [[xx, xy], [xy, yy]], whose eigenvalues are raised first.

    A matrix is m I + h [[c, s], [s, −c]] with c² + s² = 1. Its eigenvalues are m ± h, and its inverse is of the same
    form.
    """
    mean, half = (xx + yy) / 2, np.hypot((xx - yy) / 2, xy)
    large, small = mean + half, mean - half
    lowest, highest = (
        (np.maximum(small, MIN_SPREAD * large), large)
        if regularizer is None
        else (small + regularizer, large + regularizer)
    )
    has_edges = large > 0
    slow, fast = (
        np.where(has_edges, 1 / np.where(has_edges & (value > 0), value, 1), 0) for value in (highest, lowest)
    )
    mean, half = (slow + fast) / 2, np.divide((slow - fast) / 2, half, out=np.zeros_like(half), where=half > 0)
    cosine, sine = half * (xx - yy) / 2, half * xy
    return mean + cosine, sine, mean - cosine


def order_along_surface(graph: Any) -> NDArray[np.int64]:
    """The vertices (V,) of a sparse graph (V, V) in reverse Cuthill-McKee order, which is breadth-first."""
    return reverse_cuthill_mckee(graph).astype(np.int64)


def order_unless_near(graph: Any) -> NDArray[np.int64] | None:
    """`order_along_surface`, or None if the numbers of neighbors already differ by less than MAX_GAP on average."""
    rows = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    if graph.nnz == 0 or np.abs(rows - graph.indices).mean() < MAX_GAP:
        return None
    return order_along_surface(graph)
