"""Files of unusual form, glTF, VTK, objects of other libraries, messages for wrong content, colors and properties."""

from __future__ import annotations

import gzip
import json
import locale
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polygon_files
import pytest
import refusals
import torch
import trimesh
from polygon_files import FAN, VERTS, ascii_stl, binary_stl, check, lines, read, written

from diffnet.geometry import FORMATS, MeshError, load_attributes, load_mesh, normalize_positions, precompute
from diffnet.geometry.mesh import vtk
from diffnet.geometry.mesh.attributes import mesh_arrays

OBJ = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nv 1 1 0\nf 2 5 3\nf 1 2 5 3\nf 1 2 4\n"
OFF = "OFF\n5 3 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n1 1 0\n3 1 4 2\n4 0 1 4 2\n3 0 1 3\n"
PLY = (
    "ply\nformat ascii 1.0\nelement vertex 5\nproperty float x\nproperty float y\nproperty float z\n"
    "element face 3\nproperty list uchar int vertex_indices\nend_header\n" + OFF.split("\n", 2)[2]
)
TEXTS = {".obj": OBJ, ".off": OFF, ".ply": PLY}


def refused(path: Path, data: str | bytes, message: str) -> None:
    """The file is refused, and the message asks for no package."""
    assert "install" not in polygon_files.refused(path, data, message)


CORNERS = np.array(VERTS)[np.array(FAN)]


def test_off_faces_over_several_lines(tmp_path: Path) -> None:
    for faces in (
        "3 1 4\n2\n4\n0 1\n4 2\n3 0 1 3\n",
        "3\n1\n4\n2\n4 0 1 4 2 255 0 0\n# comment\n3 0 # comment\n\n1 3\n",
    ):
        check(read(tmp_path / "a.off", OFF[: OFF.index("3 1 4 2")] + faces))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3 1 4 2\n", "3 1 4\n", r"line 8: a list of 3 with 2 items"),  # the next line must not complete it
        ("4 0 1 4 2\n", "4 0 1\n", r"line 9: a list of 4 with 2 items"),
        ("3 0 1 3\n", "3 0 1\n", r"line 10: a list of 3 with 2 items"),
        ("3 0 1 3\n", "3 0\nx\n", r"line 10: .*'x'"),
        ("3 0 1 3\n", "", r"5 vertices and 3 faces are declared, but 7 lines follow"),
        ("4 0 1 4 2\n3 0 1 3\n", "4 0 1\n4 2\n", r"3 faces are declared, but the file ends after 2"),
        ("OFF\n5", "OFF\nBINARY 5", "binary OFF is not supported"),
        ("OFF\n5", "OFF " + "9" * 5000, r"more than 10\^18 vertices or faces"),
        ("OFF\n5", "nOFF\n5", "header should be OFF, got 'nOFF'"),
        ("OFF\n5", "OFFx5", "header should be OFF, got 'OFFx5'"),
    ],
)
def test_off_damage(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in OFF
    refused(tmp_path / "a.off", OFF.replace(old, new, 1), message)


def test_carriage_returns_end_lines(tmp_path: Path) -> None:
    for suffix, content in TEXTS.items():
        check(read(tmp_path / f"a{suffix}", content.replace("\n", "\r")))
    expected, found = (read(tmp_path / "a.stl", ascii_stl(CORNERS).replace("\n", end)) for end in "\n\r")
    np.testing.assert_array_equal(found.verts, expected.verts)
    np.testing.assert_array_equal(found.faces, expected.faces)


def test_an_entry_of_misread_line_ends_is_not_used(tmp_path: Path) -> None:
    """Earlier versions stored a file with CR line ends as a cloud of one vertex, under the hash of its content."""
    check(read(tmp_path / "a.obj", OBJ, tmp_path / "cache"))
    entries = list((tmp_path / "cache").rglob("*.safetensors"))
    check(read(tmp_path / "b.obj", OBJ.replace("\n", "\r"), tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("*.safetensors")) == entries  # the entry of the same file with LF


def test_keys_of_entries_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of entries in a cache of format 5. They change with `_READERS_VERSION`."""
    monkeypatch.setattr("diffnet.geometry.store.cache.FORMAT", 5)
    names = {
        "a.obj": (OBJ, "a79a9d58cbf0b8ca"),
        "b.obj": (OBJ.replace("\n", "\r\n"), "7de5bf38200a9a9d"),
        "a.off": (OFF, "c59556a2fb490d5e"),
        "a.ply": (PLY, "0a590bdaef3d7f0d"),
        "a.stl": (binary_stl(CORNERS), "7a790e3ab085d76f"),
    }
    for name, (data, key) in names.items():
        read(tmp_path / name, data, tmp_path / name[::-1])
        assert [path.name.split(".")[0][:16] for path in (tmp_path / name[::-1]).rglob("*.safetensors")] == [key], name


@pytest.mark.parametrize("suffix", TEXTS)
def test_gzip(tmp_path: Path, suffix: str) -> None:
    data = gzip.compress(TEXTS[suffix].encode())
    check(read(tmp_path / f"a{suffix}.gz", data))
    check(read(tmp_path / f"b{suffix.upper()}.GZ", data, tmp_path / "cache"))
    check(read(tmp_path / f"c{suffix}", TEXTS[suffix], tmp_path / "cache"))
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
    for cut in (1, 5, 20, len(data) - 1):
        refused(tmp_path / f"d{suffix}.gz", data[:cut], "not a gzip file, or a damaged one")
    refused(tmp_path / f"e{suffix}.gz", TEXTS[suffix], "not a gzip file")
    refused(tmp_path / f"f{suffix}.gz", gzip.compress(b""), "the file is empty")


WRONG_CONTENT = {
    "gzip": (gzip.compress(OBJ.encode()), r"compressed by gzip\. Add \.gz to the file's name"),
    "zip": (b"PK\x03\x04" + bytes(90), "a zip archive"),
    "bzip2": (b"BZh91AY&SY" + bytes(90), "compressed by bzip2"),
    "xz": (b"\xfd7zXZ\x00" + bytes(90), "compressed by xz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(90), "compressed by zstd"),
    "utf-16": (OBJ.encode("utf-16"), r"UTF-16 .*text\. Save it as UTF-8"),
    "utf-16-be": (b"\xfe\xff" + OBJ.encode("utf-16-be"), r"UTF-16 text\. Save it as UTF-8"),
    "utf-32": (OBJ.encode("utf-32"), r"UTF-32 text\. Save it as UTF-8"),
    "html": (b"\n <!DOCTYPE html>\n<html><body><pre>\nv 0 0 0\n</pre></body></html>\n", "a web page"),
    "html in capitals": (b"<HTML><HEAD>", "a web page"),
    "xml": (b"\xef\xbb\xbf<?xml version='1.0'?><Error>AccessDenied</Error>", "a web page or other markup"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("kind", WRONG_CONTENT)
def test_wrong_content(tmp_path: Path, suffix: str, kind: str) -> None:
    data, message = WRONG_CONTENT[kind]
    refused(tmp_path / f"a{suffix}", data, f"the content is not {suffix[1:]}: it is .*{message}")


def test_text_without_a_mark_of_its_encoding(tmp_path: Path) -> None:
    for suffix in (".obj", ".off"):
        for encoding in ("utf-16-le", "utf-16-be"):
            refused(tmp_path / f"a{suffix}", TEXTS[suffix].encode(encoding), "another encoding than UTF-8")
    refused(tmp_path / "b.off", b"OFF BINARY\n" + bytes(100), "binary OFF is not supported")
    refused(tmp_path / "b.obj", "once upon a time\n", "empty: no line begins with 'v'")


def test_the_header_of_binary_stl_may_hold_anything(tmp_path: Path) -> None:
    for header in (b"\x1f\x8b", b"<html>", b"\xff\xfe", b"\r\r", b"solid facet\nendsolid"):
        assert len(read(tmp_path / "a.stl", binary_stl(CORNERS, header)).faces) == 4


def test_damaged_stl(tmp_path: Path) -> None:
    whole, text = binary_stl(CORNERS), ascii_stl(CORNERS)
    for cut in range(0, len(whole) - 1, 7):
        refused(tmp_path / "a.stl", whole[: cut + 1], "damaged one|is empty")
    refused(tmp_path / "a.stl", whole + b"\0", "declares 4 triangles in 284 bytes, but the file has 285 bytes")
    huge = whole[:80] + b"\xff" * 4 + whole[84:]
    refused(tmp_path / "a.stl", huge, "declares 4294967295 triangles in 214748364834 bytes, but the file has 284")
    for cut in range(20, len(text) - len("endsolid name\n"), 5):
        refused(tmp_path / "b.stl", text[:cut], "not an STL file, or a damaged one")
    refused(tmp_path / "b.stl", text.replace("vertex", "x", 1), "4 facets begin, 4 end, they have 11 vertices")
    latin = text.replace("vertex 1", "vertex \xff", 1).encode("latin-1")
    refused(tmp_path / "b.stl", latin, "not an STL file, or a damaged one")


@pytest.mark.parametrize("element", ["vertex 5", "face 3"])
@pytest.mark.parametrize("count", ["99999999999", "9" * 40])
def test_huge_counts_in_ply(tmp_path: Path, element: str, count: str) -> None:
    name = element.split()[0]
    message = f"declares {count[:30]} rows of element '{name}', more than .* bytes can hold"
    for end in ("\n", "\r", "\r\n"):
        refused(tmp_path / "a.ply", PLY.replace(element, f"{name} {count}").replace("\n", end), message)
    binary = PLY.replace("ascii", "binary_little_endian").replace(element, f"{name} {count}")
    refused(tmp_path / "b.ply", binary.encode() + bytes(100), message)


@pytest.mark.parametrize("suffix", [".obj", ".off"])
def test_coordinates_beyond_single_precision(tmp_path: Path, suffix: str) -> None:
    text = TEXTS[suffix].replace("0 0 1\n", "0 -1e300 1\n")
    refused(tmp_path / f"a{suffix}", text, r"coordinates up to 1e\+300 are beyond single precision .* at vertex 3")
    large = read(tmp_path / f"b{suffix}", text.replace("1e300", "3e38"))
    assert np.isfinite(normalize_positions(large.verts)).all()


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder.ply").mkdir()
    os.mkfifo(tmp_path / "pipe.obj")
    (tmp_path / "link.off").symlink_to(tmp_path / "gone")
    for name in ("a.dxf", "a.gz"):
        (tmp_path / name).touch()
    for name, message in {
        "folder.ply": "this is a folder, expected a file",
        ".": "this is a folder, expected a file",
        "pipe.obj": "this is a pipe, a socket or a device",
        "link.off": "no such file",
        "folder.ply/a.off": "no such file",
        "gone": "no such file",
        "a.dxf": r"unknown format '\.dxf', expected one of \.obj, .*\.sphere, also with \.gz",
        "a.gz": "unknown format '', expected one of",
        "a" * 300 + ".obj": "the file can't be read: .*name too long",
    }.items():
        refusals.refused(MeshError, f"^{re.escape(str(tmp_path / name))}: .*{message}", load_mesh, tmp_path / name)


@pytest.fixture
def scene() -> trimesh.Scene:
    """Two tetrahedra, one of them shown twice: moved, and mirrored."""
    verts, faces = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]
    one = trimesh.Trimesh(verts, faces, process=False)
    two = trimesh.Trimesh(2 * np.array(verts), faces, process=False)
    scene = trimesh.Scene()
    scene.add_geometry(one, geom_name="one", node_name="a")
    scene.add_geometry(two, geom_name="two", transform=trimesh.transformations.translation_matrix([9, 0, 0]))
    scene.graph.update(frame_from="world", frame_to="b", geometry="one", matrix=np.diag([-1.0, 1, 1, 1]))
    return scene


def volume(mesh: Any) -> float:
    return float(np.linalg.det(mesh.verts[mesh.faces]).sum() / 6)


def test_scenes_become_one_mesh(scene: trimesh.Scene) -> None:
    mesh = load_mesh(scene)
    assert mesh.verts.shape == (12, 3)
    assert mesh.faces.shape == (12, 3)
    np.testing.assert_array_equal(mesh.verts[4:8] * [-1, 1, 1], mesh.verts[:4])  # "one", at its two nodes
    np.testing.assert_array_equal(mesh.verts[8:], 2 * mesh.verts[:4] + [9, 0, 0])  # "two"
    np.testing.assert_array_equal(np.sort(mesh.faces.reshape(3, 4, 3)[1] - 4), np.sort(mesh.faces[:4]))
    assert volume(mesh) == pytest.approx((1 + 1 + 8) / 6)  # a mirrored mesh still has its normals outside
    assert precompute(scene, k=3).num_vertices == 12


def test_scenes_that_are_no_mesh(scene: trimesh.Scene) -> None:
    refusals.refused(MeshError, "the scene is empty", load_mesh, trimesh.Scene())
    scene.add_geometry(trimesh.load_path([[0, 0, 0], [1, 1, 1]]))
    refusals.refused(MeshError, r"a Path3D\. Remove all but meshes from it", load_mesh, scene)


def test_gltf(tmp_path: Path, scene: trimesh.Scene) -> None:
    expected = load_mesh(scene)
    glb = scene.export(file_type="glb")
    files = scene.export(file_type="gltf")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for mesh in (
        read(tmp_path / "a.glb", glb),
        read(tmp_path / "a.glb.gz", gzip.compress(glb)),
        load_mesh(tmp_path / "model.gltf"),
        load_mesh(tmp_path / "model.gltf", tmp_path / "cache"),
        load_mesh(tmp_path / "model.gltf", tmp_path / "cache"),
    ):
        assert volume(mesh) == pytest.approx(volume(expected))
        for part in (slice(0, 8), slice(8, 12)):  # the two nodes of one mesh may be exchanged
            np.testing.assert_array_equal(np.unique(mesh.verts[part], axis=0), np.unique(expected.verts[part], axis=0))
        assert mesh.polygon_count == 12
    # The entry depends on the buffers beside the file.
    header = json.loads(files["model.gltf"])
    view = header["bufferViews"][positions_of(header)["bufferView"]]
    buffer = tmp_path / header["buffers"][view["buffer"]]["uri"]
    buffer.write_bytes((np.frombuffer(buffer.read_bytes(), np.float32) + 1).tobytes())
    assert not np.array_equal(load_mesh(tmp_path / "model.gltf", tmp_path / "cache").verts, mesh.verts)
    buffer.unlink()
    with pytest.raises(MeshError, match=rf"its buffer .*{re.escape(buffer.name)} is missing"):
        load_mesh(tmp_path / "model.gltf", tmp_path / "cache")


def test_gltf_points(tmp_path: Path) -> None:
    cloud = trimesh.Scene(trimesh.PointCloud(VERTS))
    mesh = read(tmp_path / "a.glb", cloud.export(file_type="glb"))
    assert mesh.is_point_cloud
    np.testing.assert_array_equal(mesh.verts, VERTS)


def positions_of(header: dict[str, Any]) -> dict[str, Any]:
    """The accessor of the positions of the first mesh."""
    return header["accessors"][header["meshes"][0]["primitives"][0]["attributes"]["POSITION"]]


def glb_with(glb: bytes, change: Any) -> bytes:
    """The file with a changed header."""
    size = int.from_bytes(glb[12:16], "little")
    header = json.loads(glb[20 : 20 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    rest = glb[20 + size :]
    return struct.pack("<4s4I", b"glTF", 2, 20 + len(text) + len(rest), len(text), 0x4E4F534A) + text + rest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(extensionsRequired=["KHR_draco_mesh_compression"]), "compressed .KHR_draco"),
        (lambda h: positions_of(h).update(sparse={}), "sparse"),
        (lambda h: positions_of(h).update(normalized=True), "quantized positions"),
        (lambda h: h["meshes"][0]["primitives"][0].update(mode=6), "mode 6, supported are"),
        (lambda h: h["asset"].update(version="1.0"), "version 1.0 is not supported"),
        (lambda h: h.pop("asset"), "it has no 'asset'"),
        (lambda h: h.update(scenes=[{"nodes": []}]), "no node shows a mesh"),
        (lambda h: [a.update(count=10**13) for a in h["accessors"]], "damaged one"),
        (lambda h: h["bufferViews"][0].update(byteLength=10**13), "damaged one"),
        (lambda h: h.update(meshes=5), "damaged one"),
    ],
)
def test_gltf_that_would_be_misread(tmp_path: Path, scene: trimesh.Scene, change: Any, message: str) -> None:
    glb = scene.export(file_type="glb")
    read(tmp_path / "a.glb", glb_with(glb, lambda header: None))
    refused(tmp_path / "a.glb", glb_with(glb, change), message)


def test_damaged_gltf(tmp_path: Path, scene: trimesh.Scene) -> None:
    glb = scene.export(file_type="glb")
    for cut in range(1, len(glb) - 1, 97):
        refused(tmp_path / "a.glb", glb[:cut], "cut off|declares|damaged|not a glTF file")
    rng = np.random.default_rng(0)
    for _ in range(60):  # each is read or refused, and no other error gets through
        data = bytearray(glb)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "a.glb").write_bytes(data)
        with suppress(MeshError):
            load_mesh(tmp_path / "a.glb")


QUADS = [[0, 1, 4, 2], [0, 1, 3, 2]]


@pytest.mark.parametrize("convert", [np.array, torch.tensor, list])
def test_quadrilaterals(convert: Any) -> None:
    mesh = load_mesh((convert(VERTS), convert(QUADS)))
    np.testing.assert_array_equal(mesh.faces, [[0, 1, 4], [0, 4, 2], [0, 1, 3], [0, 3, 2]])
    np.testing.assert_array_equal(mesh.polygons, [0, 0, 1, 1])
    assert mesh.polygon_count == 2


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["array", "tensor"])
def test_objects_with_vertices_and_faces(convert: Any) -> None:
    verts, faces = convert(VERTS), convert(FAN)
    for source in (
        SimpleNamespace(vertices=verts, faces=faces),
        SimpleNamespace(pos=verts, face=faces.T),
        SimpleNamespace(pos=verts, face=faces.T, edge_index=faces.T[:2], num_graphs=1),
    ):
        mesh = load_mesh(source)
        np.testing.assert_array_equal(mesh.verts, VERTS)
        np.testing.assert_array_equal(mesh.faces, FAN)
        assert mesh.name == "SimpleNamespace object"
        assert precompute(source, k=2).num_vertices == 5
    assert load_mesh(SimpleNamespace(pos=verts, face=None)).is_point_cloud
    assert load_mesh(SimpleNamespace(vertices=verts, faces=None)).is_point_cloud


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"face": np.zeros((7, 3), int)}, r"`face` should have shape \(3, F\), shape is \(7, 3\)"),
        ({"face": None, "edge_index": np.zeros((2, 9), int)}, r"edges but no faces .*\(data\.pos, None\)"),
        ({"face": np.array(FAN).T, "num_graphs": 2}, r"a batch of 2 meshes\. .*precompute_all\(batch\.to_data_list"),
        ({"face": np.array(FAN).T + 9}, "vertex indices run from 0 to 4"),
        ({"face": None, "pos": None}, r"no positions \(`pos` is None\)"),
    ],
)
def test_objects_that_are_no_mesh(attributes: dict[str, Any], message: str) -> None:
    source = SimpleNamespace(**{"pos": np.array(VERTS), **attributes})
    refusals.refused(MeshError, f"^SimpleNamespace object: .*{message}", load_mesh, source)


def test_wrong_arguments_name_the_fix() -> None:
    for source, message in (
        ([VERTS, FAN], r"a list of 2 items\. Vertices and faces should be a tuple; precompute_all takes many meshes"),
        (["a.off", "b.off"], r"a list of 2 items\."),
        (None, "NoneType None"),
        ((VERTS, FAN, 1), "tuple"),
        (b"a.obj", "bytes"),
    ):
        with pytest.raises(MeshError, match=rf"expected a path, a trimesh object or \(verts, faces\), got {message}"):
            load_mesh(source)
    with pytest.raises(MeshError, match=r"cache_dir should be a folder .*: load_mesh\(\(verts, faces\)\)"):
        load_mesh(VERTS, FAN)


# ---- colors and properties ----

POINTS = ["0 0 0", "1 0 0", "0 1 0"]
COLORS = [[1, 0, 0], [0, 1, 0.2], [0, 0, 1]]


def obj(colors: list[str]) -> str:
    return lines(zip(POINTS, colors, strict=True), "v ") + "f 1 2 3\n"


def off(colors: list[str], header: str = "COFF", between: str = "") -> str:
    return f"{header}\n3 1 0\n{lines(zip(POINTS, [between] * 3, colors, strict=True))}3 0 1 2\n"


WHOLE = ["255 0 0", "0 255 51", "0 0 255"]
UNIT = ["1.0 0 0", "0 1.0 0.2", "0 0 1"]


@pytest.mark.parametrize("colors", [WHOLE, UNIT, [f"{c} 255" for c in WHOLE]], ids=["whole", "unit", "alpha"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.obj", obj),
        ("a.off", off),
        ("a.off", lambda colors: off(colors, "CNOFF", "0 0 1")),
        ("a.off", lambda colors: off(colors, "OFF").replace("OFF\n", "OFF ").replace("\n", "\r\n")),
        ("a.obj", lambda colors: "# comment\n" + obj(colors).replace("v 1", "\n v 1").replace("\n", " # note\n")),
    ],
    ids=["obj", "coff", "cnoff", "off", "obj-with-comments"],
)
def test_colors_of_texts(tmp_path: Path, name: str, content: Callable[[list[str]], str], colors: list[str]) -> None:
    path = tmp_path / name
    path.write_text(content(colors))
    np.testing.assert_allclose(load_attributes(path).colors, COLORS)
    assert len(load_mesh(path).verts) == 3


def test_files_without_colors(tmp_path: Path) -> None:
    texts = {"a.obj": obj([""] * 3), "a.off": off([""] * 3, "OFF"), "b.obj": obj(["0.5"] * 3)}
    for name, content in {**texts, "a.stl": ascii_stl(CORNERS)}.items():
        (tmp_path / name).write_text(content)
        found = load_attributes(tmp_path / name)
        assert found.colors is None
        assert found.vertices == found.faces == {}


def ply_with_properties(kind: str, colors: list[str]) -> str:
    """A triangle with colors and qualities of its vertices and a label of its face."""
    rows = [[point, color, quality] for point, color, quality in zip(POINTS, colors, (0.5, -2, 7), strict=True)]
    head, _, body = written("ply", rows, [[0, 1, 2]]).partition("end_header\n")
    properties = "".join(f"property {kind} {name}\n" for name in ("red", "green", "blue"))
    head = head.replace("element face", f"{properties}property double quality\nelement face")
    return f"{head}property int label\nend_header\n{body.rstrip()} 9\n"


@pytest.mark.parametrize(("kind", "colors"), [("uchar", WHOLE), ("float", UNIT), ("int", WHOLE)])
def test_properties_of_ply_files(tmp_path: Path, kind: str, colors: list[str]) -> None:
    path = tmp_path / "a.ply"
    path.write_text(ply_with_properties(kind, colors))
    found = load_attributes(path)
    np.testing.assert_allclose(found.colors, COLORS, atol=1e-7)
    assert found.face_colors is None
    assert found.vertices["quality"].tolist() == [0.5, -2, 7]
    assert found.faces["label"].tolist() == [9]
    assert set(found.vertices) == {"red", "green", "blue", "quality"}
    assert set(found.faces) == {"label"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.obj", obj(["1 0 0", "0 1 0", ""]), "vertex 0 has a color, but vertex 2 has none"),
        ("a.obj", obj(["", "0 1 0", "1 0 0"]), "vertex 1 has a color, but vertex 0 has none"),
        ("a.obj", obj(["1 0 0", "0 300 0", "0 0 1"]), "that of vertex 1 is [0.0, 300.0, 0.0]"),
        ("a.obj", obj(["1 0 0", "0 -1 0", "0 0 1"]), "that of vertex 1 is [0.0, -1.0, 0.0]"),
        ("a.off", off(["1 0 0", "nan 0 0", "0 0 1"]), "that of vertex 1 is [nan, 0.0, 0.0]"),
        ("a.obj", obj(["1 0 0", "0 x 0", "0 0 1"]), "'x' is not a number"),
        ("a.ply", "ply\nformat ascii 1.0\n", ": the file can't be read"),
        ("a.ply", "", ": the file can't be read"),
    ],
)
def test_damaged_attributes(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    refusals.refused(MeshError, f"^{re.escape(str(path))}.*{re.escape(message)}", load_attributes, path)
    refusals.refused(MeshError, r"missing\.ply: no such file", load_attributes, tmp_path / "missing.ply")


# ---- VTK files: legacy .vtk, and XML .vtp and .vtu ----


HEAD = "# vtk DataFile Version 3.0\na surface\nASCII\n"
VTK_POINTS = "POINTS 5 float\n0 0 0  1 0 0  0 1 0\n0 0 1  1 1 0\n"
FACES = "POLYGONS 3 13\n3 1 4 2\n4 0 1 4 2\n3 0 1 3\n"
SURFACE = HEAD + "DATASET POLYDATA\n" + VTK_POINTS
POLYDATA = SURFACE + FACES
GRID_POINTS = HEAD + "DATASET UNSTRUCTURED_GRID\n" + VTK_POINTS
GRID = GRID_POINTS + FACES.replace("POLYGONS", "CELLS") + "CELL_TYPES 3\n5 9 5\n"
SCALARS = "POINT_DATA 5\nSCALARS s float 1\nLOOKUP_TABLE default\n1 2 3 4 5\n"

needs_vtk = pytest.mark.usefixtures("_vtk")


@pytest.fixture
def _vtk() -> Iterator[None]:
    pytest.importorskip("pyvista", reason="the package is not installed: pip install 'diffnet[pyvista]'")
    before = locale.setlocale(locale.LC_ALL)
    yield
    locale.setlocale(locale.LC_ALL, before)  # older VTK that writes a file leaves C, so that text is ASCII


@needs_vtk
def test_legacy_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(read(tmp_path / "a.vtk", POLYDATA + SCALARS))
    check(read(tmp_path / "b.VTK.gz", gzip.compress(GRID.replace("\n", "\r\n").encode())))
    check(read(tmp_path / "c.vtk", POLYDATA.replace("\n", "\r")))
    cloud = read(tmp_path / "d.vtk", SURFACE + "VERTICES 2 4\n1 4\n1 0\n")
    assert cloud.is_point_cloud
    np.testing.assert_array_equal(cloud.verts, VERTS)
    assert capfd.readouterr() == ("", "")


def dataset(kind: str) -> Any:
    """The surface as an object of VTK."""
    import vtkmodules.vtkIOLegacy as legacy

    reader = getattr(legacy, f"{kind}Reader")()
    reader.SetReadFromInputString(True)
    reader.SetInputString(POLYDATA if kind == "vtkPolyData" else GRID)
    reader.Update()
    return reader.GetOutput()


def write_legacy(path: Path, kind: str, version: int = 51) -> None:
    import vtkmodules.vtkIOLegacy as legacy

    writer = getattr(legacy, f"{kind}Writer")()
    writer.SetFileName(str(path))
    writer.SetFileTypeToBinary()
    writer.SetFileVersion(version)
    writer.SetInputData(dataset(kind))
    assert writer.Write()


def write_xml(path: Path, kind: str, mode: str) -> None:
    import vtkmodules.vtkIOXML as xml

    writer = getattr(xml, kind.replace("vtk", "vtkXML") + "Writer")()
    writer.SetFileName(str(path))
    getattr(writer, f"SetDataModeTo{mode}")()
    if mode == "Appended":
        writer.EncodeAppendedDataOff()
    writer.SetInputData(dataset(kind))
    assert writer.Write()


@needs_vtk
def test_a_file_that_is_read_ahead_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, damaged = tmp_path / "a.vtk", tmp_path / "b.vtk"
    file.write_text(POLYDATA.replace("a surface", "another surface"))
    damaged.write_text("# vtk")
    for paths in ([], [tmp_path / "none.vtp"], [damaged], [file]):
        vtk.read_ahead(paths).join()
    monkeypatch.delattr(vtk.subprocess, "run")
    check(load_mesh(file))


@needs_vtk
@pytest.mark.parametrize("content", [POLYDATA, "# vtk DataFile Version 3.0"])
def test_no_folder_is_left_if_the_reader_of_a_file_has_ended(tmp_path: Path, content: str) -> None:
    (folder := tmp_path / "copy").mkdir()
    (folder / "mesh.vtk").write_text(content)
    command = vtk._COMMAND  # private, because another process runs it
    done = subprocess.run([sys.executable, "-c", command, folder / "mesh.vtk", *sys.path], capture_output=True)
    assert done.stdout.partition(b"\n")[0] in (b"mesh", b"refused")
    assert not folder.exists()


@needs_vtk
@pytest.mark.parametrize(
    ("kind", "suffix", "version", "modes"),
    [("vtkPolyData", ".vtp", 42, ("Ascii", "Appended")), ("vtkUnstructuredGrid", ".vtu", 51, ("Binary", "Appended"))],
)
def test_files_of_vtk(tmp_path: Path, kind: str, suffix: str, version: int, modes: tuple[str, str]) -> None:
    write_legacy(tmp_path / "a.vtk", kind, version)
    check(load_mesh(tmp_path / "a.vtk"))
    for mode, declaration in zip(modes, (b"", b'<?xml version="1.0"?>\n'), strict=True):
        path = tmp_path / f"{mode}{suffix}"
        write_xml(path, kind, mode)
        check(read(tmp_path / f"b{suffix}.gz", gzip.compress(declaration + path.read_bytes()), tmp_path / "cache"))


@needs_vtk
def test_strips_and_pixels(tmp_path: Path) -> None:
    strip = read(tmp_path / "a.vtk", SURFACE + "POLYGONS 1 4\n3 0 1 3\nTRIANGLE_STRIPS 2 10\n4 0 1 2 4\n4 0 1 1 3\n")
    np.testing.assert_array_equal(strip.faces, [[0, 1, 3], [0, 1, 2], [4, 2, 1]])
    np.testing.assert_array_equal(strip.polygons, [0, 1, 2])
    normals = np.cross(*(strip.verts[strip.faces[1:, i]] - strip.verts[strip.faces[1:, 0]] for i in (1, 2)))
    np.testing.assert_array_equal(normals, [[0, 0, 1], [0, 0, 1]])
    cells = "CELLS 4 16\n4 0 1 2 4\n2 0 1\n4 0 1 2 4\n2 1 3\nCELL_TYPES 4\n8 3 6 3\n"
    mixed = read(tmp_path / "b.vtk", GRID_POINTS + cells)
    np.testing.assert_array_equal(mixed.faces, [[0, 1, 4], [0, 4, 2], [0, 1, 2], [4, 2, 1]])
    np.testing.assert_array_equal(mixed.polygons, [0, 0, 1, 2])


TETRAHEDRON = GRID.replace("CELLS 3 13\n", "CELLS 4 18\n4 0 1 2 3\n").replace("TYPES 3\n", "TYPES 4\n10 ")


REFUSED = {
    "tetrahedron": (TETRAHEDRON, r"1 of its 4 cells are not triangles.*the first is a tetra\. Extract the surface"),
    "lines": (SURFACE + "LINES 1 3\n2 0 1\n", "its cells are lines, expected polygons"),
    "grid": (HEAD + "DATASET STRUCTURED_POINTS\n", "holds STRUCTURED_POINTS, expected POLYDATA or UNSTRUCTURED_GRID"),
    "parallel file": ('<VTKFile type="PPolyData">', "holds PPolyData, expected PolyData or UnstructuredGrid"),
    "no header": ("hello\n", "not a VTK file, or a damaged one: the header should begin with"),
    "no points": (HEAD + "DATASET POLYDATA\n", "the mesh is empty"),
    "index": (POLYDATA.replace("3 0 1 3", "3 0 1 5"), r"face 3 is \[0, 1, 5\], but vertex indices run from 0 to 4"),
    "points are missing": (POLYDATA.replace("POINTS 5", "POINTS 6"), "not a VTK file, or a damaged one"),
    "huge number of points": (POLYDATA.replace("POINTS 5", "POINTS 4000000000000"), "VTK crashes|damaged"),
    "no cell types": (GRID[: GRID.index("CELL_TYPES")], "it has CELLS without CELL_TYPES"),
    "cut off after a number": (POLYDATA[: POLYDATA.index("1 1 0\n") + 3], "not a VTK file, or a damaged one"),
}


@needs_vtk
@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused(tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    polygon_files.refused(tmp_path / "a.vtk", *REFUSED[fault])
    assert capfd.readouterr() == ("", "")  # VTK prints nothing to the terminal


@needs_vtk
def test_damaged_binary_files(tmp_path: Path) -> None:
    """VTK itself crashes on some of these: with SIGSEGV, or because it asks for any amount of memory."""
    path = tmp_path / "a.vtk"
    write_legacy(path, "vtkPolyData", 42)
    whole = path.read_bytes()
    first = whole.index(b"POLYGONS")
    corners = whole.index(b"\n", first) + 1
    polygon_files.refused(path, whole[: first - 20], "not a VTK file, or a damaged one .*Error reading binary data")
    damaged = "not a VTK file, or a damaged one .*Unrecognized keyword"
    polygon_files.refused(path, whole.replace(b"float", b"\xff\xfe"), damaged)
    many = whole[:corners] + b"\x70\0\0\0" + whole[corners + 4 :]
    polygon_files.refused(path, many, r"VTK crashes on it \(SIG|damaged one")
    path = tmp_path / "a.vtu"
    write_xml(path, "vtkUnstructuredGrid", "Ascii")
    text = path.read_text()
    for name, count in (("NumberOfPoints", "999999999"), ("NumberOfCells", "9223372036854775807")):
        changed = text.replace(f'{name}="', f'{name}="{count}', 1)
        assert changed != text
        polygon_files.refused(path, changed, r"VTK crashes on it \(SIG|damaged one|memory|does not finish")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyvista.py").write_text("raise ImportError('No module named pyvista')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    message = r"need the package pyvista .*Install it with: pip install 'diffnet\[pyvista\]'"
    polygon_files.refused(tmp_path / "a.vtk", POLYDATA + "\n\n", message)  # a content that no other test reads


def test_a_failure_that_is_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match=r"the process that reads VTK files failed: .*Traceback"):
        vtk.read_vtk(f"{POLYDATA}\n\n\n".encode())  # a content that no other test reads


@needs_vtk
def test_arrays_of_points_and_cells(tmp_path: Path) -> None:
    """Cells that are no polygons are left out, and each triangle of a strip has the values of its cell."""
    lines, strips = "LINES 1 3\n2 0 1\n", "TRIANGLE_STRIPS 1 5\n4 0 1 2 4\n"
    head = "int 1\nLOOKUP_TABLE default\n"
    cells = f"CELL_DATA 5\nSCALARS part {head}9 1 2 1 4\nSCALARS further {head}5 6 7 8 9\n"
    points = "POINT_DATA 5\nVECTORS wind float\n" + "0 3 4 " * 5
    points += "\nSCALARS rgb unsigned_char 3\nLOOKUP_TABLE default\n" + "255 0 0 " * 5 + "\n"
    place = tmp_path / "a.vtk"
    place.write_text(SURFACE + lines + FACES + strips + cells + points)
    colors, wind, part, further = mesh_arrays(place)
    assert (colors.name, colors.kind, colors.values.tolist()) == ("colors", "colors", [[1, 0, 0]] * 5)
    assert (wind.name, wind.kind, wind.at, wind.summary) == ("wind", "vectors", "vertices", "lengths 5 to 5")
    assert (part.name, part.kind, part.at, part.values.tolist()) == ("part", "labels", "faces", [1, 2, 1, 4, 4])
    assert further.values.tolist() == [6, 7, 8, 9, 9]
    assert load_mesh(place).polygon_count == 5
    grid = GRID.replace("CELLS 3 13\n3 1 4 2", "CELLS 3 12\n2 1 4").replace("5 9 5", "3 9 5")
    place.write_text(grid + f"CELL_DATA 3\nSCALARS part {head}7 8 9\n")
    assert [own.values.tolist() for own in mesh_arrays(place)] == [[8, 9]]
