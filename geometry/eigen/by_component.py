"""Eigenpairs of a whole from those of its connected components."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array, Component, Pairs


def search(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Generator[Component, Pairs, Pairs]:
    """`eigenbasis` step by step: yields each component whose pairs it needs, is sent them, and returns the result.

    Raises ValueError for k < 0.
    """
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")
    live = np.flatnonzero(mass > 0)
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")  # vector by vector, as they are found
    pairs = min(k, len(live))
    if pairs == 0:
        return evals, evecs
    stiffness = scipy.sparse.csr_matrix(laplacian)
    if len(live) < len(mass):
        stiffness = stiffness[live][:, live]
    found, vectors = yield from _smallest_pairs(stiffness, mass[live], pairs)
    evals[:pairs], evals[pairs:] = found, found[-1]
    if vectors.shape == evecs.shape:
        return evals, vectors
    for column, vector in zip(evecs.T, vectors.T, strict=False):
        column[live] = vector
    return evals, evecs


def _smallest_pairs(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Generator[Component, Pairs, Pairs]:
    count, component = scipy.sparse.csgraph.connected_components(laplacian, directed=False)
    area = np.bincount(component, mass)
    by_area = np.argsort(-area, kind="stable")
    members = np.split(np.argsort(component, kind="stable"), np.cumsum(np.bincount(component))[:-1])
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")
    for i, c in enumerate(by_area[:k]):
        evecs[members[c], i] = 1 / np.sqrt(area[c])
    rest = k - count
    if rest <= 0:
        return evals, evecs

    # Components are problems of their own. By Weyl's law each has pairs in proportion to its area, so that many are
    # looked for; where the pairs of all of them show that one has more below the last, it is solved again.
    pairs: dict[int, Pairs] = {}
    wanted = {c: rest if 2 * area[c] > area.sum() else int(1.1 * rest * area[c] / area.sum()) + 4 for c in by_area}
    while wanted:
        for c, number in wanted.items():
            inside = members[c]
            block = laplacian if count == 1 else laplacian[inside][:, inside]
            pairs[c] = yield Component(block, mass[inside], min(number, rest, len(inside) - 1))
        found = np.sort(np.concatenate([values for values, _ in pairs.values()]))
        last = found[rest - 1] if len(found) >= rest else np.inf
        wanted = {
            c: 4 + 2 * len(values)
            for c, (values, _) in pairs.items()
            if len(values) < min(rest, len(members[c]) - 1) and not (len(values) and values[-1] > last)
        }

    order = sorted((value, c, i) for c in by_area for i, value in enumerate(pairs[c][0]))[:rest]
    evals[count : count + len(order)] = [value for value, _, _ in order]
    for c in {c for _, c, _ in order}:
        columns = [count + at for at, (_, owner, _) in enumerate(order) if owner == c]
        vectors = pairs[c][1][:, : len(columns)]  # ascending, so these are its first
        if count == 1:  # at once, which is several times faster
            evecs[:, count : count + len(columns)] = vectors
        else:
            for column, vector in zip(columns, vectors.T, strict=True):
                evecs[members[c], column] = vector
    return evals, evecs
