"""Division of a batch over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace


def balanced_shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide meshes into shares with about equal numbers of vertices. Returns the positions in each share, ascending.

    lengths: number of vertices of each mesh
    count: number of shares. If there are fewer meshes, some shares are empty.

    The largest mesh that is left goes to the share that is smallest so far (Graham 1969). No share is empty if there
    are enough meshes.

    >>> balanced_shares([50, 10, 20, 30], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [(0, 0, share) for share in range(count)]  # vertices, meshes and number of each share: a heap
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        vertices, meshes, share = totals[0]
        shares[share].append(position)
        heapreplace(totals, (vertices + lengths[position], meshes + 1, share))
    return [sorted(share) for share in shares]
