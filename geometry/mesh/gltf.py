"""Reader of glTF 2.0 files, .glb and .gltf, by trimesh.

trimesh skips content that it does not know, or reads zeros instead. Such files are refused here.
"""

from __future__ import annotations

import base64
import io
import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.content import check_unpacked
from diffnet.geometry.mesh.objects import scene_arrays

Json: TypeAlias = dict[str, Any]

_MODES = {0: "points", 4: "triangles", 5: "a triangle strip"}
_DAMAGED = "not a glTF file, or a damaged one"
_COMPRESSED = ("draco", "meshopt")


def read_gltf(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Vertices (V, 3) and triangles (F, 3) of the default scene, in the scene's coordinates.

    The meshes of the file follow each other in the file's order, each once for every node that shows it. Buffers must
    be inside the file; see `embed_buffers`. Raises ValueError for a damaged file and for content that is not supported.
    """
    import trimesh  # imported here because it takes a quarter of a second

    binary = data.startswith(b"glTF")
    header = _header_of_glb(data) if binary else _json(data)
    try:
        _check(header, len(data))
    except (LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{_DAMAGED} ({type(e).__name__}: {e})") from e
    try:
        scene = trimesh.load_scene(
            io.BytesIO(data), file_type="glb" if binary else "gltf", process=False, skip_materials=True
        )
    except Exception as e:  # trimesh doesn't check what it reads, so damage can cause any error
        raise ValueError(f"{_DAMAGED} ({type(e).__name__}: {e})") from e
    return scene_arrays(scene)


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


def _header_of_glb(data: bytes) -> Json:
    if len(data) < 20:
        raise ValueError(f"the file is cut off: {len(data)} bytes are less than a header")
    _, version, length, json_length, kind = struct.unpack("<5I", data[:20])
    if version != 2:
        raise ValueError(f"glTF version {version} is not supported, only version 2")
    if length != len(data) or json_length > len(data) - 20:
        raise ValueError(f"the header declares {max(length, json_length + 20)} bytes, but the file has {len(data)}")
    if kind != 0x4E4F534A:  # "JSON"
        raise ValueError("the first part of the file is not JSON")
    return _json(data[20 : 20 + json_length])


def _json(data: bytes) -> Json:
    try:
        header = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{_DAMAGED} ({e})") from e
    if not isinstance(header, dict) or "asset" not in header:
        raise ValueError("not a glTF file: it has no 'asset'")
    return header


def _check(header: Json, size: int) -> None:
    """Raise ValueError for content that trimesh would misread or skip, and for more than `check_unpacked` allows.

    size: of the file with its buffers, in bytes
    """
    version = str(header["asset"].get("version", ""))
    if not version.startswith("2."):
        raise ValueError(f"glTF version {version or 'unknown'} is not supported, only version 2")
    for extension in header.get("extensionsRequired", []):
        if any(word in extension.lower() for word in _COMPRESSED):
            raise ValueError(f"its geometry is compressed ({extension}). Save it without compression")
    accessors = header.get("accessors", [])
    shown = Counter(node.get("mesh") for node in header.get("nodes", []))
    unpacked = 0  # nodes may show a mesh many times, and meshes may share their vertices
    for number, mesh in enumerate(header.get("meshes", [])):
        for primitive in mesh["primitives"]:
            mode = primitive.get("mode", 4)
            if mode not in _MODES:
                supported = ", ".join(f"{number} ({what})" for number, what in _MODES.items())
                raise ValueError(f"a primitive has mode {mode}, supported are {supported}")
            used = [primitive["attributes"]["POSITION"], *([primitive["indices"]] if "indices" in primitive else [])]
            for accessor in (accessors[index] for index in used):
                if "sparse" in accessor or "bufferView" not in accessor:
                    raise ValueError("sparse or compressed accessors are not supported. Save the mesh without them")
                if accessor.get("normalized") and accessor is accessors[used[0]]:
                    raise ValueError("quantized positions are not supported. Save the mesh without quantization")
            own = (item * min(accessors[index]["count"], size) for item, index in zip((24, 8), used, strict=False))
            unpacked += sum(own) * max(shown[number], 1)
    check_unpacked(unpacked)
