"""Normals at the vertices that a file or the user gives."""

from __future__ import annotations

import reprlib
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import MeshError, OptionError
from diffnet.geometry.mesh.objects import real_array

NormalsRule: TypeAlias = Literal["file", "geometry"]
NORMALS_RULES: tuple[NormalsRule, ...] = get_args(NormalsRule)


def unit_normals(normals: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Normals (V, 3) of length 1. Rows that are zero or not finite become 0. None if no row is left.

    >>> unit_normals(np.array([[0.0, 0, 4], [0, 0, 0], [np.nan, 0, 1]])).tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if normals is None:
        return None
    rows = np.where(np.isfinite(normals).all(axis=1, keepdims=True), normals, 0.0)
    # Squares of very small or very large numbers underflow or overflow.
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    rows = rows / np.where(largest > 0, largest, 1.0)
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    return unit if unit.any() else None


def mean_normals(normals: NDArray[np.float64], place: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """The normals (count, 3) of vertices that have several: their mean, of length 1, or 0 if there is none.

    normals: (N, 3) of length 1 or 0
    place: (N,) the vertex of each normal

    Where the normals of a vertex cancel out, the first one is used.

    >>> mean_normals(np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1]]), np.array([0, 0, 1, 1]), 2).round(3)
    array([[0.707, 0.707, 0.   ],
           [0.   , 0.   , 1.   ]])
    """
    present = normals.any(axis=1)
    normals, place = normals[present], place[present]
    sums = np.stack([np.bincount(place, normals[:, i], count) for i in range(3)], axis=1)
    firsts = np.zeros((count, 3))
    firsts[place[::-1]] = normals[::-1]  # the last write to a vertex wins
    size = np.linalg.norm(sums, axis=1, keepdims=True)
    cancelled = size < 1e-3 * np.bincount(place, minlength=count)[:, None]
    means: NDArray[np.float64] = np.where(cancelled, firsts, sums / np.where(size > 0, size, 1.0))
    return means


def own_normals(given: Any, count: int, name: str) -> NDArray[np.float64]:
    """Normals (V, 3) of length 1 from what a user gives: an array, a tensor or a list.

    count: V
    name: the mesh, for messages

    Raises MeshError for another shape, and for normals that are zero or not finite.
    """
    normals = normals_array(given, count, name)
    unit = unit_normals(normals)
    usable = np.zeros(count, bool) if unit is None else unit.any(axis=1)
    bad = np.flatnonzero(~usable)
    if unit is None or len(bad):
        raise MeshError(
            f"{name}: normals should be finite and not zero, but {len(bad)} are not; the first is normals[{bad[0]}] = "
            f"{normals[bad[0]].tolist()}"
        )
    return unit


def normals_array(given: Any, count: int, name: str) -> NDArray[np.float64]:
    """Normals (V, 3) as they are given. For arguments and errors see `own_normals`."""
    try:
        normals = real_array("normals", given)
    except ValueError as e:
        raise MeshError(f"{name}: {e}") from e
    if normals.shape != (count, 3):
        raise MeshError(
            f"{name}: normals should have shape ({count}, 3), one for each vertex, shape is {normals.shape}"
        )
    return normals


def check_normals_rule(rule: Any, others: str = "") -> None:
    """Raise OptionError for a rule that is neither None nor one of NORMALS_RULES.

    others: further values that are allowed, for the message
    """
    if rule is not None and not (isinstance(rule, str) and rule in NORMALS_RULES):
        names = " or ".join(f'"{name}"' for name in NORMALS_RULES)
        raise OptionError(f"normals should be {others}None, {names}, got {reprlib.repr(rule)}")
