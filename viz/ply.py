"""Writing surfaces and their values to PLY files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.files import write_atomically
from diffnet.geometry.mesh.mesh import MeshLike, mesh_edges
from diffnet.geometry.mesh.objects import on_host
from diffnet.viz.fields import Field, make_field
from diffnet.viz.palette import colorize
from diffnet.viz.surface import Surface, ValuesAt, surface_of

_TYPES = {"uchar": "u1", "int": "<i4", "float": "<f4", "double": "<f8"}
RESERVED = {"x", "y", "z", "nx", "ny", "nz", "red", "green", "blue", "alpha", "label", "vertex_indices"}


def write_ply(
    path: str | os.PathLike[str],
    mesh: MeshLike,
    *,
    labels: Any = None,
    scalars: Mapping[str, Any] | None = None,
    colors: Any = None,
    at: ValuesAt | None = None,
) -> None:
    """Write a mesh or point cloud with its values as a binary PLY file.

    path: a path that ends in .ply
    mesh: what `load_mesh` accepts
    labels: (N,) integers, written as the property `label`, with colors of the labels
    scalars: by name, each (N,) real numbers, written as properties of these names: `double` for 64-bit numbers, else
        `float`. A name has letters, digits and underscores.
    colors: (N, 3), see `picture`; written as `red`, `green`, `blue` instead of the colors of the labels
    at: the elements that the values belong to, "vertices", "faces" or "edges" (in the order of `mesh_edges`). Default:
        those whose number is N, in this order.

    Values at faces are properties of the faces, all others of the vertices. Few programs show edges, so of labels at
    edges, each vertex takes the most frequent one of its edges. The smallest label wins a tie. A vertex is unlabeled
    only if all its edges are. Scalars and colors at edges are refused.

    Raises ValueError for another path, and for values and names that do not fit, MeshError for a mesh that can't be
    used, and OSError if the file can't be written.
    """
    if not os.fspath(path).lower().endswith(".ply"):
        raise ValueError(f"{path}: the file is written in PLY format, so its name should end in .ply")
    surface = surface_of(mesh)
    properties = _Properties()
    if labels is not None:
        field = make_field("labels", "labels", labels, surface, at)
        if field.at == "edges":
            shown = _most_frequent_at_vertices(mesh_edges(surface.faces), field.values, len(surface.verts))
            field = field._replace(at="vertices", values=shown)
        if colors is None:
            properties.add_colors(field.at, colorize(field.values))
        properties.add(field, "label", "int")
    if colors is not None:
        field = _not_at_edges(make_field("colors", "colors", colors, surface, at))
        properties.add_colors(field.at, field.values)
    for name, values in (scalars or {}).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in RESERVED:
            raise ValueError(
                f"scalars: the name {name!r} can't be used in a PLY file. Use letters, digits and underscores, and "
                f"none of {', '.join(sorted(RESERVED))}"
            )
        long = np.asarray(on_host(values)).dtype.itemsize == 8
        field = _not_at_edges(make_field("scalars", name, values, surface, at))
        properties.add(field, name, "double" if long else "float")
    write_atomically(path, _content(surface, properties))


class _Properties:
    """The properties of vertices and of faces: names, types and columns."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[str, str, NDArray[Any]]]] = {"vertices": [], "faces": []}

    def add(self, field: Field, name: str, kind: str) -> None:
        self.of[field.at].append((name, kind, field.values))

    def add_colors(self, at: str, colors: NDArray[np.uint8]) -> None:
        self.of[at] += [(name, "uchar", colors[:, i]) for i, name in enumerate(("red", "green", "blue"))]


def _not_at_edges(field: Field) -> Field:
    if field.at == "edges":
        raise ValueError(f"{field.name}: a PLY file has no edges. Give {field.kind} at vertices or faces")
    return field


def _content(surface: Surface, properties: _Properties) -> bytes:
    """The header and the rows of a file."""
    verts, faces = surface
    position = [(name, "double", verts[:, i]) for i, name in enumerate(("x", "y", "z"))]
    of_vertices, of_faces = position + properties.of["vertices"], properties.of["faces"]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(verts)}"]
    header += [f"property {kind} {name}" for name, kind, _ in of_vertices]
    rows = _rows([column.astype(_TYPES[kind]) for _, kind, column in of_vertices])
    if len(faces):
        header += [f"element face {len(faces)}", "property list uchar int vertex_indices"]
        header += [f"property {kind} {name}" for name, kind, _ in of_faces]
        corners = [np.full(len(faces), 3, "u1"), faces.astype("<i4")]
        rows += _rows(corners + [column.astype(_TYPES[kind]) for _, kind, column in of_faces])
    return "\n".join([*header, "end_header", ""]).encode("ascii") + rows


def _rows(columns: list[NDArray[Any]]) -> bytes:
    """The bytes of a table, row by row without gaps. Each column has one or several values per row."""
    table = np.empty(len(columns[0]), [(str(i), column.dtype, column.shape[1:]) for i, column in enumerate(columns)])
    for i, column in enumerate(columns):
        table[str(i)] = column
    return table.tobytes()


def _most_frequent_at_vertices(edges: NDArray[np.int64], labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The most frequent label (count,) of the edges (E, 2) at each of `count` vertices, -1 if there is none."""
    labeled = labels >= 0
    ends = edges[labeled].ravel()
    pairs, votes = np.unique(np.stack([ends, np.repeat(labels[labeled], 2)], axis=1), axis=0, return_counts=True)
    # The assignment below keeps the last pair of a vertex: most votes, then the smallest label.
    order = np.lexsort((-pairs[:, 1], votes))
    out = np.full(count, -1)
    out[pairs[order, 0]] = pairs[order, 1]
    return out
