"""Files of small data sets, and what was read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plyfile import PlyData, PlyElement

from diffnet.data import LabeledMesh

Shape = tuple[Sequence[tuple[float, ...]], Sequence[tuple[int, ...]]]  # vertices and polygons

# A fan (5 vertices, 3 triangles, 7 edges), a tetrahedron (4 and 4), and two quads with a triangle between them
# (7 vertices, 3 polygons, 5 triangles).
FAN: Shape = ([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (-1, 0, 0)], [(0, 1, 2), (0, 2, 3), (0, 3, 4)])
TETRAHEDRON: Shape = ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)], [(0, 2, 1), (0, 1, 3), (1, 2, 3), (2, 0, 3)])
MIXED: Shape = (
    [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0)],
    [(0, 1, 2, 3), (1, 4, 2), (4, 5, 6, 2)],
)


def mesh_text(mesh: Shape, suffix: str) -> str:
    """The content of an OBJ or STL file, else of an OFF file."""
    verts, faces = mesh
    if suffix == ".stl":
        corners = [[f"vertex {' '.join(map(str, verts[i]))}" for i in f] for f in faces]
        facets = ["facet normal 0 0 1\nouter loop\n" + "\n".join(c) + "\nendloop\nendfacet" for c in corners]
        return "solid s\n" + "\n".join(facets) + "\nendsolid s\n"
    obj = suffix == ".obj"
    rows = [] if obj else [f"OFF\n{len(verts)} {len(faces)} 0"]
    rows += [" ".join(map(str, ["v"] * obj + [*v])) for v in verts]
    rows += [" ".join(map(str, ["f", *(i + 1 for i in f)] if obj else [len(f), *f])) for f in faces]
    return "\n".join(rows) + "\n"


def write(root: Path, files: Mapping[str, Any]) -> Path:
    """Write files, by path below `root`: text, a mesh (by its extension), labels, or an array. None is left out."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(file, content)
        elif isinstance(content, list):
            file.write_text("\n".join(map(str, content)))
        elif content is not None:
            text = mesh_text(content, file.suffix.lower()) if isinstance(content, tuple) else content
            file.write_text(text, encoding="utf-8")
    return root


def write_ply(path: Path, vertex: Any = (), face: Any = (), text: bool = False, mesh: Any = FAN) -> None:
    """A triangle mesh with properties at its vertices and faces: pairs of a name and an array."""
    verts, faces = (np.array(part) for part in mesh)
    columns = [(name, verts[:, i].astype("f8")) for i, name in enumerate("xyz")]
    tables = []
    for kind, rows, own in (("vertex", len(verts), [*columns, *vertex]), ("face", len(faces), face)):
        corners = [("vertex_indices", "i4", (3,))] * (kind == "face")
        table = np.zeros(rows, [*corners, *((name, values.dtype.str) for name, values in own)])
        for name, values in [*((c[0], faces) for c in corners), *own]:
            table[name] = values
        tables.append(PlyElement.describe(table, kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    PlyData(tables, text=text).write(path)


def names(items: Sequence[LabeledMesh]) -> list[str]:
    return [item.name for item in items]


def parts(data: Any) -> tuple[list[str], list[str], list[str]]:
    """The names of the meshes for training, validation and testing."""
    return names(data.train), names(data.validation), names(data.test)


def by_name(data: Any) -> dict[str, list[int]]:
    """The labels of all meshes."""
    return {item.name: item.labels.tolist() for item in (*data.train, *data.test)}


def same_items(items: Sequence[LabeledMesh], others: Sequence[LabeledMesh]) -> None:
    """Both have the same meshes with the same labels."""
    assert names(items) == names(others)
    for item, other in zip(items, others, strict=True):
        np.testing.assert_array_equal(item.labels, other.labels)
        np.testing.assert_array_equal(item.mesh.verts, other.mesh.verts)
        np.testing.assert_array_equal(item.mesh.faces, other.mesh.faces)
