"""Distances between pairs of vertices in the cache: one entry for each mesh, which grows with the pairs asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.store.cache import Arrays, cache_key, check_arrays, entry_path, read_entry, write_entry

MAX_PAIRS = 2**24  # of one entry, 270 MB


@dataclass(frozen=True)
class KnownDistances:
    """Distances of a mesh.

    keys: (N,) int64, ascending: a · V + b for vertices a and b
    values: (N,) float64
    """

    keys: NDArray[np.int64]
    values: NDArray[np.float64]

    def missing(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys that are not known."""
        return np.setdiff1d(keys, self.keys, assume_unique=True)

    def of(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """The values of keys that are all known."""
        return self.values[np.searchsorted(self.keys, keys)]

    def with_more(self, keys: NDArray[np.int64], values: NDArray[np.float64]) -> KnownDistances:
        """These and others, which are not known."""
        together = np.concatenate([self.keys, keys])
        order = np.argsort(together, kind="stable")
        return KnownDistances(together[order], np.concatenate([self.values, values])[order])


NO_DISTANCES = KnownDistances(np.zeros(0, np.int64), np.zeros(0))


def distances_path(mesh: Mesh, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the entry of a mesh. It need not exist."""
    return entry_path(
        cache_dir, cache_key({"verts": mesh.verts, "faces": mesh.faces}, solver="edge flips"), "geodesics"
    )


def read_distances(path: Path, vertices: int) -> KnownDistances:
    """The distances in an entry. None are known if there is no entry, or, with a warning, a damaged one."""
    arrays = read_entry(path, lambda arrays: _check(arrays, vertices))
    return NO_DISTANCES if arrays is None else KnownDistances(arrays["keys"], arrays["values"])


def write_distances(path: Path, distances: KnownDistances) -> None:
    """Write an entry, unless it has more than MAX_PAIRS. See `write_entry`.

    Two processes that extend an entry at once lose the additions of one of them. They are computed again when needed.
    """
    if len(distances.keys) <= MAX_PAIRS:
        write_entry(path, {"keys": distances.keys, "values": distances.values})


def _check(arrays: Arrays, vertices: int) -> None:
    keys = arrays["keys"]
    check_arrays(arrays, {"keys": ("int64", (keys.size,)), "values": ("float64", (keys.size,))})
    if keys.size and not (keys[0] >= 0 and keys[-1] < vertices**2 and (np.diff(keys) > 0).all()):
        raise ValueError(f"keys don't ascend from 0 to {vertices**2 - 1}")
    if not (arrays["values"] >= 0).all():
        raise ValueError("values are negative or NaN")
