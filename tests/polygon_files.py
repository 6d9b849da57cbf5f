"""A mesh of a triangle, a quadrilateral and a triangle, as the tests of file formats write it, and how they read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffnet.geometry import MeshError, load_mesh

VERTS = [[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]
FAN = [[1, 4, 2], [0, 1, 4], [0, 4, 2], [0, 1, 3]]  # the triangles of the three polygons
SOURCE = [0, 1, 1, 2]


def read(path: Path, data: str | bytes, cache: Path | None = None) -> Any:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load_mesh(path, cache)


def check(mesh: Any) -> None:
    np.testing.assert_array_equal(mesh.verts, VERTS)
    np.testing.assert_array_equal(mesh.faces, FAN)
    np.testing.assert_array_equal(mesh.polygons, SOURCE)
    assert mesh.polygon_count == 3


def refused(path: Path, data: str | bytes, message: str) -> str:
    """The file is refused with one line that begins with its path. Returns the line."""
    with pytest.raises(MeshError, match=message) as e:
        read(path, data)
    line = str(e.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line
