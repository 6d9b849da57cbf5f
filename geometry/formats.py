"""Strict readers of obj, off, ply and stl files.

Labels stored beside a file need every vertex and polygon where it stood, and a damaged file must not pass for a mesh.
plyfile reads ply and trimesh reads stl. For obj and off there is no such library: trimesh splits vertices along texture
seams, reorders polygons of mixed size and takes a truncated off file; potpourri3d reads words as 0 and refuses negative
indices and one-line headers. Both formats are a few lines of words.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import trimesh
from numpy.typing import NDArray
from plyfile import PlyData, PlyParseError

Content: TypeAlias = "tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]"


def read_file(path: Path) -> Content:
    """Vertices (V, 3), the number of corners of each polygon (P,) and the corners one after another, from 0.

    Indices aren't checked. Raises ValueError where the content doesn't parse, saying where.
    """
    data = path.read_bytes()
    if not data.strip():
        raise ValueError("the file is empty")
    try:
        return READERS[path.suffix.lower()](data)
    except OverflowError as e:
        raise ValueError("an index is beyond 64 bits") from e


def _read_obj(data: bytes) -> Content:
    verts: list[list[float]] = []
    sizes: list[int] = []
    corners: list[int] = []

    def read(words: list[str]) -> None:
        if words[0] == "v":
            verts.append(_point(words[1:]))
        elif words[0] == "f":
            sizes.append(len(words) - 1)
            for word in words[1:]:
                index = int(word.split("/", 1)[0])
                if index == 0 or index < -len(verts):
                    raise ValueError(f"index {index} after {len(verts)} vertices (the first is 1, the last is -1)")
                corners.append(index - 1 if index > 0 else len(verts) + index)

    _each(_lines(_text(data).replace("\\\n", " ")), read)
    return _content(verts, sizes, corners)


def _read_off(data: bytes) -> Content:
    lines = list(_lines(_text(data)))
    verts: list[list[float]] = []
    sizes: list[int] = []
    corners: list[int] = []
    counts: list[int] = []

    def read_counts(words: list[str]) -> None:
        counts.extend(int(word) for word in words[:2])
        if len(counts) < 2 or min(counts) < 0:
            raise ValueError(f"the numbers of vertices and faces should be here, got {' '.join(words)!r}")

    def read_polygon(words: list[str]) -> None:
        polygon = [int(word) for word in _counted(words, 0)]
        corners.extend(polygon)
        sizes.append(len(polygon))

    header = lines.pop(0)[1] if lines else [""]
    if not re.fullmatch("(ST)?C?N?OFF", header[0]):
        raise ValueError(f"the header should be OFF, got {header[0][:20]!r}")
    if len(header) > 1:  # the counts stand behind OFF
        lines.insert(0, (1, header[1:]))
    if not lines:
        raise ValueError("the file ends after its header")
    _each([lines.pop(0)], read_counts)
    vertices, faces = counts
    if len(lines) < vertices + faces:
        raise ValueError(f"{vertices} vertices and {faces} faces are declared, but {len(lines)} lines follow")
    _each(lines[:vertices], lambda words: verts.append(_point(words)))
    _each(lines[vertices : vertices + faces], read_polygon)
    return _content(verts, sizes, corners)


PLY_CORNERS = ("vertex_indices", "vertex_index")


def _read_ply(data: bytes) -> Content:
    try:
        elements = {element.name: element.data for element in PlyData.read(io.BytesIO(data)).elements}
    except PlyParseError as e:
        raise ValueError(str(e)) from e
    if "vertex" not in elements or not {"x", "y", "z"} <= set(elements["vertex"].dtype.names):
        raise ValueError("there is no element 'vertex' with properties x, y and z")
    verts = np.stack([elements["vertex"][axis].astype(np.float64) for axis in "xyz"], axis=1)
    if len(elements.get("tristrips", ())):
        raise ValueError("triangle strips are not supported")
    faces = elements.get("face", np.zeros(0))
    if len(faces) == 0:
        return verts, np.zeros(0, np.int64), np.zeros(0, np.int64)
    found = [faces[name] for name in PLY_CORNERS if name in faces.dtype.names]
    if not found or found[0].dtype != object or found[0][0].dtype.kind not in "iu":
        raise ValueError(f"faces have no list of integers named {' or '.join(PLY_CORNERS)}")
    sizes = np.fromiter((len(polygon) for polygon in found[0]), np.int64, len(found[0]))
    return verts, sizes, np.concatenate(found[0]).astype(np.int64)


def _read_stl(data: bytes) -> Content:
    """Three vertices for each triangle; nothing is shared."""
    try:
        triangles = trimesh.load_mesh(io.BytesIO(data), file_type="stl", process=False).triangles
    except Exception as e:  # whatever a parser of fixed fields meets: struct.error, IndexError, HeaderError …
        raise ValueError(f"not an STL file, or a damaged one ({type(e).__name__}: {e})") from e
    verts = np.array(triangles, np.float64).reshape(-1, 3)
    return verts, np.full(len(triangles), 3), np.arange(len(verts))


READERS: dict[str, Callable[[bytes], Content]] = {
    ".obj": _read_obj,
    ".off": _read_off,
    ".ply": _read_ply,
    ".stl": _read_stl,
}


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each line that has any, without comments, with its number."""
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split("#", 1)[0].split()
        if words:
            yield number, words


def _each(lines: Iterable[tuple[int, list[str]]], read: Callable[[list[str]], None]) -> None:
    """Read line by line; errors name the line."""
    for number, words in lines:
        try:
            read(words)
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from e


def _point(words: list[str]) -> list[float]:
    point = [float(word) for word in words[:3]]
    if len(point) < 3:
        raise ValueError(f"a vertex with {len(point)} coordinates")
    return point


def _counted(words: list[str], position: int) -> list[str]:
    """The items of a list with its length in front."""
    count = int(words[position]) if position < len(words) else -1
    items = words[position + 1 : position + 1 + count] if count >= 0 else []
    if len(items) != count:
        raise ValueError(f"a list of {count} with {len(items)} items")
    return items


def _content(verts: list[list[float]], sizes: list[int], corners: list[int]) -> Content:
    return np.array(verts, np.float64).reshape(-1, 3), np.array(sizes, np.int64), np.array(corners, np.int64)
