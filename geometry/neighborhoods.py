"""Neighborhoods for attention: the vertices within some number of edges, or the nearest vertices in space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from diffnet.geometry.operators import Operators
from diffnet.ops import Pattern, block_diagonal_pattern
from diffnet.ops.common.checks import check_count, not_a_tensor


def with_k_ring(operators: Operators, k: int) -> Operators:
    """These operators with a `neighborhood`: for each vertex, the vertices at most k edges away, and the vertex itself.

    The edges are those of the gradient's pattern: of the faces, or of a point cloud's local triangulations. Raises
    ValueError for k < 0.

    >>> from diffnet.geometry import precompute
    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    >>> operators = precompute((square, [[0, 1, 2], [0, 2, 3]]), k=2)
    >>> with_k_ring(operators, 1).neighborhood.row_lengths.tolist()
    [4, 3, 4, 3]
    """
    check_count("k", k, 0)
    ring, _ = operators.gradient.pattern.to("cpu").with_row_order(None)
    entries = np.ones(ring.nnz, dtype=bool), ring.indices.numpy(), ring.indptr.numpy()
    one_ring = scipy.sparse.csr_array(entries, shape=ring.shape)
    reached = scipy.sparse.eye_array(ring.columns, dtype=bool, format="csr")
    for _ in range(k):
        reached = reached @ one_ring  # with bool entries: whether a path exists
    reached.sort_indices()
    return _with(operators, Pattern(torch.from_numpy(reached.indptr), torch.from_numpy(reached.indices), ring.columns))


def with_nearest(operators: Operators, positions: Tensor, k: int) -> Operators:
    """These operators with a `neighborhood`: for each vertex, the k nearest vertices of the same mesh in space.

    positions: (V, 3), packed like the operators

    A vertex counts as its own neighbor. If a mesh has fewer than k vertices, all of them are neighbors. Raises
    ValueError for k < 1 and for positions of another shape.

    >>> from diffnet.geometry import precompute
    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    >>> operators = precompute((square, [[0, 1, 2], [0, 2, 3]]), k=2)
    >>> with_nearest(operators, torch.tensor(square), 3).neighborhood.row_lengths.tolist()
    [3, 3, 3, 3]
    """
    check_count("k", k, 1)
    if not isinstance(positions, Tensor):
        raise not_a_tensor("positions", positions)
    if positions.shape != (operators.num_vertices, 3):
        raise ValueError(
            f"positions should have shape {(operators.num_vertices, 3)}, shape is {tuple(positions.shape)}"
        )
    each = torch.split(positions, list(operators.lengths))
    return _with(operators, block_diagonal_pattern([nearest_pattern(points, k) for points in each]))


def nearest_pattern(points: Tensor, k: int) -> Pattern:
    """The k nearest points of each point, itself among them, as a pattern (N, N) on the CPU.

    points: (N, D). If there are fewer than k, all of them are neighbors.

    Raises ValueError for k < 1 and for points of another shape.

    >>> nearest_pattern(torch.tensor([[0.0], [1.0], [3.0]]), 2).indices
    tensor([0, 1, 0, 1, 1, 2], dtype=torch.int32)
    """
    check_count("k", k, 1)
    if not isinstance(points, Tensor):
        raise not_a_tensor("points", points)
    if points.ndim != 2:
        raise ValueError(f"points should have shape (N, D), shape is {tuple(points.shape)}")
    places = points.detach().cpu().double().numpy()
    own = np.arange(len(places))[:, None]
    count = min(k, len(places))
    nearest = cKDTree(places).query(places, np.arange(1, count + 1))[1] if count else own
    # If more than k points coincide, the query may leave the point itself out.
    nearest[:, -1:] = np.where((nearest == own).any(1, keepdims=True), nearest[:, -1:], own)
    indices = torch.from_numpy(np.sort(nearest, axis=1).astype(np.int32).reshape(-1))
    return Pattern.from_row_lengths(torch.full((len(places),), count), indices, len(places))


def _with(operators: Operators, pattern: Pattern) -> Operators:
    stored, _ = pattern.with_row_order(operators.gradient.pattern.row_order, check=False)
    return replace(operators, neighborhood=stored.prepare().to(operators.device))
