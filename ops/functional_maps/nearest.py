"""Nearest neighbors in many dimensions, without a table of all distances."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_finite, check_tensor
from diffnet.ops.common.compiler import not_compiled
from diffnet.ops.common.precision import ieee_products, sum_dtype, without_autocast

# On the CPU, a k-d tree is faster than matrix products up to this many dimensions.
MAX_TREE_DIMENSIONS = 30
# Numbers of a table that are held at once: 64 MB in float32 on a GPU, and what stays in a cache on the CPU. Matrix
# products need enough rows to be fast.
MAX_ENTRIES = {"cuda": 2**24, "cpu": 2**21}
MIN_ROWS = {"cuda": 512, "cpu": 64}


def nearest_neighbors(queries: Tensor, points: Tensor) -> Tensor:
    """Find the nearest point of each query, in Euclidean distance.

    Matrix products compute distances from inner products, in float32 or float64. In float32, points whose squared
    distances differ by less than about 1e-6 of the squared extent of the points may be taken for each other. tf32 is
    never used. On the CPU, a k-d tree is used up to 30 dimensions.

    Args:
        queries: (N, K) floating point
        points: (M, K) floating point; M is at least 1

    Returns:
        (N,) int64, row numbers of `points`. It has no gradient.

    Raises:
        TypeError: for arguments that are not tensors or not floating point.
        ValueError: for other shapes or devices, and on the CPU and in debug mode for values that are not finite or
            whose squares overflow in more than 30 dimensions.

    >>> nearest_neighbors(torch.tensor([[0.9], [0.2]]), torch.tensor([[0.0], [1.0], [2.0]]))
    tensor([1, 0])
    """
    check_tensor("queries", queries, ("N", "K"))
    check_tensor("points", points, ("M", queries.shape[1]), queries.device)
    if len(points) == 0:
        raise ValueError(f"points should have at least one row, shape is {tuple(points.shape)}")
    check_finite("queries", queries)
    check_finite("points", points)
    dtype = sum_dtype(queries, points)
    queries, points = queries.detach().to(dtype), points.detach().to(dtype)
    if queries.is_meta:
        return queries.new_empty(len(queries), dtype=torch.int64)
    return _search(queries, points)


@not_compiled
def _search(queries: Tensor, points: Tensor) -> Tensor:
    if queries.device.type == "cpu" and 0 < queries.shape[1] <= MAX_TREE_DIMENSIONS:
        from scipy.spatial import cKDTree

        _, neighbors = cKDTree(points.numpy()).query(queries.numpy(), workers=torch.get_num_threads())
        return torch.from_numpy(neighbors).long()
    return _by_products(queries, points)


def _by_products(queries: Tensor, points: Tensor) -> Tensor:
    """The nearest point p of a query q has the smallest |p|²/2 − p·q. Around a common center, |p|² is small."""
    for name, x in {"queries": queries, "points": points}.items():
        check_finite(f"the squared length of {name}", x.square().sum(1))
    out = queries.new_empty(len(queries), dtype=torch.int64)
    center = points.mean(0)
    points = points - center
    half_squares = points.square().sum(1).div_(2)
    with without_autocast(queries), ieee_products():
        for rows in table_rows(len(queries), queries, len(points)):
            torch.argmin(torch.addmm(half_squares, queries[rows] - center, points.mT, alpha=-1), 1, out=out[rows])
    return out


def table_rows(rows: int, like: Tensor, columns: int) -> Iterator[slice]:
    """Slices of almost equal numbers of rows, for a table (rows, columns) on the device of a tensor."""
    kind = "cuda" if like.is_cuda else "cpu"
    largest = max(MIN_ROWS[kind], MAX_ENTRIES[kind] // max(columns, 1))
    count = -(-rows // largest)
    for i in range(count):
        yield slice(rows * i // count, rows * (i + 1) // count)
