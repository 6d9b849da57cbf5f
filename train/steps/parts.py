"""Division of batches over ranks, and of the share of a rank over passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from diffnet.data.samples import balanced_shares
from diffnet.train.options import TrainOptions
from diffnet.train.place import Place


def own_parts(
    batches: Sequence[Sequence[int]], lengths: Sequence[int], place: Place, passes: int
) -> list[list[list[int]]]:
    """For each batch, the passes of a rank, without empty ones. They hold the numbers of meshes in the epoch, from 0.

    batches: all batches of an epoch
    lengths: number of vertices of each sample
    passes: how many passes a rank makes over its share of a batch, if it has so many meshes

    Ranks and passes get about equal numbers of vertices, see `balanced_shares`.

    >>> own_parts([[0, 1, 2], [3]], [50, 20, 30, 10], Place(1, 2), 2)
    [[[2], [1]], []]
    """
    firsts = accumulate(map(len, batches), initial=0)
    found = []
    for first, batch in zip(firsts, batches, strict=False):
        sizes = [lengths[i] for i in batch]
        share = balanced_shares(sizes, place.world_size)[place.rank]
        parts = balanced_shares([sizes[p] for p in share], passes)
        found.append([[first + share[p] for p in part] for part in parts if part])
    return found


def largest_part(lengths: Sequence[int], options: TrainOptions, parts: int) -> tuple[int | None, int | None]:
    """Limits of the meshes and the vertices of the parts of batches. A mesh with more vertices is a part of its own.

    lengths: number of vertices of each sample
    """
    meshes, vertices = options.batch_meshes, options.batch_vertices
    if parts == 1 or not lengths:
        return meshes, vertices
    largest = sorted(lengths, reverse=True)[:meshes]
    total = sum(largest) if vertices is None else min(sum(largest), max(vertices, largest[0]))
    # The mesh that a share gets last found it smaller than the mean share. Batches are divided twice.
    return meshes, -(-total // parts) + 2 * largest[0]
