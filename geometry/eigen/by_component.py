"""Eigenpairs of a Laplacian from the eigenpairs of its connected components."""

from __future__ import annotations

import warnings
from collections.abc import Generator

import numpy as np
import scipy.sparse

from diffnet.geometry.eigen.problem import Array, Component, Pairs
from diffnet.geometry.eigen.resolution import rounding_fault


def component_by_component(
    laplacian: scipy.sparse.csr_matrix, mass: Array, k: int
) -> Generator[Component, Pairs, Pairs]:
    """`eigenbasis` as a generator: yields each component whose pairs it needs, receives them, and returns the result.

    So the caller chooses the solver. Warns if double precision doesn't resolve the eigenvalues. Raises ValueError for
    k < 0. `checked_problem` makes the arguments.
    """
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")
    live = np.flatnonzero(mass > 0)
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")  # written one vector at a time
    pairs = min(k, len(live))
    if pairs == 0:
        return evals, evecs
    stiffness = laplacian if len(live) == len(mass) else laplacian[live][:, live]
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

    # Each component is a separate problem. By Weyl's law, its share of the pairs is its share of the area, so this
    # number is requested first. If the largest value of a component is below the last one needed, more pairs of it are
    # requested.
    pairs: dict[int, Pairs] = {}
    faults: dict[int, str | None] = {}
    wanted = {c: rest if 2 * area[c] > area.sum() else int(1.1 * rest * area[c] / area.sum()) + 4 for c in by_area}
    while wanted:
        for c, number in wanted.items():
            inside = members[c]
            block = laplacian if count == 1 else laplacian[inside][:, inside]
            pairs[c] = yield Component(block, mass[inside], min(number, rest, len(inside) - 1))
            faults[c] = rounding_fault(block, *pairs[c])
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
        vectors = pairs[c][1][:, : len(columns)]  # values ascend, so the first ones are used
        if count == 1:  # one copy is several times faster than one for each column
            evecs[:, count : count + len(columns)] = vectors
        else:
            for column, vector in zip(columns, vectors.T, strict=True):
                evecs[members[c], column] = vector
    spoiled = [fault for fault in faults.values() if fault is not None]
    if spoiled:
        zeros, right = int((evals == 0).sum()), min(k, count)
        surplus = f"; {zeros} eigenvalues are 0, {right} should be" if zeros != right else ""
        warnings.warn(
            f"double precision doesn't resolve the eigenvalues of {len(spoiled)} of {count} components; in the first, "
            f"{spoiled[0]}{surplus}. Faces of almost zero area or coincident points cause this. For a mesh, use the "
            'robust Laplacian (laplacian="robust")',
            stacklevel=2,
        )
    return evals, evecs
