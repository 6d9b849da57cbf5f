"""Eigenpairs of a Laplacian from the eigenpairs of its connected components."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.eigen.checks import rounding_fault
from diffnet.geometry.eigen.cpu import pairs_on_cpu
from diffnet.geometry.eigen.problem import Array, Component, Pairs


class Pick(NamedTuple):
    """A nonconstant pair of the result: the `place`-th one of a component."""

    value: float
    component: int
    place: int


def select_pairs(
    area: Array, size: NDArray[np.int64], k: int
) -> Generator[dict[int, int], dict[int, Array], list[Pick]]:
    """Find the smallest nonconstant pairs among those of all components, so that there are k with the constants.

    Yields the number of pairs to find for each component, receives their eigenvalues, ascending, and returns the picks.

    area, size: (components,), the sum of the masses and the number of vertices
    """
    rest = k - len(area)
    if rest <= 0:
        return []
    # Each component is a separate problem. By Weyl's law, its share of the pairs is its share of the area, so this
    # number is requested first. If the largest value of a component is below the last one needed, more pairs of it are
    # requested.
    total = area.sum()
    values: dict[int, Array] = {}
    wanted = {c: rest if 2 * share > total else int(1.1 * rest * share / total) + 4 for c, share in enumerate(area)}
    while wanted:
        values |= yield {c: min(number, rest, int(size[c]) - 1) for c, number in wanted.items()}
        ascending = np.sort(np.concatenate([*values.values()]))
        last = ascending[rest - 1] if len(ascending) >= rest else np.inf
        wanted = {
            c: 4 + 2 * len(row)
            for c, row in values.items()
            if len(row) < min(rest, size[c] - 1) and not (len(row) and row[-1] > last)
        }
    by_area = np.argsort(-area, kind="stable")
    return sorted(Pick(float(value), int(c), i) for c in by_area for i, value in enumerate(values[c]))[:rest]


def eigenbasis_by_component(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    """See `eigenbasis`. `checked_problem` makes the first two arguments.

    Warns if double precision doesn't resolve the eigenvalues.
    """
    live = np.flatnonzero(mass > 0)
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")  # written one vector at a time
    pairs = min(k, len(live))
    if pairs == 0:
        return evals, evecs
    stiffness = laplacian if len(live) == len(mass) else laplacian[live][:, live]
    smallest, vectors = _smallest_pairs(stiffness, mass[live], pairs)
    evals[:pairs], evals[pairs:] = smallest, smallest[-1]
    if vectors.shape == evecs.shape:
        return evals, vectors
    for column, vector in zip(evecs.T, vectors.T, strict=False):
        column[live] = vector
    return evals, evecs


def _smallest_pairs(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    count, component = scipy.sparse.csgraph.connected_components(laplacian, directed=False)
    area, size = np.bincount(component, mass).astype(np.float64), np.bincount(component)
    members = np.split(np.argsort(component, kind="stable"), np.cumsum(size)[:-1])
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")
    for i, c in enumerate(np.argsort(-area, kind="stable")[:k]):
        evecs[members[c], i] = 1 / np.sqrt(area[c])

    pairs: dict[int, Pairs] = {}
    faults: dict[int, str | None] = {}
    steps = select_pairs(area, size, k)
    answer: dict[int, Array] | None = None
    try:
        while True:
            wanted = steps.send(answer)  # type: ignore[arg-type]
            for c, number in wanted.items():
                block = laplacian if count == 1 else laplacian[members[c]][:, members[c]]
                pairs[c] = pairs_on_cpu(Component(block, mass[members[c]], number))
                faults[c] = rounding_fault(block, *pairs[c])
            answer = {c: pairs[c][0] for c in wanted}
    except StopIteration as end:
        picks: list[Pick] = end.value
    evals[count : count + len(picks)] = [pick.value for pick in picks]
    for c in {pick.component for pick in picks}:
        columns = [count + at for at, pick in enumerate(picks) if pick.component == c]
        vectors = pairs[c][1][:, : len(columns)]  # values ascend, so the first ones are used
        if count == 1:  # one copy is several times faster than one for each column
            evecs[:, count : count + len(columns)] = vectors
        else:
            for column, vector in zip(columns, vectors.T, strict=True):
                evecs.T[column][members[c]] = vector  # an index of one dimension takes half the time
    warn_of_rounding(evals, count, [fault for fault in faults.values() if fault is not None])
    return evals, evecs


def warn_of_rounding(evals: Array, components: int, faults: Sequence[str]) -> None:
    """Warn if rounding has spoiled eigenvalues of a mesh with components. faults: see `rounding_fault`"""
    if not faults:
        return
    zeros, right = int((evals == 0).sum()), min(len(evals), components)
    surplus = f"; {zeros} eigenvalues are 0, {right} should be" if zeros != right else ""
    warnings.warn(
        f"double precision doesn't resolve the eigenvalues of {len(faults)} of {components} components; in the first, "
        f"{faults[0]}{surplus}. Faces of almost zero area or coincident points cause this. For a mesh, use the "
        'robust Laplacian (laplacian="robust")',
        stacklevel=2,
    )
