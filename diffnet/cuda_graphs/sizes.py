"""Sizes of the buffers that CUDA graphs read.

A graph serves every batch that fits into its buffers. Sizes are rounded up to a few values, which keeps the number of
graphs small: meshes of 2,000 to 20,000 vertices need at most 27, and meshes of 20,000 to 200,000 vertices at most 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch

from diffnet.geometry import Operators
from diffnet.geometry.fields import FIELDS
from diffnet.ops import Pattern, SparseMatrix

# Sizes between two powers of two. With 8, a batch is padded by 6 % on average and by 12 % at most.
STEPS = 8
MIN_ROWS = 128  # of a buffer
# The largest number of added vertices. Padding costs time on large batches, where graphs save little.
MAX_ADDED = 8192
# The largest size of eigenvectors (V, K), in bytes. With more, the kernels take longer than launching them one by one,
# and a graph would only copy the batch. On an H200 with K = 128, this begins at 400,000 vertices in bfloat16. It begins
# at 80,000 in float32, but up to this limit a graph costs 5 % at most.
MAX_BYTES = 3 * 2**25


class BatchSize(NamedTuple):
    """How many of each thing a batch has, or its buffers can hold.

    meshes, vertices: B and V
    faces, edges: F and E
    entries, neighbors: nonzeros of the gradient and of the neighborhood
    longest: the vertices of the largest mesh
    """

    meshes: int
    vertices: int
    faces: int = 0
    edges: int = 0
    entries: int = 0
    neighbors: int = 0
    longest: int = 0

    @property
    def pairs(self) -> int:
        return self.meshes // 2

    @lru_cache(maxsize=1024)  # noqa: B019 - a size is a tuple
    def rounded(self) -> BatchSize:
        """The size of the buffers for a batch of this size. They have at least one vertex more than the batch."""
        meshes = 1 << (self.meshes - 1).bit_length()
        return BatchSize(meshes, round_up(self.vertices + 1, MAX_ADDED), *(round_up(count) for count in self[2:]))

    def fits_into(self, other: BatchSize) -> bool:
        return all(a <= b for a, b in zip(self, other, strict=True))

    def union(self, other: BatchSize) -> BatchSize:
        """The smallest size that holds both."""
        return BatchSize(*(max(a, b) for a, b in zip(self, other, strict=True)))


def size_of(operators: Operators, counted: Iterable[str] = ()) -> BatchSize:
    """The size of a batch. Only the vertices, the meshes and the given fields are counted; the others are 0."""
    counts = {name: _count(operators, name) for name in counted}
    return BatchSize(len(operators), operators.num_vertices, **counts)


class MeshSizes(NamedTuple):
    """The sizes of the meshes of a set, whose operators need not be in memory.

    counted: gives the size of each mesh with these counts, see `size_of`
    k: the largest number of eigenpairs
    """

    counted: Callable[[Iterable[str]], Sequence[BatchSize]]
    k: int


def sizes_of(meshes: Sequence[Operators]) -> MeshSizes:
    """The sizes of meshes from their operators."""
    return MeshSizes(partial(_sizes_with, meshes), max(o.k for o in meshes))


def _sizes_with(meshes: Sequence[Operators], counted: Iterable[str]) -> list[BatchSize]:
    return [size_of(o, counted) for o in meshes]


def max_vertices(k: int, dtype: torch.dtype) -> int:
    """The vertices of the largest batch that should have a graph, for K eigenpairs in the dtype of the computation.

    >>> max_vertices(128, torch.bfloat16)
    393216
    """
    return MAX_BYTES // (max(k, 1) * dtype.itemsize)


def _count(operators: Operators, name: str) -> int:
    if name == "longest":
        return max(operators.lengths)
    if name in ("faces", "edges"):
        return len(getattr(operators, name))
    value = getattr(operators, next(field for field, kind in FIELDS.items() if kind.count == name))
    pattern: Pattern = value.pattern if isinstance(value, SparseMatrix) else value
    return pattern.nnz


def largest_batch(sizes: Sequence[BatchSize], meshes: int | None, vertices: int | None) -> BatchSize:
    """A size that holds every batch of some meshes.

    sizes: of the meshes
    meshes, vertices: the limits of a batch. None is no limit. A mesh with more vertices is a batch of its own.

    >>> largest_batch([BatchSize(1, 100), BatchSize(1, 300), BatchSize(1, 200)], meshes=2, vertices=None)
    BatchSize(meshes=2, vertices=500, faces=0, edges=0, entries=0, neighbors=0, longest=0)
    """
    count = len(sizes) if meshes is None else min(meshes, len(sizes))
    if vertices is not None:
        smallest = sorted(size.vertices for size in sizes)
        within = sum(total <= vertices for total in accumulate(smallest))
        count = min(count, max(within, 1))
    totals = [sum(sorted(column, reverse=True)[:count]) for column in zip(*sizes, strict=True)]
    if vertices is not None:
        most = max(vertices, *(size.vertices for size in sizes))
        for i, column in enumerate(zip(*sizes, strict=True)):
            # Every batch has at most `most` vertices, and no mesh has more of anything for each vertex than this.
            share = max(n / size.vertices for n, size in zip(column, sizes, strict=True))
            totals[i] = min(totals[i], math.ceil(share * most))
    return BatchSize(*totals)._replace(longest=max(size.longest for size in sizes))


def round_up(count: int, max_added: int | None = None) -> int:
    """Round a count up to one of `STEPS` sizes between powers of two. 0 stays 0.

    max_added: a power of two, the most that is added to a count. There are then more sizes. None is no limit.

    >>> round_up(15_000), round_up(16_385), round_up(3)
    (15360, 18432, 128)
    >>> round_up(200_001), round_up(200_001, max_added=8192)
    (212992, 204800)
    """
    if count <= 0:
        return 0
    step = max(MIN_ROWS, 1 << ((count - 1).bit_length() - 1)) // STEPS if count > 1 else 1
    if max_added is not None:
        step = min(step, max_added)
    return max(MIN_ROWS, -(-count // step) * step)
