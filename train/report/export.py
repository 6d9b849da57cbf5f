"""Writing results to files, and filling the templates of pages."""

from __future__ import annotations

import io
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffnet.data.labeled import UNLABELED, LabelsAt
from diffnet.geometry import mesh_edges
from diffnet.train.report.palette import colorize
from diffnet.train.report.surface import check_labeled


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file, text as UTF-8. Under its name there is always a complete file: the old one or the new one.

    Raises OSError, which names the file, for example if the disk is full.
    """
    path = Path(path)
    # Files made by the module tempfile can be read by their owner only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as e:  # a failed write names no file, and others name the temporary one
        raise named(e, path) from e
    finally:
        temporary.unlink(missing_ok=True)


def named(error: OSError, path: Path) -> OSError:
    """The same error with the name of a file, as the user knows it."""
    return type(error)(error.errno, error.strerror or str(error), str(path))


def fill_template(name: str, **fields: str) -> str:
    """The template `name` of this package, with each {{field}} replaced by its value. Values are inserted as they are.

    Replaced text is not searched again, so a value may hold braces.
    """
    template = resources.files("diffnet.train.report").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], template)


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """The content of a PNG file that holds a picture (H, W, 3)."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="png")  # optimize=True takes three times as long and saves 2 %
    return out.getvalue()


def write_ply(path: str | os.PathLike[str], verts: Any, faces: Any, labels: Any, at: LabelsAt = "vertices") -> None:
    """Write a labeled mesh or point cloud as a binary PLY file, with a color and a property `label` per element.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    labels: (V,), (F,) or (E,) integers, according to `at`. Edges are in the order of `mesh_edges`.

    Labels at faces are written to the faces, all others to the vertices. Few programs show edges, so each vertex takes
    the most frequent label of its edges. The smallest label wins a tie. A vertex is unlabeled only if all its edges
    are.

    Raises ValueError for shapes that do not fit.
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
    """The bytes of a table, row by row without gaps. Each column has one or several values per row."""
    table = np.empty(len(columns[0][1]), [(name, column.dtype, column.shape[1:]) for name, column in columns])
    for name, column in columns:
        table[name] = column
    return table.tobytes()


def _most_frequent_at_vertices(edges: NDArray[np.int64], labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The most frequent label (count,) of the edges (E, 2) at each of `count` vertices. UNLABELED if there is none."""
    labeled = labels >= 0
    ends = edges[labeled].ravel()
    pairs, votes = np.unique(np.stack([ends, np.repeat(labels[labeled], 2)], axis=1), axis=0, return_counts=True)
    # The assignment below keeps the last pair of a vertex: most votes, then the smallest label.
    order = np.lexsort((-pairs[:, 1], votes))
    out = np.full(count, UNLABELED)
    out[pairs[order, 0]] = pairs[order, 1]
    return out
