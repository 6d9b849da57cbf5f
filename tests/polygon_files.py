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
