"""Reader of glTF 2.0 files, .glb and .gltf. Content that it doesn't know is refused."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import IN_BRACKETS, raised_as
from diffnet.geometry.mesh.content import check_unpacked

Json: TypeAlias = dict[str, Any]
Matrix: TypeAlias = NDArray[np.float64]
T = TypeVar("T")

_MODES = {0: "points", 4: "triangles", 5: "a triangle strip"}
_COLUMNS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4}
_TYPES = {5120: "<i1", 5121: "<u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_DAMAGED = "not a glTF file, or a damaged one"
_COMPRESSED = ("draco", "meshopt")


def read_gltf(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Vertices (V, 3), the number of corners of each triangle, 3, and all corners of the default scene.

    They are in the scene's coordinates. The meshes of the file follow each other in the file's order, each once for
    every node that shows it. Primitives that have their vertices in the same place of a buffer, and the same
    transformation, share them. Buffers must be inside the file; see `embed_buffers`. Raises ValueError for a damaged
    file, for content that is not supported, and for more than `check_unpacked` allows.
    """
    verts, faces, _ = _of_parts(data, _scene)
    return verts, np.full(len(faces), 3), faces.reshape(-1)


def read_gltf_attributes(data: bytes) -> dict[str, NDArray[Any]]:
    """COLOR_0 and the attributes of users, (V, C) with the file's dtype, in the order of the vertices of `read_gltf`.

    Those that a primitive lacks are left out. Raises ValueError as `read_gltf`.
    """
    return _of_parts(data, _attributes)


def embed_buffers(data: bytes, folder: Path) -> bytes:
    """A .gltf file whose buffers in other files are inside it.

    folder: of the file. Buffers are read from it and from the folders in it, also after links are followed.

    Raises ValueError if a buffer can't be read or lies elsewhere, and for more than `check_unpacked` allows.
    """
    header = _json(data)
    buffers = header.get("buffers", [])
    total = 0
    for buffer in buffers if isinstance(buffers, list) else []:
        uri = buffer.get("uri") if isinstance(buffer, dict) else None
        if not isinstance(uri, str) or uri.startswith("data:"):
            continue
        path = folder / unquote(uri)
        if urlsplit(uri).scheme or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise ValueError(
                f"its buffer {uri[:60]!r} leads out of the folder {folder}. Put the buffer there, or save the mesh as "
                ".glb"
            )
        if not path.is_file():
            raise ValueError(f"its buffer {path} is missing. Put it there, or save the mesh as .glb")
        content = path.read_bytes()
        total += len(content)
        check_unpacked(total)  # many buffers may name the same file
        buffer["uri"] = "data:application/octet-stream;base64," + base64.b64encode(content).decode()
    return json.dumps(header).encode() if total else data


def _parts_of_glb(data: bytes) -> tuple[Json, bytes]:
    """The header of a .glb file, and its buffer."""
    if len(data) < 20:
        raise ValueError(f"the file is cut off: {len(data)} bytes are less than a header")
    _, version, length, json_length, kind = struct.unpack("<5I", data[:20])
    if version != 2:
        raise ValueError(f"glTF version {version} is not supported, only version 2")
    if length != len(data) or json_length > len(data) - 20:
        raise ValueError(f"the header declares {max(length, json_length + 20)} bytes, but the file has {len(data)}")
    if kind != 0x4E4F534A:  # "JSON"
        raise ValueError("the first part of the file is not JSON")
    begin = 20 + json_length
    length = int.from_bytes(data[begin : begin + 4], "little")
    return _json(data[20:begin]), data[begin + 8 : begin + 8 + length]


def _json(data: bytes) -> Json:
    with raised_as(ValueError, _DAMAGED, ValueError, RecursionError, form=IN_BRACKETS):
        header = json.loads(data.decode("utf-8-sig"))
    if not isinstance(header, dict) or "asset" not in header:
        raise ValueError("not a glTF file: it has no 'asset'")
    return header


def _check(header: Json) -> None:
    """Raise ValueError for a version and for extensions that are not supported."""
    version = str(header["asset"].get("version", ""))
    if not version.startswith("2."):
        raise ValueError(f"glTF version {version or 'unknown'} is not supported, only version 2")
    for extension in header.get("extensionsRequired", []):
        if any(word in extension.lower() for word in _COMPRESSED):
            raise ValueError(f"its geometry is compressed ({extension}). Save it without compression")


def _buffer(buffer: Json, binary: bytes) -> memoryview:
    uri = buffer.get("uri")
    if uri is not None and not uri.startswith("data:"):
        raise ValueError(f"{_DAMAGED} (a buffer is in another file, {uri[:60]!r})")
    return memoryview(binary if uri is None else base64.b64decode(uri.partition(",")[2]))


def _of_parts(data: bytes, read: Callable[[Json, list[memoryview]], T]) -> T:
    """What a function reads from the header and the buffers of a file."""
    header, binary = _parts_of_glb(data) if data.startswith(b"glTF") else (_json(data), b"")
    try:
        _check(header)
        return read(header, [_buffer(each, binary) for each in header.get("buffers", [])])
    except (LookupError, TypeError, AttributeError, OverflowError) as e:
        raise ValueError(f"{_DAMAGED} ({type(e).__name__}: {e})") from e


def _attributes(header: Json, buffers: list[memoryview]) -> dict[str, NDArray[Any]]:
    _, _, placed = _scene(header, buffers)
    names = {name for name in placed[0] if name == "COLOR_0" or name.startswith("_")}.intersection(*placed)
    parts = {name: [_numbers(header, buffers, each[name]) for each in placed] for name in sorted(names)}
    check_unpacked(sum(part.nbytes for each in parts.values() for part in each))
    return {name: np.concatenate(each) for name, each in parts.items()}


def _scene(header: Json, buffers: list[memoryview]) -> tuple[NDArray[np.float64], NDArray[np.int64], list[Json]]:
    """The vertices, the triangles, and the attributes of each primitive that gives vertices."""
    placed: list[Json] = []
    shown: dict[int, list[Matrix]] = {}
    for mesh, matrix in _nodes(header):
        shown.setdefault(mesh, []).append(matrix)
    verts, faces = [np.zeros((0, 3))], [np.zeros((0, 3), np.int64)]
    firsts: dict[Any, int] = {}  # the first vertex of what is shown of a buffer
    count = size = 0
    places = ((i, each) for i, mesh in enumerate(header.get("meshes", [])) for each in mesh["primitives"])
    for mesh, primitive in places:
        for matrix in shown.get(mesh, []):
            points = _numbers(header, buffers, primitive["attributes"]["POSITION"], 3)
            corners = _triangles(header, buffers, primitive, len(points))
            place = matrix.tobytes(), points.ctypes.data, points.strides, points.dtype.str, len(points)
            size += 8 * corners.size + (0 if place in firsts else 24 * len(points))
            check_unpacked(size)  # nodes may show a mesh many times
            if place not in firsts:
                firsts[place], count = count, count + len(points)
                placed.append(primitive["attributes"])
                verts.append(points @ matrix[:3, :3].T + matrix[:3, 3])
            mirrored = np.linalg.det(matrix[:3, :3]) < 0
            faces.append((corners[:, ::-1] if mirrored else corners) + firsts[place])
    if count == 0:
        raise ValueError("the scene is empty: no node shows a mesh")
    return np.concatenate(verts), np.concatenate(faces), placed


def _nodes(header: Json) -> Iterator[tuple[int, Matrix]]:
    """The meshes, −1 for none, and the transformations (4, 4) of the nodes of the default scene."""
    from scipy.spatial.transform import Rotation  # the command line loads this module

    scenes = header.get("scenes", [])
    waiting = [(root, np.eye(4)) for root in (scenes[header.get("scene", 0)].get("nodes", []) if scenes else [])]
    seen: set[int] = set()
    while waiting:
        number, matrix = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        node = header["nodes"][number]
        local = np.reshape(np.array(node.get("matrix", np.eye(4)), np.float64), (4, 4)).T
        turn, move = np.eye(4), np.eye(4)
        turn[:3, :3] = Rotation.from_quat(node.get("rotation", [0, 0, 0, 1])).as_matrix()
        move[:3, 3] = node.get("translation", 0)
        matrix = matrix @ local @ move @ turn @ np.diag([*np.broadcast_to(node.get("scale", 1.0), 3), 1.0])
        waiting += [(child, matrix) for child in node.get("children", [])]
        yield node.get("mesh", -1), matrix


def _triangles(header: Json, buffers: list[memoryview], primitive: Json, vertices: int) -> NDArray[np.int64]:
    """The triangles (F, 3) of a primitive."""
    mode, indices = primitive.get("mode", 4), np.arange(vertices)
    if mode not in _MODES:
        supported = ", ".join(f"{number} ({what})" for number, what in _MODES.items())
        raise ValueError(f"a primitive has mode {mode}, supported are {supported}")
    if "indices" in primitive:
        indices = _numbers(header, buffers, primitive["indices"], 1)[:, 0].astype(np.int64)
    if len(indices) and not (indices.min() >= 0 and indices.max() < vertices):
        raise ValueError(f"a primitive has {vertices} vertices, but its faces have indices out of range")
    if mode == 0:
        return np.zeros((0, 3), np.int64)
    if mode == 4:
        if len(indices) % 3:
            raise ValueError(f"{_DAMAGED} ({len(indices)} corners are no triangles)")
        return indices.reshape(-1, 3)
    strip = np.stack([indices[:-2], indices[1:-1], indices[2:]], axis=1)
    strip[1::2] = strip[1::2, ::-1]  # every second triangle of a strip is turned the other way
    return strip


def _numbers(header: Json, buffers: list[memoryview], index: int, expected: int | None = None) -> NDArray[Any]:
    """The rows of an accessor (count, columns). They are not copied.

    expected: the number of columns of positions and indices. None for attributes, which may have any.
    """
    accessor = header["accessors"][index]
    if "sparse" in accessor or "bufferView" not in accessor:
        raise ValueError("sparse or compressed accessors are not supported. Save the mesh without them")
    if expected and accessor.get("normalized"):
        raise ValueError("quantized positions are not supported. Save the mesh without quantization")
    view, dtype = header["bufferViews"][accessor["bufferView"]], np.dtype(_TYPES[accessor["componentType"]])
    columns = _COLUMNS[accessor["type"]]
    data = buffers[view["buffer"]][view.get("byteOffset", 0) :][: view["byteLength"]]
    begin, stride = accessor.get("byteOffset", 0), view.get("byteStride", columns * dtype.itemsize)
    end = begin + (accessor["count"] - 1) * stride + columns * dtype.itemsize
    if not end <= len(data) == view["byteLength"] or columns != (expected or columns):
        raise ValueError(f"{_DAMAGED} (a buffer is too short, or has other numbers than it should)")
    return np.ndarray((accessor["count"], columns), dtype, data, begin, (stride, dtype.itemsize))
