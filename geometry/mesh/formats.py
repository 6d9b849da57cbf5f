"""Strict readers of obj, off, ply, stl, glb, gltf, vtk, vtp and vtu files.

Vertices and polygons must keep their order, because labels are stored beside a file in that order. A damaged file must
be refused. plyfile does this for ply. trimesh reads stl and glTF, after checks. VTK reads vtk, vtp and vtu, in its own
process. No library does it for obj and off, which are simple text formats and are parsed here: trimesh splits vertices
along texture seams, reorders polygons of mixed sizes and accepts truncated off files; potpourri3d reads words as 0 and
refuses negative indices and one-line headers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from plyfile import PlyData, PlyParseError

from diffnet.geometry.mesh.content import is_binary_stl, stl_count
from diffnet.geometry.mesh.gltf import read_gltf
from diffnet.geometry.mesh.normals import mean_normals, unit_normals
from diffnet.geometry.mesh.vtk_files import read_vtk

T = TypeVar("T")
Line: TypeAlias = "tuple[int, str]"


class Content(NamedTuple):
    """The content of a mesh file.

    verts: (V, 3)
    sizes: (P,) the number of corners of each polygon
    corners: the vertex indices of all corners, from 0
    normals: (V, 3) at the vertices, not checked; None if the file has none
    """

    verts: NDArray[np.float64]
    sizes: NDArray[np.int64]
    corners: NDArray[np.int64]
    normals: NDArray[np.float64] | None = None


def parse(data: bytes, suffix: str) -> Content:
    """The content of a mesh file.

    suffix: the format, a key of READERS

    Indices and normals aren't checked. Raises ValueError if the content doesn't parse; the message says where.
    """
    if not data.strip():
        raise ValueError("the file is empty")
    try:
        return Content(*READERS[suffix](data))
    except OverflowError as e:
        raise ValueError("an index is beyond 64 bits") from e


def mentions_normals(data: bytes, suffix: str) -> bool:
    """Whether the content may hold normals at the vertices. Files without the names of normals hold none."""
    if suffix == ".ply":
        return b" nx" in data[: max(data.find(b"end_header"), 0)]
    return suffix == ".obj" and b"vn" in data


def _read_obj(data: bytes) -> Content:
    verts: list[list[float]] = []
    polygons: list[list[int]] = []
    normals: list[list[float]] = []
    references: list[tuple[int, str]] = []  # of corners: the number of normals before, and the corner's word
    text = _text(data).replace("\\\n", " ")
    has_normals = _OBJ_NORMAL.search(text) is not None

    def read(words: list[str]) -> None:
        if words[0] == "v":
            verts.append(_point(words[1:]))
        elif words[0] == "f":
            polygons.append([corner(word) for word in words[1:]])
            if has_normals:
                references.extend((len(normals), word) for word in words[1:])
        elif words[0] == "vn":
            normals.append(_point(words[1:], "normal"))

    def corner(word: str) -> int:
        index = int(word.split("/", 1)[0])
        if index == 0 or index < -len(verts):
            raise ValueError(f"index {index} after {len(verts)} vertices (the first is 1, the last is -1)")
        return index - 1 if index > 0 else len(verts) + index

    _read_lines(_lines(text), read)
    if not verts:
        raise ValueError("the mesh is empty: no line begins with 'v', as the vertices of an OBJ file do")
    content = _content(verts, polygons)
    return content._replace(normals=_obj_normals(content, normals, references))


_OBJ_NORMAL = re.compile(r"^[ \t]*vn[ \t]", re.MULTILINE)


def _obj_normals(
    content: Content, normals: list[list[float]], references: list[tuple[int, str]]
) -> NDArray[np.float64] | None:
    """The normals (V, 3) of an OBJ file at the vertices, 0 where there is none.

    Corners name them (``1//3`` or ``1/2/3``), and a vertex gets the mean of those at its corners. If no corner names a
    normal, as in a point cloud, and there are as many as vertices, they are those of the vertices in order.
    """
    unit = unit_normals(np.array(normals, np.float64).reshape(-1, 3))
    if unit is None:
        return None
    count = len(content.verts)
    places = np.array([_normal_index(word, before) for before, word in references], np.int64)
    named = (places >= 0) & (places < len(unit))
    if named.any():
        return mean_normals(unit[places[named]], content.corners[named], count)
    return unit if len(unit) == count else None


def _normal_index(word: str, before: int) -> int:
    """The normal of a corner, from 0; -1 if the corner names none."""
    parts = word.split("/")
    if len(parts) < 3 or not parts[2]:
        return -1
    index = int(parts[2])
    return index - 1 if index > 0 else before + index


OFF_HEADER = re.compile(r"((?:ST)?C?N?OFF|c?off|Off)(\d.*)?")


def _read_off(data: bytes) -> Content:
    lines = _lines(_text(data))
    words = lines.pop(0)[1].split("#", 1)[0].split() if lines else [""]
    header = OFF_HEADER.fullmatch(words[0])
    if header is None:
        raise ValueError(f"the header should be OFF, got {words[0][:20]!r}")
    if header[2]:
        words[:1] = header[1], header[2]  # OFF3514 3546 0: many files of ModelNet begin like this
    if len(words) == 1:
        if not lines:
            raise ValueError("the file ends after its header")
        words += lines.pop(0)[1].split()
    if words[1].upper() == "BINARY":
        raise ValueError("binary OFF is not supported. Save the mesh as text")
    if len(words) < 3 or not (words[1].isdecimal() and words[2].isdecimal()):
        raise ValueError(f"the header should give the numbers of vertices and faces, got {' '.join(words[1:])[:60]!r}")
    if max(len(words[1]), len(words[2])) > 18:
        raise ValueError(f"the header declares more than 10^18 vertices or faces, but {len(lines)} lines follow")
    vertices, faces = int(words[1]), int(words[2])
    if len(lines) < vertices + faces:
        raise ValueError(f"{vertices} vertices and {faces} faces are declared, but {len(lines)} lines follow")
    verts, polygons = lines[:vertices], lines[vertices : vertices + faces]
    points = _table(verts, np.float64, 3)
    triangles = _table(polygons, np.int64, 4)
    if points is not None and triangles is not None and (triangles[:, 0] == 3).all():
        return Content(points, triangles[:, 0], triangles[:, 1:].reshape(-1))
    # Parse line by line, because polygons have other sizes or a line is wrong and the message must name it.
    return _content(_read_lines(verts, _point), _read_polygons(lines[vertices:], faces))


def _read_polygons(lines: list[Line], count: int) -> list[list[int]]:
    """The first `count` polygons. A polygon may span several lines. It then ends at the end of a line.

    A polygon on one line may have a color after its corners.
    """
    polygons: list[list[int]] = []
    ahead = iter(lines)

    def read(words: list[str]) -> list[int]:
        size = int(words[0])
        if 0 < len(words) - 1 < size or (size > 0 and len(words) == 1):
            numbers = list(map(int, words))  # names a wrong word before the next lines are read
            while len(numbers) - 1 < size and (line := next(ahead, None)) is not None:
                more = [int(word) for word in line[1].split("#", 1)[0].split()]
                if len(numbers) - 1 + len(more) > size:
                    break
                numbers += more
            return _polygon(list(map(str, numbers)))
        return _polygon(words)

    while len(polygons) < count:
        line = next(ahead, None)
        if line is None:
            raise ValueError(f"{count} faces are declared, but the file ends after {len(polygons)}")
        polygons += _read_lines([line], read)
    return polygons


PLY_CORNERS = ("vertex_indices", "vertex_index")


_PLY_ELEMENT = re.compile(rb"(?:^|[\r\n])element[ \t]+(\S+)[ \t]+(\d+)")


def read_ply_elements(data: bytes) -> dict[str, Any]:
    """The rows of each element of a PLY file, structured arrays. Raises ValueError for a damaged file."""
    for what, count in _PLY_ELEMENT.findall(data[: max(data.find(b"end_header"), 0)]):
        # plyfile allocates the rows before it reads them.
        if len(count) > 18 or int(count) > len(data):
            raise ValueError(
                f"its header declares {count.decode()[:30]} rows of element {what.decode(errors='replace')[:30]!r}, "
                f"more than {len(data)} bytes can hold; the header is damaged, or the file is cut off"
            )
    try:
        return {element.name: element.data for element in PlyData.read(io.BytesIO(data)).elements}
    except PlyParseError as e:
        raise ValueError(str(e)) from e


def _read_ply(data: bytes) -> Content:
    elements = read_ply_elements(data)
    if "vertex" not in elements or not {"x", "y", "z"} <= set(elements["vertex"].dtype.names):
        raise ValueError("there is no element 'vertex' with properties x, y and z")
    verts = _columns(elements["vertex"], ("x", "y", "z"))
    names = ("nx", "ny", "nz")
    normals = _columns(elements["vertex"], names) if set(names) <= set(elements["vertex"].dtype.names) else None
    if len(elements.get("tristrips", ())):
        raise ValueError("triangle strips are not supported")
    faces = elements.get("face", np.zeros(0))
    if len(faces) == 0:
        return Content(verts, np.zeros(0, np.int64), np.zeros(0, np.int64), normals)
    found = [faces[name] for name in PLY_CORNERS if name in faces.dtype.names]
    if not found or found[0].dtype != object or found[0][0].dtype.kind not in "iu":
        raise ValueError(f"faces have no list of integers named {' or '.join(PLY_CORNERS)}")
    sizes = np.fromiter((len(polygon) for polygon in found[0]), np.int64, len(found[0]))
    return Content(verts, sizes, np.concatenate(found[0]).astype(np.int64), normals)


def _columns(rows: NDArray[Any], names: Sequence[str]) -> NDArray[np.float64]:
    return np.stack([rows[name].astype(np.float64) for name in names], axis=1)


def _read_stl(data: bytes) -> Content:
    """STL has three vertices for each triangle. Triangles share none."""
    import trimesh  # imported here because it takes a quarter of a second

    binary = is_binary_stl(data)
    content, count = (data, stl_count(data)) if binary else _check_ascii_stl(data)
    if count == 0:
        return Content(np.zeros((0, 3)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    try:
        triangles = trimesh.load_mesh(io.BytesIO(content), file_type="stl", process=False).triangles
    except Exception as e:  # trimesh doesn't check what it reads, so damage can cause any error
        raise ValueError(f"{_DAMAGED_STL} ({type(e).__name__}: {e})") from e
    if len(triangles) != count:
        raise ValueError(f"{_DAMAGED_STL}: only {len(triangles)} of {count} triangles can be read")
    verts = np.array(triangles, np.float64).reshape(-1, 3)
    return Content(verts, np.full(len(triangles), 3), np.arange(len(verts)))


_DAMAGED_STL = "not an STL file, or a damaged one"


def _check_ascii_stl(data: bytes) -> tuple[bytes, int]:
    """The text of an ASCII STL file in UTF-8, and its number of triangles. Raises ValueError for another file."""
    text = _text(data)
    lower = text.lower()
    corners, ends, solids = (lower.count(word) for word in ("vertex", "endfacet", "endsolid"))
    facets = lower.count("facet") - ends
    if facets != ends or corners != 3 * facets:  # perhaps the solid's name has one of these words
        facets, corners, ends, solids = (
            len(re.findall(rf"^[ \t]*{word}\b", lower, re.MULTILINE))
            for word in ("facet", "vertex", "endfacet", "endsolid")
        )
    if lower.lstrip()[:5] != "solid" or facets + ends + solids == 0:
        if len(data) < 84:
            raise ValueError(f"{_DAMAGED_STL}: {len(data)} bytes that don't begin with 'solid'")
        expected = 84 + 50 * stl_count(data)
        raise ValueError(
            f"{_DAMAGED_STL}: its binary header declares {stl_count(data)} triangles in {expected} bytes, but the file "
            f"has {len(data)} bytes. Save or download it again"
        )
    if facets != ends or corners != 3 * facets or solids == 0:
        raise ValueError(
            f"{_DAMAGED_STL}: {facets} facets begin, {ends} end, they have {corners} vertices, and {solids} lines say "
            "endsolid. Save or download it again"
        )
    return text.encode(), facets


def _read_gltf(data: bytes) -> Content:
    verts, faces = read_gltf(data)
    return Content(verts, np.full(len(faces), 3), faces.reshape(-1))


READERS: dict[str, Callable[[bytes], tuple[Any, ...]]] = {
    ".obj": _read_obj,
    ".off": _read_off,
    ".ply": _read_ply,
    ".stl": _read_stl,
    ".glb": _read_gltf,
    ".gltf": _read_gltf,
    ".vtk": read_vtk,
    ".vtp": read_vtk,
    ".vtu": read_vtk,
}


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def mesh_lines(data: bytes) -> list[Line]:
    """The lines of an OBJ or OFF file that hold more than a comment, with their numbers. Continued lines are joined."""
    return _lines(_text(data).replace("\\\n", " "))


def _lines(text: str) -> list[Line]:
    """The lines that hold more than a comment, with their numbers."""
    numbered = enumerate(text.split("\n"), 1)
    return [(number, words) for number, line in numbered if (words := line.lstrip()) and words[0] != "#"]


def _read_lines(lines: Iterable[Line], read: Callable[[list[str]], T]) -> list[T]:
    """The results of `read` for the words of each line. Errors name the line."""
    results = []
    for number, line in lines:
        try:
            results.append(read(line.split("#", 1)[0].split()))
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from e
    return results


def _table(lines: Sequence[Line], dtype: type, columns: int) -> NDArray[Any] | None:
    """The first columns of lines that hold only numbers, parsed by NumPy. None if a line holds something else."""
    if not lines:
        return np.zeros((0, columns), dtype)
    try:
        return np.loadtxt([line for _, line in lines], dtype, usecols=range(columns), ndmin=2)
    except ValueError:
        return None


def _point(words: list[str], what: str = "vertex") -> list[float]:
    point = [float(word) for word in words[:3]]
    if len(point) < 3:
        raise ValueError(f"a {what} with {len(point)} coordinates")
    return point


def _polygon(words: list[str]) -> list[int]:
    """The corners. The first word is their number; words after the corners are a color."""
    count = int(words[0])
    corners = [int(word) for word in words[1 : 1 + max(count, 0)]]
    if len(corners) != count:
        raise ValueError(f"a list of {count} with {len(corners)} items")
    return corners


def _content(verts: list[list[float]], polygons: list[list[int]]) -> Content:
    sizes = np.array([len(polygon) for polygon in polygons], np.int64)
    corners = np.array([corner for polygon in polygons for corner in polygon], np.int64)
    return Content(np.array(verts, np.float64).reshape(-1, 3), sizes, corners)
