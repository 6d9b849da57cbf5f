"""The colors and properties of a mesh file."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.formats import read_off_header
from diffnet.geometry.mesh.mesh import read_content
from diffnet.geometry.mesh.ply import Lists, read_ply
from diffnet.geometry.mesh.text import numbered_lines, real, without_comments
from diffnet.geometry.mesh.vtk_files import read_vtk_arrays

COLOR_FORMATS = (".ply", ".obj", ".off")
VTK_FORMATS = (".vtk", ".vtp", ".vtu")
_PLY_COLORS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"), ("r", "g", "b"))


@dataclass(frozen=True)
class Attributes:
    """Colors and properties of a mesh file, in the file's order.

    colors: (V, 3) float64 from 0 to 1 at the vertices, or None
    face_colors: (P, 3) the same at the polygons
    vertices: by name, the numbers of each property of the vertices, (V,) or (V, C), with the file's dtype
    faces: the same for the polygons, (P,) or (P, C)
    """

    colors: NDArray[np.float64] | None = None
    face_colors: NDArray[np.float64] | None = None
    vertices: dict[str, NDArray[Any]] = field(default_factory=dict)
    faces: dict[str, NDArray[Any]] = field(default_factory=dict)


def load_attributes(path: str | os.PathLike[str]) -> Attributes:
    """Read the colors and properties of a mesh file, which may be compressed by gzip (.ply.gz).

    PLY files have properties, and colors as the properties red, green and blue. Coordinates and lists are left out. OBJ
    files may have colors of vertices after the coordinates (``v x y z r g b``), and OFF files, too (COFF). VTK files
    have the arrays of their points and cells. Arrays of three or four bytes are colors. Other formats give none.
    Whole numbers from 0 to 255 become colors from 0 to 1.

    Raises MeshError for a file that is missing or doesn't parse, and for colors out of range.
    """
    path = Path(path)
    suffix, data = read_content(path)
    try:
        if suffix == ".ply":
            return _of_ply(data)
        if suffix in COLOR_FORMATS:
            rows = _obj_colors(data) if suffix == ".obj" else _off_colors(data)
            return Attributes(None if rows is None else _unit_range(rows))
        if suffix in VTK_FORMATS:
            return _of_vtk(*read_vtk_arrays(data))
    except ValueError as e:
        raise MeshError(f"{path}: the file can't be read: {e}") from e
    return Attributes()


def _of_ply(data: bytes) -> Attributes:
    elements = read_ply(data)
    vertices, faces = (
        {name: column for name, column in elements.get(element, {}).items() if not isinstance(column, Lists)}
        for element in ("vertex", "face")
    )
    colors = _ply_colors(vertices), _ply_colors(faces)
    return Attributes(*colors, {name: x for name, x in vertices.items() if name not in ("x", "y", "z")}, faces)


def _of_vtk(vertices: dict[str, NDArray[Any]], faces: dict[str, NDArray[Any]]) -> Attributes:
    def colors(own: dict[str, NDArray[Any]]) -> NDArray[np.float64] | None:
        named = next((name for name, x in own.items() if x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] > 2), None)
        return None if named is None else _unit_range(own.pop(named)[:, :3])

    return Attributes(colors(vertices), colors(faces), vertices, faces)


def ply_color_names(properties: Iterable[str]) -> tuple[str, str, str] | None:
    """The names of the properties that are colors in a PLY file."""
    return next((names for names in _PLY_COLORS if set(names) <= set(properties)), None)


def _ply_colors(properties: dict[str, NDArray[Any]]) -> NDArray[np.float64] | None:
    names = ply_color_names(properties)
    return None if names is None else _unit_range(np.stack([properties[name] for name in names], 1))


def _obj_colors(data: bytes) -> NDArray[np.float64] | None:
    lines = without_comments(numbered_lines(data, continued=True))
    return _columns((line for _, line in lines if line.split(None, 1)[0] == "v"), range(4, 7))


def _off_colors(data: bytes) -> NDArray[np.float64] | None:
    kind, vertices, _, header_lines = read_off_header(data)
    first = 6 if "N" in kind[:-3] else 3  # normals stand before colors
    lines = islice(without_comments(numbered_lines(data)), header_lines, header_lines + vertices)
    return _columns((line for _, line in lines), range(first, first + 3))


def _columns(lines: Iterable[str], columns: range) -> NDArray[np.float64] | None:
    """These columns of lines of words. None if the first line doesn't have them."""
    values = array("d")
    for number, line in enumerate(lines):
        words = line.split()
        if len(words) < columns.stop:
            if number == 0:
                return None
            raise ValueError(f"vertex 0 has a color, but vertex {number} has none")
        values.extend([real(words[i]) for i in columns])
    return np.array(values).reshape(-1, len(columns)) if values else None


def _unit_range(colors: NDArray[Any]) -> NDArray[np.float64]:
    """Colors from 0 to 1. Raises ValueError for others than 0 … 1, 0 … 255, and 16 bits in PLY."""
    unit = colors.astype(np.float64)
    if colors.dtype.kind == "u":
        return unit / np.iinfo(colors.dtype).max
    if not ((unit >= 0) & (unit <= 255)).all():
        bad = np.flatnonzero(~((unit >= 0) & (unit <= 255)).all(axis=1))[0]
        raise ValueError(f"colors should be from 0 to 1 or from 0 to 255, that of vertex {bad} is {unit[bad].tolist()}")
    return unit / 255 if colors.max(initial=0) > 1 else unit


MAX_CLASSES = 64  # whole numbers of more different values are scalars
_NORMALS = ("nx", "ny", "nz")


class MeshArray(NamedTuple):
    """An array of a mesh file.

    at: the elements. Faces are those of the file, in its order.
    values: (N,) whole numbers of labels, (N, C) scalars, (N, 3) vectors, or (N, 3) colors from 0 to 1
    """

    name: str
    kind: Literal["labels", "scalars", "vectors", "colors"]
    at: Literal["vertices", "faces"]
    values: NDArray[Any]

    @property
    def summary(self) -> str:
        """The classes of labels, the number of colors, the lengths of vectors, or the range of scalars."""
        if self.kind in ("labels", "colors"):
            distinct = np.unique(self.values, axis=0)
            if self.kind == "colors":
                return f"{len(distinct)} different"
            some = ", ".join(map(str, distinct[:8])) + (f", … {distinct[-1]}" if len(distinct) > 8 else "")
            return f"{len(distinct)} {'class' if len(distinct) == 1 else 'classes'}: {some}"
        values = np.linalg.norm(self.values, axis=1) if self.kind == "vectors" else self.values
        finite = values[np.isfinite(values)]
        what = "lengths " if self.kind == "vectors" else f"{len(values.T)} columns, " if len(values.T) > 1 else ""
        return what + (f"{finite.min():.6g} to {finite.max():.6g}" if len(finite) else "no finite numbers")


def mesh_arrays(path: str | os.PathLike[str]) -> list[MeshArray]:
    """The arrays in a mesh file, see `load_attributes`: colors, then properties in the order of the file.

    Whole numbers of at most MAX_CLASSES different values are labels. Three columns are vectors, as the properties nx,
    ny and nz of a PLY file are.
    """
    attributes, found = load_attributes(path), list[MeshArray]()
    for at, colors, properties in (
        ("vertices", attributes.colors, attributes.vertices),
        ("faces", attributes.face_colors, attributes.faces),
    ):
        rest = dict(properties)
        if colors is not None:
            found.append(MeshArray("colors", "colors", at, colors))  # type: ignore[arg-type]
            for name in (*(ply_color_names(rest) or ()), "alpha"):
                rest.pop(name, None)
        if set(_NORMALS) <= rest.keys():
            rest["normals"] = np.stack([rest.pop(name) for name in _NORMALS], 1)
        for name, values in rest.items():
            found.append(_array(name, at, values))  # type: ignore[arg-type]
    return found


def _array(name: str, at: Literal["vertices", "faces"], values: NDArray[Any]) -> MeshArray:
    rows = values.reshape(len(values), -1)
    if rows.shape[1] == 3:
        return MeshArray(name, "vectors", at, rows.astype(np.float64))
    real = rows.astype(np.float64)
    whole = rows.shape[1] == 1 and bool((np.abs(real) < 2**53).all() and (real == np.trunc(real)).all())
    if whole and len(np.unique(real)) <= MAX_CLASSES:
        return MeshArray(name, "labels", at, rows[:, 0].astype(np.int64))
    return MeshArray(name, "scalars", at, real)
