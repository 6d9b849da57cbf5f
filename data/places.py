"""Targets at vertices, at faces and of whole meshes, in one array: rows for each place, and a place for each column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import PlaceAt, TargetsAt
from diffnet.geometry import Mesh


def places_of(at: TargetsAt) -> tuple[PlaceAt, ...]:
    """The places of targets, each once, in the order of their rows."""
    order: tuple[PlaceAt, ...] = "vertices", "faces", "edges", "meshes"
    return (at,) if isinstance(at, str) else tuple(place for place in order if place in at)


def row_numbers(mesh: Mesh, at: TargetsAt) -> NDArray[np.int64]:
    """The numbers (N,) of the rows of a mesh, whose faces are its triangles."""
    sizes = {"vertices": len(mesh.verts), "faces": len(mesh.faces), "meshes": 1}
    return np.arange(sum(sizes[place] for place in places_of(at)))


def rows_at(values: Any, vertices: int, at: TargetsAt) -> list[tuple[PlaceAt, Any]]:
    """The places of the targets of a mesh, and the rows of each among their rows (N, …).

    Those at several places are rows for vertices, for faces and for the mesh, one after the other. A column is NaN in
    the rows of other places. Faces are those of the file, or its triangles, as the number of rows tells.

    vertices: their number
    """
    if isinstance(at, str):
        return [(at, values)]
    places = places_of(at)
    sizes = {"vertices": vertices, "meshes": 1}
    sizes["faces"] = len(values) - sum(sizes.get(place, 0) for place in places)
    ends = np.cumsum([sizes[place] for place in places]).tolist()
    return [(place, values[end - sizes[place] : end]) for place, end in zip(places, ends, strict=True)]


def columns_at(
    values: Any, names: Sequence[str], vertices: int, at: TargetsAt
) -> list[tuple[PlaceAt, list[str], NDArray[np.float64]]]:
    """For each place, the names of its columns, and these columns of `rows_at`."""
    parts = []
    for place, rows in rows_at(values, vertices, at):
        columns = [i for i in range(len(names)) if isinstance(at, str) or at[i] == place]
        parts.append((place, [names[i] for i in columns], rows[:, columns]))
    return parts


def changed_rows(values: Any, vertices: int, at: TargetsAt, change: Callable[[Any, Any], Any]) -> Any:
    """Labels or targets (N, …) after a change of those at vertices, faces or edges. change: gets values and place"""
    parts = [part if place == "meshes" else change(part, place) for place, part in rows_at(values, vertices, at)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
