"""Writing results to files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffnet.data.labeled import UNLABELED, LabelsAt
from diffnet.geometry import mesh_edges
from diffnet.train.report.palette import colorize
from diffnet.train.report.render import check_labeled


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file, text as UTF-8, so that at no time a half-written one stands under its name."""
    path = Path(path)
    # Written by hand rather than by tempfile, whose files nobody else may read.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """A picture (H, W, 3) as a PNG file's content."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="png", optimize=True)
    return out.getvalue()


def write_ply(path: str | os.PathLike[str], verts: Any, faces: Any, labels: Any, at: LabelsAt = "vertices") -> None:
    """Write a mesh or point cloud as a binary PLY file, colored by its labels and holding them as a property `label`.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    labels: (V,), (F,) or (E,) integers, according to `at`; edges are numbered as `mesh_edges` does

    Color and label stand on the vertices or, for labels at faces, on the faces. Few programs show edges, so labels at
    edges are written to the vertices, each taking the most frequent label of its edges (the smallest such, where
    several are; unlabeled edges count only where there is no other).
    Raises ValueError where shapes don't fit.
    """
    verts, faces, labels = check_labeled(verts, faces, labels, at)
    if at == "edges":
        labels = _most_frequent_at_vertices(mesh_edges(faces), labels, len(verts))
    vertex_columns = [("position", verts.astype("<f8"))]
    face_columns = [("count", np.full(len(faces), 3, "u1")), ("corners", faces.astype("<i4"))]
    label_columns = [("color", colorize(labels)), ("label", labels.astype("<i4"))]
    label_header = ["property uchar red", "property uchar green", "property uchar blue", "property int label"]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(verts)}"]
    header += ["property double x", "property double y", "property double z"]
    if at != "faces":
        header += label_header
        vertex_columns += label_columns
    if len(faces):
        header += [f"element face {len(faces)}", "property list uchar int vertex_indices"]
    if at == "faces":
        header += label_header
        face_columns += label_columns
    text = "\n".join([*header, "end_header", ""])
    write_atomically(path, text.encode("ascii") + _rows(vertex_columns) + _rows(face_columns))


def _rows(columns: list[tuple[str, NDArray[Any]]]) -> bytes:
    """Columns of equal length, each of one or several values a row, written row by row without gaps."""
    table = np.empty(len(columns[0][1]), [(name, column.dtype, column.shape[1:]) for name, column in columns])
    for name, column in columns:
        table[name] = column
    return table.tobytes()


def _most_frequent_at_vertices(edges: NDArray[np.int64], labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """For each of `count` vertices the most frequent label (count,) of its edges (E, 2); UNLABELED where none."""
    labeled = labels >= 0
    ends = edges[labeled].ravel()
    pairs, votes = np.unique(np.stack([ends, np.repeat(labels[labeled], 2)], axis=1), axis=0, return_counts=True)
    # The last of a vertex's pairs wins below: the one with most votes and, among equals, the smallest label.
    order = np.lexsort((-pairs[:, 1], votes))
    out = np.full(count, UNLABELED)
    out[pairs[order, 0]] = pairs[order, 1]
    return out
