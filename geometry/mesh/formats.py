"""Strict readers of obj, off, ply, stl, glb, gltf, vtk, vtp and vtu files, one row of READERS for each.

Vertices and polygons must keep their order, because labels are stored beside a file in that order. A damaged file must
be refused, whatever the versions of other packages are, in memory that is a small multiple of the file. pyvista reads
vtk, vtp and vtu, in its own process. No library does it for the others, which are simple and are parsed here: trimesh
splits vertices along texture seams, reorders polygons of mixed sizes, accepts truncated off files and copies the
vertices that parts of glTF files share; potpourri3d reads words as 0 and refuses negative indices and one-line headers.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.content import is_binary_stl, stl_count
from diffnet.geometry.mesh.cortex import FREESURFER, read_freesurfer, read_gifti
from diffnet.geometry.mesh.gltf import read_gltf, read_gltf_attributes
from diffnet.geometry.mesh.objects import mean_normals, unit_normals
from diffnet.geometry.mesh.ply import Columns, Lists, read_ply
from diffnet.geometry.mesh.text import (
    Line,
    integer,
    lines_with_content,
    numbered_lines,
    real,
    table,
    whole_table,
    without_comments,
)
from diffnet.geometry.mesh.vtk import read_vtk, read_vtk_arrays

NO_POLYGONS = "it holds {}, expected polygons. For a point cloud, save the points alone"
_OBJ_CURVES = {"l": "lines", "curv": "curves", "curv2": "curves", "surf": "free-form surfaces"}
_OBJ_NORMAL = re.compile(rb"^[ \t]*vn[ \t]", re.MULTILINE)
_OFF_HEADER = re.compile(r"((?:ST)?C?N?OFF|c?off|Off)(\d.*)?")
PLY_CORNERS = ("vertex_indices", "vertex_index")
_STL_TRIANGLE = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
_DAMAGED_STL = "not an STL file, or a damaged one"
_PLY_COLORS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"), ("r", "g", "b"))


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


@dataclass(frozen=True)
class Attributes:
    """Colors and properties of a mesh file, in the file's order.

    colors: (V, 3) float64 from 0 to 1 at the vertices, or None
    face_colors: (P, 3) the same at the polygons
    vertices: by name, the numbers of each property of the vertices, (V,) or (V, C), with the file's dtype
    faces: the same for the polygons, (P,) or (P, C)
    face_names: by "groups" and "materials", the name (P,) of the group or the material of each polygon of an OBJ file,
        empty where it has none
    fields: by name, the field data of a VTK file: numbers of the whole mesh, of any shape
    """

    colors: NDArray[np.float64] | None = None
    face_colors: NDArray[np.float64] | None = None
    vertices: dict[str, NDArray[Any]] = field(default_factory=dict)
    faces: dict[str, NDArray[Any]] = field(default_factory=dict)
    face_names: dict[str, NDArray[np.str_]] = field(default_factory=dict)
    fields: dict[str, NDArray[Any]] = field(default_factory=dict)


def parse(data: bytes, suffix: str) -> Content:
    """The content of a mesh file.

    suffix: the format, a key of READERS

    Indices and normals aren't checked. Raises ValueError if the content doesn't parse; the message says where.
    """
    if not data.strip():
        raise ValueError("the file is empty")
    try:
        return Content(*READERS[suffix].mesh(data))
    except OverflowError as e:
        raise ValueError("an index is beyond 64 bits") from e


def _read_obj(data: bytes) -> Content:
    verts, normals, sizes, corners = array("d"), array("d"), array("q"), array("q")
    named = array("q")  # the normals of corners, from 0; -1 where a corner names none
    others: set[str] = set()  # what the file has besides polygons
    has_normals = _OBJ_NORMAL.search(data) is not None

    def read(words: list[str]) -> None:
        if words[0] == "v":
            verts.extend(_point(words[1:]))
        elif words[0] == "f":
            sizes.append(len(words) - 1)
            corners.extend([corner(word) for word in words[1:]])
            if has_normals:
                named.extend([_normal_index(word, len(normals) // 3) for word in words[1:]])
        elif words[0] == "vn":
            normals.extend(_point(words[1:], "normal"))
        elif words[0] in _OBJ_CURVES:
            others.add(_OBJ_CURVES[words[0]])

    def corner(word: str) -> int:
        index = integer(word.split("/", 1)[0])
        if index > 0:
            return index - 1
        before = len(verts) // 3
        if index == 0 or index < -before:
            raise ValueError(f"index {index} after {before} vertices (the first is 1, the last is -1)")
        return before + index

    _read_lines(without_comments(numbered_lines(data, continued=True)), read)
    if not verts:
        raise ValueError("the mesh is empty: no line begins with 'v', as the vertices of an OBJ file do")
    if others and not sizes:
        raise ValueError(NO_POLYGONS.format(" and ".join(sorted(others))))
    content = Content(np.array(verts).reshape(-1, 3), np.array(sizes), np.array(corners))
    return content._replace(normals=_obj_normals(content, np.array(normals).reshape(-1, 3), np.array(named)))


def _obj_normals(
    content: Content, normals: NDArray[np.float64], named: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """The normals (V, 3) of an OBJ file at the vertices, 0 where there is none.

    Corners name them (``1//3`` or ``1/2/3``), and a vertex gets the mean of those at its corners. If no corner names a
    normal, as in a point cloud, and there are as many as vertices, they are those of the vertices in order.
    """
    unit = unit_normals(normals)
    if unit is None:
        return None
    count = len(content.verts)
    exists = (named >= 0) & (named < len(unit))
    if exists.any():
        return mean_normals(unit[named[exists]], content.corners[exists], count)
    return unit if len(unit) == count else None


def _normal_index(word: str, before: int) -> int:
    """The normal of a corner, from 0; -1 if the corner names none."""
    parts = word.split("/")
    if len(parts) < 3 or not parts[2]:
        return -1
    index = integer(parts[2])
    return index - 1 if index > 0 else before + index


def _read_off(data: bytes) -> Content:
    _, vertices, faces, header_lines = read_off_header(data)

    def lines_after_header() -> Iterator[Line]:
        return islice(lines_with_content(data), header_lines, None)

    lines = lines_after_header()
    points = table(map(itemgetter(1), islice(lines, vertices)), 3)
    polygons = _off_table(lines, faces)
    if points is not None and polygons is not None and len(points) == vertices:
        sizes, corners = polygons
        return Content(points, sizes, corners)
    # Parse line by line, because polygons have different sizes or a line is wrong and the message must name it.
    following = sum(1 for _ in lines_after_header())
    if following < vertices + faces:
        raise ValueError(f"{vertices} vertices and {faces} faces are declared, but {following} lines follow")
    lines = lines_after_header()
    verts = array("d")
    _read_lines(islice(lines, vertices), lambda words: verts.extend(_point(words)))
    return Content(np.array(verts).reshape(-1, 3), *_read_polygons(lines, faces))


def read_off_header(data: bytes) -> tuple[str, int, int, int]:
    """The kind of an OFF file, such as COFF, and its numbers of vertices, faces, and lines of the header."""
    lines = without_comments(numbered_lines(data))
    words = next(lines, (0, " "))[1].split() or [""]
    header = _OFF_HEADER.fullmatch(words[0])
    if header is None:
        raise ValueError(f"the header should be OFF, got {words[0][:20]!r}")
    if header[2]:
        words[:1] = header[1], header[2]  # OFF3514 3546 0: many files of ModelNet begin like this
    header_lines = 1
    if len(words) == 1:
        second = next(lines, None)
        if second is None:
            raise ValueError("the file ends after its header")
        words += second[1].split()
        header_lines = 2
    if words[1].upper() == "BINARY":
        raise ValueError("binary OFF is not supported. Save the mesh as text")
    if len(words) < 3 or not re.fullmatch("[0-9]+ [0-9]+", " ".join(words[1:3])):
        raise ValueError(f"the header should give the numbers of vertices and faces, got {' '.join(words[1:])[:60]!r}")
    if max(len(words[1]), len(words[2])) > 18:
        raise ValueError("the header declares more than 10^18 vertices or faces, more than any file holds")
    return words[0], int(words[1]), int(words[2]), header_lines


def _off_table(lines: Iterator[Line], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The sizes and the corners of polygons that all have the same size. None for others."""
    first = next(lines, None) if count else None
    if first is None:
        return (np.zeros(0, np.int64), np.zeros(0, np.int64)) if count == 0 else None
    size = first[1].split(None, 1)[0]
    if not re.fullmatch("[0-9]{1,4}", size):
        return None
    rows = whole_table([line for _, line in chain([first], islice(lines, count - 1))], 1 + int(size))
    if rows is None or len(rows) != count or (rows[:, 0] != int(size)).any():
        return None
    return rows[:, 0], rows[:, 1:].reshape(-1)


def _read_polygons(lines: Iterator[Line], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sizes and the corners of the first `count` polygons.

    A polygon may span several lines. It then ends at the end of a line. A polygon on one line may have a color after
    its corners.
    """
    sizes, corners = array("q"), array("q")

    def ahead() -> Iterator[Line]:
        while len(sizes) < count:
            line = next(lines, None)
            if line is None:
                raise ValueError(f"{count} faces are declared, but the file ends after {len(sizes)}")
            yield line

    def read(words: list[str]) -> None:
        size = integer(words[0])
        row = list(map(integer, words[1 : 1 + max(size, 0)]))
        if len(row) < size and len(row) == len(words) - 1:
            while len(row) < size and (line := next(lines, None)) is not None:
                more = list(map(integer, line[1].split()))
                if len(row) + len(more) > size:
                    break
                row += more
        if len(row) != size:
            raise ValueError(f"a list of {size} with {len(row)} items")
        sizes.append(size)
        corners.extend(row)

    _read_lines(ahead(), read)
    return np.array(sizes), np.array(corners)


def _read_ply(data: bytes) -> Content:
    elements = read_ply(data)
    vertex = elements.get("vertex", {})
    verts = _stacked(vertex, ("x", "y", "z"))
    if verts is None:
        raise ValueError("there is no element 'vertex' with properties x, y and z")
    normals = _stacked(vertex, ("nx", "ny", "nz"))
    if _rows(elements.get("tristrips", {})):
        raise ValueError("triangle strips are not supported")
    faces = elements.get("face", {})
    lists = next((faces[name] for name in PLY_CORNERS if name in faces), None)
    if isinstance(lists, Lists) and lists.items.dtype.kind in "iu" and len(lists.sizes):
        return Content(verts, lists.sizes, lists.items.astype(np.int64), normals)
    if _rows(faces):
        raise ValueError(f"faces have no list of integers named {' or '.join(PLY_CORNERS)}")
    if _rows(elements.get("edge", {})):
        raise ValueError(NO_POLYGONS.format("edges"))
    return Content(verts, np.zeros(0, np.int64), np.zeros(0, np.int64), normals)


def _rows(columns: Columns) -> int:
    return max((len(x.sizes if isinstance(x, Lists) else x) for x in columns.values()), default=0)


def _stacked(columns: Columns, names: Sequence[str]) -> NDArray[np.float64] | None:
    """Columns of numbers as one array (N, len(names)). None if one is missing."""
    stack = [column for name in names if isinstance(column := columns.get(name), np.ndarray)]
    return np.stack(stack, axis=1).astype(np.float64) if len(stack) == len(names) else None


def _read_stl(data: bytes) -> Content:
    """STL has three vertices for each triangle. Triangles share none."""
    if is_binary_stl(data):
        verts = np.frombuffer(data, _STL_TRIANGLE, offset=84)["corners"].astype(np.float64).reshape(-1, 3)
    else:
        verts = _ascii_stl_corners(data)
    return Content(verts, np.full(len(verts) // 3, 3), np.arange(len(verts)))


def _ascii_stl_corners(data: bytes) -> NDArray[np.float64]:
    """The vertices (3 F, 3) of an ASCII STL file. Raises ValueError for another file."""
    text = data.decode("utf-8-sig", errors="replace").lower()
    before = ""
    corners, ends, solids = (text.count(word) for word in ("vertex", "endfacet", "endsolid"))
    facets = text.count("facet") - ends
    if facets != ends or corners != 3 * facets:  # perhaps the solid's name has one of these words
        before = r"^[ \t]*"
        facets, corners, ends, solids = (
            len(re.findall(rf"{before}{word}\b", text, re.MULTILINE))
            for word in ("facet", "vertex", "endfacet", "endsolid")
        )
    if text.lstrip()[:5] != "solid" or facets + ends + solids == 0:
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
    verts = array("d")
    for match in re.finditer(rf"{before}vertex(?:\s+|$)(.*?)(?=\s*(?:vertex|endloop|endfacet|$))", text, re.MULTILINE):
        words = match[1].split()
        try:
            if len(words) != 3:
                raise ValueError(f"a vertex with {len(words)} coordinates")
            verts.extend(map(real, words))
        except ValueError as e:
            raise ValueError(f"{_DAMAGED_STL}: {e}") from e
    if len(verts) != 9 * facets:
        raise ValueError(f"{_DAMAGED_STL}: only {len(verts) // 3} of {corners} vertices can be read")
    return np.array(verts).reshape(-1, 3)


def _read_lines(lines: Iterable[Line], read: Callable[[list[str]], None]) -> None:
    """Call `read` for the words of each line. Errors name the line."""
    for number, line in lines:
        try:
            read(line.split())
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from e


def _point(words: list[str], what: str = "vertex") -> list[float]:
    point = [real(word) for word in words[:3]]
    if len(point) < 3:
        raise ValueError(f"a {what} with {len(point)} coordinates")
    return point


# ---- colors and properties ----


def _ply_attributes(data: bytes) -> Attributes:
    elements = read_ply(data)
    vertices, faces = (
        {name: column for name, column in elements.get(element, {}).items() if not isinstance(column, Lists)}
        for element in ("vertex", "face")
    )
    return Attributes(vertices={name: x for name, x in vertices.items() if name not in ("x", "y", "z")}, faces=faces)


def _vtk_attributes(data: bytes) -> Attributes:
    vertices, faces, fields = read_vtk_arrays(data)
    return Attributes(vertices=vertices, faces=faces, fields=fields)


def color_names(properties: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    """The names of the properties that are colors: three of a PLY file, or the first array of three or four bytes."""
    of_bytes = ((name,) for name, x in properties.items() if x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] > 2)
    return next((names for names in _PLY_COLORS if set(names) <= set(properties)), None) or next(of_bytes, ())


def with_colors(attributes: Attributes) -> Attributes:
    """Attributes with the colors that are among the properties. Raises ValueError for colors out of range."""
    if attributes.colors is not None or attributes.face_colors is not None:
        return attributes
    return replace(attributes, colors=_colors(attributes.vertices), face_colors=_colors(attributes.faces))


def _colors(properties: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
    names = color_names(properties)
    return _unit_range(np.column_stack([properties[name] for name in names])[:, :3]) if names else None


def _obj_attributes(data: bytes) -> Attributes:
    current = {"g": "", "usemtl": ""}
    names: dict[str, list[str]] = {"groups": [], "materials": []}
    points: list[list[str]] = []
    for _, line in without_comments(numbered_lines(data, continued=True)):
        word, *rest = line.split()
        if word == "v":
            points.append(rest[3:6])
        elif word in current:
            current[word] = " ".join(rest)
        elif word == "f":
            for each, name in zip(names.values(), current.values(), strict=True):
                each.append(name)
    named = {kind: np.array(each) for kind, each in names.items() if any(each)}
    return Attributes(_colors_in(points), face_names=named)


def _off_attributes(data: bytes) -> Attributes:
    kind, vertices, faces, first = read_off_header(data)
    column = 6 if "N" in kind[:-3] else 3  # normals stand before colors

    def rows(first: int, count: int) -> Iterator[list[str]]:
        return (line.split() for _, line in islice(lines_with_content(data), first, first + count))

    at_faces = (row[1 + integer(row[0]) :][:3] for row in rows(first + vertices, faces))
    at_vertices = (row[column : column + 3] for row in rows(first, vertices))
    return Attributes(_colors_in(at_vertices), _colors_in(at_faces, "face"))


def _gltf_attributes(data: bytes) -> Attributes:
    arrays = read_gltf_attributes(data)
    colors = arrays.pop("COLOR_0", None)
    values = {name: x[:, 0] if x.shape[1] == 1 else x for name, x in arrays.items()}
    return Attributes(None if colors is None else _unit_range(colors[:, :3]), vertices=values)


def _colors_in(rows: Iterable[list[str]], what: str = "vertex") -> NDArray[np.float64] | None:
    """The colors (N, 3) from the words after the other numbers of each row. None if no row has one.

    Raises ValueError if only some rows have one.
    """
    values, first = array("d"), dict[bool, int]()  # the first row with a color, and the first one without
    for number, words in enumerate(rows):
        first.setdefault(len(words) >= 3, number)
        if len(first) == 2:
            raise ValueError(f"{what} {first[True]} has a color, but {what} {first[False]} has none")
        values.extend([real(word) for word in words] if True in first else ())
    return _unit_range(np.array(values).reshape(-1, 3), what) if values else None


def _unit_range(colors: NDArray[Any], what: str = "vertex") -> NDArray[np.float64]:
    """Colors from 0 to 1. Raises ValueError for others than 0 … 1, 0 … 255, and 16 bits in PLY."""
    unit = colors.astype(np.float64)
    if colors.dtype.kind == "u":
        return unit / np.iinfo(colors.dtype).max
    if not ((unit >= 0) & (unit <= 255)).all():
        bad = np.flatnonzero(~((unit >= 0) & (unit <= 255)).all(axis=1))[0]
        raise ValueError(f"colors should be from 0 to 1 or from 0 to 255, that of {what} {bad} is {unit[bad].tolist()}")
    return unit / 255 if colors.max(initial=0) > 1 else unit


class Reader(NamedTuple):
    """How files of a format are read, from their content.

    mesh: the vertices, polygons and perhaps normals, see `Content`
    attributes: the properties, and colors that are no properties. By default there are none.
    properties: whether they can have other properties than colors
    """

    mesh: Callable[[bytes], tuple[Any, ...]]
    attributes: Callable[[bytes], Attributes] = lambda data: Attributes()
    properties: bool = False


_GLTF = Reader(read_gltf, _gltf_attributes, properties=True)
_VTK = Reader(read_vtk, _vtk_attributes, properties=True)
READERS: dict[str, Reader] = {
    ".obj": Reader(_read_obj, _obj_attributes),
    ".off": Reader(_read_off, _off_attributes),
    ".ply": Reader(_read_ply, _ply_attributes, properties=True),
    ".stl": Reader(_read_stl),
    ".glb": _GLTF,
    ".gltf": _GLTF,
    ".vtk": _VTK,
    ".vtp": _VTK,
    ".vtu": _VTK,
    ".surf.gii": Reader(read_gifti),
    **dict.fromkeys(FREESURFER, Reader(read_freesurfer)),
}
