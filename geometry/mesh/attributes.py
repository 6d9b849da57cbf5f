"""The colors and properties of a mesh file, and its arrays as people look at them: labels, scalars, vectors, colors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import MeshError, raised_as
from diffnet.geometry.mesh.formats import READERS, Attributes, color_names, with_colors
from diffnet.geometry.mesh.mesh import Mesh, mesh_suffix, read_content
from diffnet.geometry.mesh.text import whole

MAX_CLASSES = 64  # whole numbers of more different values are scalars
_NORMALS = ("nx", "ny", "nz")


def load_attributes(path: str | os.PathLike[str]) -> Attributes:
    """Read the colors and properties of a mesh file, which may be compressed by gzip (.ply.gz).

    PLY files have properties, and colors as the properties red, green and blue. Coordinates and lists are left out. OBJ
    files may have colors of vertices after the coordinates (``v x y z r g b``), and OFF files, too (COFF), and colors
    of faces after their corners. VTK files have the arrays of their points and cells. Arrays of three or four bytes are
    colors. glTF files have COLOR_0 and attributes of users, whose names begin with an underscore. STL files give none.
    Whole numbers from 0 to 255 become colors from 0 to 1.

    Raises MeshError for a file that is missing or doesn't parse, and for colors out of range.
    """
    return _read(Path(path), with_colors)


def properties_of(mesh: Mesh) -> Attributes:
    """The properties in the file of a mesh, also colors that are out of range. None if it is not from a file."""
    is_plain = mesh.path is None or not READERS[mesh_suffix(mesh.path)].properties
    return Attributes() if is_plain else _read(Path(str(mesh.path)))


def _read(path: Path, change: Callable[[Attributes], Attributes] = lambda attributes: attributes) -> Attributes:
    suffix, data = read_content(path)
    with raised_as(MeshError, f"{path}: the file can't be read", ValueError):
        return change(READERS[suffix].attributes(data))


def beside(arrays: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """New arrays, and those of a file. One of the file whose name a new one has gets ``_input`` behind it."""
    result = dict(arrays)
    for name, values in before.items():
        while name in result:
            name = f"{name}_input"
        result[name] = values
    return result


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
    attributes, arrays = load_attributes(path), list[MeshArray]()
    for at, colors, properties in (
        ("vertices", attributes.colors, attributes.vertices),
        ("faces", attributes.face_colors, attributes.faces),
    ):
        rest = dict(properties)
        if colors is not None:
            arrays.append(MeshArray("colors", "colors", at, colors))  # type: ignore[arg-type]
            for name in (*color_names(rest), "alpha"):
                rest.pop(name, None)
        if set(_NORMALS) <= rest.keys():
            rest["normals"] = np.stack([rest.pop(name) for name in _NORMALS], 1)
        for name, values in rest.items():
            arrays.append(_array(name, at, values))  # type: ignore[arg-type]
    return arrays


def _array(name: str, at: Literal["vertices", "faces"], values: NDArray[Any]) -> MeshArray:
    rows = values.reshape(len(values), -1)
    if rows.shape[1] == 3:
        return MeshArray(name, "vectors", at, rows.astype(np.float64))
    real = rows.astype(np.float64)
    if rows.shape[1] == 1 and whole(real) and len(np.unique(real)) <= MAX_CLASSES:
        return MeshArray(name, "labels", at, rows[:, 0].astype(np.int64))
    return MeshArray(name, "scalars", at, real)
