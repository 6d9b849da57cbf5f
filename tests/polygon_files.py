"""A mesh of a triangle, a quadrilateral and a triangle for the tests of file formats: write, read and check it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffnet.geometry import MeshError, load_mesh

VERTS = [[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]
POLYGONS = [[1, 4, 2], [0, 1, 4, 2], [0, 1, 3]]
FAN = [[1, 4, 2], [0, 1, 4], [0, 4, 2], [0, 1, 3]]  # the triangles of the three polygons
SOURCE = [0, 1, 1, 2]


def ascii_stl(triangles: Any) -> str:
    corners = ("".join(f"vertex {' '.join(map(str, corner))}\n" for corner in t) for t in triangles)
    facets = "".join(f"facet normal 0 0 1\nouter loop\n{each}endloop\nendfacet\n" for each in corners)
    return f"solid name\n{facets}endsolid name\n"


def binary_stl(triangles: Any, header: bytes = b"solid of a binary file") -> bytes:
    body = b"".join(struct.pack("<12fH", 0, 0, 0, *np.ravel(t), 0) for t in triangles)
    return header.ljust(80) + struct.pack("<I", len(triangles)) + body


def lines(rows: Any, lead: str = "") -> str:
    return "".join(lead + " ".join(map(str, row)) + "\n" for row in rows)


def written(form: str, verts: Any, faces: Any) -> str:
    """The text of a file with these vertices and polygons. Words in place of numbers stay. form: a key of FORMS"""
    points, polygons = lines(verts), lines([len(f), *f] for f in faces or [])
    if form in ("obj", "negative obj"):
        first = 1 if form == "obj" else -len(verts)
        rows = ([i + first if isinstance(i, int) else i for i in f] for f in faces)
        return lines(verts, "v ") + lines(rows, "f ")
    if form == "off":
        return f"OFF\n{len(verts)} {len(faces)} 0\n{points}{polygons}"
    if form == "ply":
        corners = "" if faces is None else f"element face {len(faces)}\nproperty list uchar int vertex_indices\n"
        properties = "".join(f"property float {axis}\n" for axis in "xyz")
        head = f"ply\nformat ascii 1.0\ncomment of\nelement vertex {len(verts)}\n{properties}{corners}end_header\n"
        return head + points + polygons
    size = len(faces) + sum(map(len, faces))
    kind, name, types = (
        ("POLYDATA", "POLYGONS", "") if form == "vtk" else ("UNSTRUCTURED_GRID", "CELLS", "7\n" * len(faces))
    )
    head = f"# vtk DataFile Version 3.0\nx\nASCII\nDATASET {kind}\nPOINTS {len(verts)} float\n"
    return f"{head}{points}{name} {len(faces)} {size}\n{polygons}" + (
        f"CELL_TYPES {len(faces)}\n{types}" if types else ""
    )


FORMS = {"obj": ".obj", "negative obj": ".obj", "off": ".off", "ply": ".ply", "vtk": ".vtk", "vtk grid": ".vtk"}


def read(path: Path, data: str | bytes, cache: Path | None = None) -> Any:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load_mesh(path, cache)


def check(mesh: Any) -> None:
    np.testing.assert_array_equal(mesh.verts, VERTS)
    np.testing.assert_array_equal(mesh.faces, FAN)
    np.testing.assert_array_equal(mesh.polygons, SOURCE)
    assert mesh.polygon_count == 3
    assert mesh.verts.dtype == np.float64
    assert mesh.faces.dtype == mesh.polygons.dtype == np.int64


def refused(path: Path, data: str | bytes, message: str) -> str:
    """The file is refused with one line that begins with its path. Returns the line."""
    with pytest.raises(MeshError, match=message) as e:
        read(path, data)
    line = str(e.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line
