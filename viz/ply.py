"""Writing surfaces and their values to PLY files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import majority, on_polygons
from diffnet.geometry.errors import MeshError
from diffnet.geometry.files import write_atomically
from diffnet.geometry.mesh.attributes import beside
from diffnet.geometry.mesh.formats import Attributes
from diffnet.geometry.mesh.mesh import MeshLike, mesh_edges
from diffnet.geometry.mesh.objects import on_host
from diffnet.viz.fields import Field, make_field
from diffnet.viz.palette import colorize
from diffnet.viz.surface import Surface, ValuesAt, surface_of

Columns: TypeAlias = dict[str, NDArray[Any]]  # properties by name, with the dtypes of the file
_TYPES = {
    **{"i1": "char", "u1": "uchar", "i2": "short", "u2": "ushort", "i4": "int", "u4": "uint"},
    **{"f4": "float", "f8": "double"},
}
_PLACES = ("x", "y", "z", "vertex_indices")
_IN_PLY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
RESERVED = {"x", "y", "z", "nx", "ny", "nz", "red", "green", "blue", "alpha", "label", "label_index", "vertex_indices"}


def write_ply(
    path: str | os.PathLike[str],
    mesh: MeshLike,
    *,
    labels: Any = None,
    label_names: Sequence[str] | None = None,
    label_numbers: Sequence[int] | None = None,
    instances: Any = None,
    scalars: Mapping[str, Any] | None = None,
    colors: Any = None,
    at: ValuesAt | None = None,
    attributes: Attributes | None = None,
) -> None:
    """Write a mesh or point cloud with its values as a binary PLY file.

    path: a path that ends in .ply
    mesh: what `load_mesh` accepts
    labels: (N,) integers, written as the property `label`, with colors of the labels
    label_names: the names of the labels 0, 1, …, written as comments such as `comment label 1 arm`. PLY headers are
        ASCII, so other characters are written as in Python, such as `\\xe4`.
    label_numbers: the numbers to write instead of the labels 0, 1, …; then these are the property `label_index`, if
        they differ. Negative labels stay.
    instances: (N,) integers, written as the property `instance`, with their colors instead of those of the labels
    scalars: by name, each (N,) real numbers, written as properties of these names: `double` for 64-bit numbers, else
        `float`. A name has letters, digits and underscores.
    colors: (N, 3), see `picture`; written as `red`, `green`, `blue` instead of the colors of labels and instances
    at: the elements that the values belong to, "vertices", "faces" or "edges" (in the order of `mesh_edges`). Default:
        those whose number is N, in this order.
    attributes: more properties of the vertices and of the faces of the mesh file, see `load_attributes`. A name that
        is there already gets `_input` behind it, and columns get their numbers, such as `wind_0`.

    Values at faces are properties of the faces, all others of the vertices. Few programs show edges, so of labels and
    instances at edges, each vertex takes the most frequent one of its edges. The smallest label wins a tie. A vertex is
    unlabeled only if all its edges are. Scalars and colors at edges are refused.

    Raises ValueError for another path, for values and names that do not fit, and for labels beyond 2^53, MeshError for
    a mesh that can't be used, and OSError if the file can't be written.
    """
    if not os.fspath(path).lower().endswith(".ply"):
        raise ValueError(f"{path}: the file is written in PLY format, so its name should end in .ply")
    surface = surface_of(mesh)
    columns: dict[str, Columns] = {"vertices": {}, "faces": {}}
    if labels is not None:
        field = _labels_to_show("labels", labels, surface, at)
        if colors is None and instances is None:
            columns[field.at] |= _colors(colorize(field.values))
        columns[field.at]["label"] = _whole("labels", _numbers(field.values, label_numbers))
        if label_numbers is not None and list(label_numbers) != list(range(len(label_numbers))):
            columns[field.at]["label_index"] = field.values.astype("<i4")
    if instances is not None:
        field = _labels_to_show("instances", instances, surface, at)
        if colors is None:
            columns[field.at] |= _colors(colorize(field.values))
        columns[field.at]["instance"] = _whole("instances", field.values)
    if colors is not None:
        field = _not_at_edges(make_field("colors", "colors", colors, surface, at))
        columns[field.at] |= _colors(field.values)
    reserved = RESERVED if instances is None else RESERVED | {"instance"}
    for name, values in (scalars or {}).items():
        if not _IN_PLY.fullmatch(name) or name in reserved:
            raise ValueError(
                f"scalars: the name {name!r} can't be used in a PLY file. Use letters, digits and underscores, and "
                f"none of {', '.join(sorted(reserved))}"
            )
        long = np.asarray(on_host(values)).dtype.itemsize == 8
        field = _not_at_edges(make_field("scalars", name, values, surface, at))
        columns[field.at][name] = field.values.astype("<f8" if long else "<f4")
    if surface.mesh is not None and surface.mesh.sizes is not None:
        columns["faces"] = {name: on_polygons(surface.mesh, column) for name, column in columns["faces"].items()}
    if attributes is not None:
        for place, table in (("vertices", attributes.vertices), ("faces", attributes.faces)):
            columns[place] = beside(columns[place], _flat(table))
    write_atomically(path, _content(surface, columns, _comments(label_names or (), label_numbers)))


def ply_names(names: Sequence[str], reserved: Collection[str] = RESERVED) -> list[str]:
    """A name of a PLY property for each name. It has letters, digits and underscores only, and no two are equal."""
    result: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not _IN_PLY.fullmatch(plain) or plain in reserved:
            plain = f"value_{plain}"
        while plain in result:
            plain += "_"
        result.append(plain)
    return result


def _flat(table: Mapping[str, NDArray[Any]]) -> Columns:
    """Properties of other files (N,) or (N, C) as those of a PLY file."""
    names: list[str] = []
    columns: list[NDArray[Any]] = []
    for name, values in table.items():
        each = values.reshape(len(values), -1).T
        names += [name] if values.ndim == 1 else [f"{name}_{i}" for i in range(len(each))]
        columns += [_exact(name, column) for column in each]
    return dict(zip(ply_names(names, _PLACES), columns, strict=True))


def _exact(name: str, column: NDArray[Any]) -> NDArray[Any]:
    """Numbers in a type of PLY files that holds them. Raises MeshError for integers beyond 2^53."""
    kind = column.dtype.str[1:]
    if kind in _TYPES:
        return column.astype(f"<{kind}")
    return column.astype("<f8") if column.dtype.kind == "f" else _whole(name, column.astype(np.int64))


def _colors(colors: NDArray[np.uint8]) -> Columns:
    return dict(zip(("red", "green", "blue"), colors.T, strict=True))


def _labels_to_show(name: str, labels: Any, surface: Surface, at: ValuesAt | None) -> Field:
    """Labels at vertices or faces. Those at edges become labels at vertices."""
    field = make_field("labels", name, labels, surface, at)
    if field.at != "edges":
        return field
    edges = np.arange(len(field.values)).repeat(2)
    shown = majority(field.values, edges, mesh_edges(surface.faces).ravel(), len(surface.verts))
    return field._replace(at="vertices", values=shown)


def _not_at_edges(field: Field) -> Field:
    if field.at == "edges":
        raise ValueError(f"{field.name}: a PLY file has no edges. Give {field.kind} at vertices or faces")
    return field


def _numbers(labels: NDArray[np.int64], numbers: Sequence[int] | None) -> NDArray[np.int64]:
    """The numbers (N,) of labels (N,)."""
    if numbers is None:
        return labels
    if labels.max(initial=-1) >= len(numbers):
        raise ValueError(
            f"label_numbers: the label {labels.max()} needs {labels.max() + 1} numbers, got {len(numbers)}"
        )
    return np.where(labels < 0, labels, np.array(numbers, np.int64)[labels])


def _whole(name: str, values: NDArray[np.int64]) -> NDArray[Any]:
    largest = max(-int(values.min(initial=0)), int(values.max(initial=0)))
    if largest > 2**53:
        raise MeshError(f"{name}: {largest} is beyond 2^53, and a PLY file can't hold it exactly")
    return values.astype("<i4" if largest < 2**31 else "<f8")


def _comments(names: Sequence[str], numbers: Sequence[int] | None) -> list[str]:
    """A line for each label whose name is not its number."""
    numbers = range(len(names)) if numbers is None or not names else numbers
    if len(names) != len(numbers):
        raise ValueError(f"label_names: {len(names)} names for {len(numbers)} label_numbers")
    named = zip(numbers, (" ".join(name.split()) for name in names), strict=True)
    return [f"comment label {number} {name}" for number, name in named if name != str(number)]


def _content(surface: Surface, columns: dict[str, Columns], comments: list[str]) -> bytes:
    """The header and the rows of a file."""
    verts, mesh = surface.verts, surface.mesh
    vertices = {name: verts[:, i].astype("<f8") for i, name in enumerate(("x", "y", "z"))} | columns["vertices"]
    header = ["ply", "format binary_little_endian 1.0", *comments, f"element vertex {len(verts)}", *_header(vertices)]
    rows = _rows([*vertices.values()])
    if len(surface.faces):
        sizes, corners = np.full(len(surface.faces), 3), surface.faces.reshape(-1)
        if mesh is not None and mesh.sizes is not None and mesh.corners is not None:
            sizes, corners = mesh.sizes, mesh.corners
        length, kind = ("uchar", "u1") if sizes.max() < 256 else ("int", "<i4")
        header += [f"element face {len(sizes)}", f"property list {length} int vertex_indices"]
        header += _header(columns["faces"])
        rows += _face_rows(sizes.astype(kind), corners.astype("<i4"), [*columns["faces"].values()])
    return "\n".join([*header, "end_header", ""]).encode("ascii", "backslashreplace") + rows


def _header(columns: Columns) -> list[str]:
    return [f"property {_TYPES[column.dtype.str[1:]]} {name}" for name, column in columns.items()]


def _face_rows(sizes: NDArray[Any], corners: NDArray[Any], columns: list[NDArray[Any]]) -> bytes:
    """The bytes of faces, row by row."""
    if (sizes == sizes[0]).all():
        return _rows([sizes, corners.reshape(len(sizes), -1), *columns])
    ends = np.cumsum(sizes, dtype=np.int64)
    parts = zip(sizes, np.split(corners, ends[:-1]), *columns, strict=True)
    return b"".join(number.tobytes() for row in parts for number in row)


def _rows(columns: list[NDArray[Any]]) -> bytes:
    """The bytes of a table, row by row without gaps. Each column has one or several values per row."""
    table = np.empty(len(columns[0]), [(str(i), column.dtype, column.shape[1:]) for i, column in enumerate(columns)])
    for i, column in enumerate(columns):
        table[str(i)] = column
    return table.tobytes()
