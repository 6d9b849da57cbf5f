"""Neighborhoods for attention: the vertices within some number of edges, or the nearest vertices in space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse import csr_array, eye_array
from torch import Tensor

from diffnet.geometry.discretize.gradient import order_along_surface
from diffnet.geometry.operators import Operators
from diffnet.ops import BlockPattern, Pattern, block_diagonal_pattern
from diffnet.ops.common.checks import check_count, check_is_tensor
from diffnet.ops.sparse.pattern import rows_of


def with_k_ring(operators: Operators, k: int) -> Operators:
    """These operators with a `neighborhood`: for each vertex, the vertices at most k edges away, and the vertex itself.

    The edges are those of the gradient's pattern: of the faces, or of a point cloud's local triangulations. Rows hold
    the first copies of joined vertices, and each copy has the row of its joined vertex, see docs/joined_vertices.md.
    Raises ValueError for k < 0.

    >>> from diffnet.geometry import precompute
    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    >>> operators = precompute((square, [[0, 1, 2], [0, 2, 3]]), k=2)
    >>> with_k_ring(operators, 1).neighborhood.row_lengths.tolist()
    [4, 3, 4, 3]
    """
    check_count("k", k, 0)
    one_ring = _graph(operators.gradient.pattern)
    reached = eye_array(one_ring.shape[0], dtype=bool, format="csr")[_first_copies(operators).numpy()]
    for _ in range(k):
        reached = reached @ one_ring  # with bool entries: whether a path exists
    return _with(operators, _pattern(reached))


def with_nearest(operators: Operators, positions: Tensor, k: int) -> Operators:
    """These operators with a `neighborhood`: for each vertex, the k nearest vertices of the same mesh in space.

    positions: (V, 3), packed like the operators

    A vertex counts as its own neighbor. If a mesh has fewer than k vertices, all of them are neighbors. Joined vertices
    count as one, at the position of the first copy: rows hold first copies, as those of `with_k_ring`. Raises
    ValueError for k < 1 and for positions of another shape.

    >>> from diffnet.geometry import precompute
    >>> square = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    >>> operators = precompute((square, [[0, 1, 2], [0, 2, 3]]), k=2)
    >>> with_nearest(operators, torch.tensor(square), 3).neighborhood.row_lengths.tolist()
    [3, 3, 3, 3]
    """
    check_count("k", k, 1)
    check_is_tensor("positions", positions)
    if positions.shape != (operators.num_vertices, 3):
        raise ValueError(
            f"positions should have shape {(operators.num_vertices, 3)}, shape is {tuple(positions.shape)}"
        )
    firsts, place = torch.unique(_first_copies(operators), return_inverse=True)
    counts = torch.searchsorted(firsts, operators.ptr.cpu()).diff().tolist()
    each = torch.split(positions.cpu()[firsts], counts)
    rows, _ = rows_of(block_diagonal_pattern([nearest_pattern(points, k) for points in each]), place)
    return _with(operators, Pattern(rows.indptr, firsts[rows.indices], len(place)))


def nearest_pattern(points: Tensor, k: int) -> Pattern:
    """The k nearest points of each point, itself among them, as a pattern (N, N) on the CPU.

    points: (N, D). If there are fewer than k, all of them are neighbors.

    Raises ValueError for k < 1 and for points of another shape.

    >>> nearest_pattern(torch.tensor([[0.0], [1.0], [3.0]]), 2).indices
    tensor([0, 1, 0, 1, 1, 2], dtype=torch.int32)
    """
    from scipy.spatial import cKDTree  # slow to import, and most commands don't need it

    check_count("k", k, 1)
    check_is_tensor("points", points)
    if points.ndim != 2:
        raise ValueError(f"points should have shape (N, D), shape is {tuple(points.shape)}")
    places = points.detach().cpu().double().numpy()
    itself = np.arange(len(places))[:, None]
    count = min(k, len(places))
    nearest = cKDTree(places).query(places, np.arange(1, count + 1))[1] if count else itself
    # If more than k points coincide, the query may leave the point itself out.
    nearest[:, -1:] = np.where((nearest == itself).any(1, keepdims=True), nearest[:, -1:], itself)
    indices = torch.from_numpy(np.sort(nearest, axis=1).astype(np.int32).reshape(-1))
    return Pattern.from_row_lengths(torch.full((len(places),), count), indices, len(places))


def _first_copies(operators: Operators) -> Tensor:
    """The first of the vertices that each vertex is joined with, (V,) int32 on the CPU, see `Operators.joined`."""
    joined = operators.joined
    return (torch.arange(operators.num_vertices) if joined is None else joined.cpu()).int()


def _graph(pattern: Pattern) -> csr_array:
    """The entries of a pattern, each True, with the rows in order."""
    plain, _ = pattern.to("cpu").with_row_order(None)
    entries = np.ones(plain.nnz, dtype=bool), plain.indices.numpy(), plain.indptr.numpy()
    return csr_array(entries, shape=plain.shape)


def _pattern(graph: csr_array) -> Pattern:
    graph.sort_indices()
    return Pattern(torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), graph.shape[0])


def _with(operators: Operators, pattern: Pattern) -> Operators:
    stored, _ = pattern.with_row_order(operators.gradient.pattern.row_order, check=False)
    return replace(operators, neighborhood=stored.prepare().to(operators.device))


@dataclass(frozen=True, eq=False)
class Patches:
    """An order of the vertices of a packed batch, and the pairs of blocks in that order that attend to each other.

    order: (V,) int64, the vertex at each place; x[order] is ordered along the surface
    places: (V,) int64, the place of each vertex; y[places] is in the order of the meshes again
    pattern: (1, V, V) over places, with all blocks that hold neighbors
    mask: (number of blocks, block, block) bool, False between vertices of different meshes
    """

    order: Tensor
    places: Tensor
    pattern: BlockPattern
    mask: Tensor

    def to(self, device: torch.device | str | None) -> Patches:
        """Move to a device."""
        return Patches(self.order.to(device), self.places.to(device), self.pattern.to(device), self.mask.to(device))


def patches(operators: Operators, block: int = 32) -> Patches:
    """Patches of `block` successive vertices along the surface. Each patch attends to the adjacent patches.

    Two patches are adjacent if a vertex of one is in the neighborhood of a vertex of the other. Each mesh is ordered by
    reverse Cuthill-McKee, which keeps neighbors close to each other.
    """
    graph = _graph(operators.neighborhood or operators.gradient.pattern)
    bounds = operators.ptr.tolist()
    parts = [lo + order_along_surface(graph[lo:hi, lo:hi]) for lo, hi in pairwise(bounds)]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    blocks = BlockPattern.covering(_pattern(graph[order][:, order]), block)
    blocks.blocks.prepare()
    place = torch.arange(block)
    mesh = torch.repeat_interleave(torch.arange(len(operators)), torch.tensor(operators.lengths))
    mesh = torch.cat([mesh, mesh.new_full((-len(mesh) % block,), -1)])
    rows, columns = (mesh[i[:, None] * block + place] for i in (blocks.row_indices, blocks.column_indices))
    at = torch.from_numpy(order)
    return Patches(at, torch.argsort(at), blocks, rows[:, :, None] == columns[:, None, :]).to(operators.device)
