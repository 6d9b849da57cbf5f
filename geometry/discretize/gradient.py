"""The tangent-plane gradient by least squares over one-ring edges (Sharp et al. 2022, "Spatial Gradient Features")."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

# The edges of a vertex measure the gradient badly in a direction in which they hardly extend, as at slivers. Their
# spread (sum of squared lengths) in that direction is taken as at least this share of the spread in their main
# direction, so gradients don't blow up. Of the values from 1e-4 to 5e-2, 5e-3 gives the most accurate gradients of
# linear functions on the RNA surfaces.
MIN_SPREAD = 5e-3


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
    """The pattern of all entries of square matrices, and the diagonal.

    It is the gradient's pattern of a point cloud, which has no edges but its local triangulations', those of the
    Laplacian.
    """
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
    rows = np.repeat(np.arange(len(verts)), np.diff(pattern.indptr))
    columns = pattern.indices
    edges = np.einsum("nij,nj->ni", frames[rows, :2], verts[columns] - verts[rows])

    def per_vertex(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(rows, weights, len(verts)).astype(np.float64)
        return sums

    xx, xy, yy = (per_vertex(edges[:, i] * edges[:, j]) for i, j in ((0, 0), (0, 1), (1, 1)))
    normal_matrix = np.stack([np.stack([xx, xy], -1), np.stack([xy, yy], -1)], -2)
    spread, axes = np.linalg.eigh(normal_matrix)
    floor = np.maximum(spread, MIN_SPREAD * spread[:, 1:]) if regularizer is None else spread + regularizer
    inverse = np.where(spread[:, 1:] > 0, 1 / np.where(floor > 0, floor, 1), 0)
    solve = np.einsum("vij,vj,vkj->vik", axes, inverse, axes)

    values: NDArray[np.float64] = np.einsum("nij,nj->in", solve[rows], edges)
    on_diagonal = rows == columns
    for component in values:
        component[on_diagonal] = 0
        component[on_diagonal] = -per_vertex(component)
    return values
