"""Files that lead elsewhere, that need more memory than their size says, or that only Python would read."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import tracemalloc
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote

import numpy as np
import pytest
from polygon_files import VERTS, check, read, refused

from diffnet.geometry import load_mesh
from diffnet.geometry.mesh import formats, text

POINTS = "0 0 0\n1 0 0\n0 1 0\n"
OFF = "OFF 3 {count} 0\n" + POINTS
PLY = (
    "ply\nformat {form} 1.0\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
    "element face {count}\nproperty list {length} int vertex_indices\nend_header\n"
)
ASCII_PLY = PLY.replace("{form}", "ascii").replace("{length}", "int") + POINTS
OBJ = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"
FACET = "facet normal 0 0 1\nouter loop\nvertex {}\nvertex 1 0 0\nvertex 0 1 0\nendloop\nendfacet\n"
STL = f"solid\n{FACET}endsolid"
LIMIT = "DIFFNET_MAX_UNPACKED_GIB"


def gltf(uris: list[str], nodes: int = 1) -> str:
    """A triangle whose positions are in the first buffer."""
    return json.dumps(
        {
            "asset": {"version": "2.0"},
            "scene": 0,
            "scenes": [{"nodes": list(range(nodes))}],
            "nodes": [{"mesh": 0, "translation": [i, 0, 0]} for i in range(nodes)],
            "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}],
            "accessors": [{"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"}],
            "bufferViews": [{"buffer": 0, "byteLength": 36}],
            "buffers": [{"uri": uri, "byteLength": 36} for uri in uris],
        }
    )


BUFFER = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32).tobytes()
INSIDE = "data:application/octet-stream;base64," + base64.b64encode(BUFFER).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with buffers in it and below it, beside others that are out of bounds. Links lead to all of them."""
    inside = tmp_path / "inside"
    (inside / "below").mkdir(parents=True)
    (tmp_path / "inside too").mkdir()
    for path in (inside / "a b.bin", inside / "below" / "c.bin", tmp_path / "d.bin", tmp_path / "inside too" / "e.bin"):
        path.write_bytes(BUFFER)
    (inside / "link.bin").symlink_to(inside / "a b.bin")
    (inside / "out.bin").symlink_to(tmp_path / "d.bin")
    (inside / "out").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(inside)
    return inside


@pytest.mark.parametrize("uri", ["a b.bin", "a%20b.bin", "./below/c.bin", "below/../a b.bin", "link.bin", INSIDE])
def test_buffers_in_the_folder_are_read(folder: Path, uri: str) -> None:
    for place in (folder, folder.parent / "linked"):
        assert len(read(place / "a.gltf", gltf([uri])).faces) == 1


@pytest.mark.parametrize(
    "uri",
    [
        "../d.bin",
        "%2e%2e/d.bin",
        "..%2Fd.bin",
        "below/../../d.bin",
        "../inside too/e.bin",
        "out.bin",
        "out/d.bin",
        "../../../gone",
        "{folder}/../d.bin",
        "file://{quoted}/a%20b.bin",
        "FILE:a b.bin",
        "https://example.org/a.bin",
    ],
)
def test_buffers_elsewhere_are_refused(folder: Path, uri: str) -> None:
    uri = uri.format(folder=folder, quoted=quote(str(folder)))
    refused(folder / "a.gltf", gltf([uri]), r"its buffer .* leads out of the folder .*inside\. Put the buffer there")


def test_a_buffer_that_links_to_itself_and_glb_that_reads_no_other_file(folder: Path) -> None:
    (folder / "loop.bin").symlink_to("loop.bin")
    refused(folder / "a.gltf", gltf(["loop.bin"]), r"its buffer .*loop\.bin is missing")
    data = gltf(["a b.bin"]).encode()
    data += b" " * (-len(data) % 4)
    refused(folder / "a.glb", struct.pack("<5I", 0x46546C67, 2, 20 + len(data), len(data), 0x4E4F534A) + data, "glTF")


@pytest.mark.parametrize("uris", [[INSIDE], ["a b.bin"] * 900], ids=["one-mesh-many-times", "one-buffer-many-times"])
def test_gltf_that_is_larger_than_its_file(folder: Path, uris: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = gltf(uris, nodes=400 if len(uris) == 1 else 1)
    read(folder / "a.gltf", data)
    monkeypatch.setenv(LIMIT, str(25_000 / 2**30))
    refused(folder / "b.gltf", data, f"set the environment variable {LIMIT} to a larger number")
    read(folder / "c.gltf", gltf(["a b.bin"]))


def test_the_limit_of_gzip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is refused takes no memory."""
    bomb = gzip.compress(OBJ.encode() * 10**4)
    read(tmp_path / "a.obj.gz", bomb)
    monkeypatch.setenv(LIMIT, "0.0001")
    message = rf"more than 0\.0001 GiB when unpacked\. .*environment variable {LIMIT} to a la"
    refused(tmp_path / "b.obj.gz", bomb, message)
    monkeypatch.setenv(LIMIT, "0.03")
    zeros = gzip.compress(bytes(2**26))
    tracemalloc.start()
    refused(tmp_path / "zeros.obj.gz", zeros, "more than 0.03 GiB")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    for wrong in ("0", "-1", "nan", "2 GiB", ""):
        monkeypatch.setenv(LIMIT, wrong)
        refused(tmp_path / "c.obj.gz", bomb, f"{LIMIT} should be a number above 0, got '{wrong}'")
    assert len(read(tmp_path / "c.obj", OBJ).verts) == 3  # files that aren't compressed have no limit


TRIANGLES = 4_000
LEAN = {
    "vertices.obj": OBJ * TRIANGLES,
    "faces.obj": OBJ + "f 1 2 3\n" * TRIANGLES,
    "mixed.obj": OBJ + "vn 0 0 1\n" + "f 1//1 2//1 3//1\nf 1 2 3 1\n" * (TRIANGLES // 2),
    "faces.off": OFF.format(count=TRIANGLES) + "3 0 1 2\n" * TRIANGLES,
    "mixed.off": OFF.format(count=TRIANGLES) + "3 0 1 2\n4 0 1 2 0\n" * (TRIANGLES // 2),
    "faces.ply": ASCII_PLY.format(count=TRIANGLES) + "3 0 1 2\n" * TRIANGLES,
    "mixed.ply": ASCII_PLY.format(count=TRIANGLES) + "3 0 1 2\n4 0 1 2 0\n" * (TRIANGLES // 2),
    "empty lists.ply": ASCII_PLY.format(count=2 * TRIANGLES) + "0\n" * TRIANGLES + "3 0 1 2\n" * TRIANGLES,
    "ascii.stl": STL.format("0 0 0") * (TRIANGLES // 8),
}


@pytest.mark.parametrize("name", LEAN)
def test_memory_is_a_small_multiple_of_the_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(LEAN[name])
    load_mesh(path)  # imports modules
    tracemalloc.start()
    try:
        load_mesh(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(LEAN[name])


def test_a_line_of_many_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_LINE", 1000)
    for data in (OBJ + "f" + " 1" * 600, OBJ + "f 1 \\\n" * 600):
        refused(tmp_path / "a.obj", data, r"line \d+ has more than 1000 characters")


def test_a_header_of_many_properties(tmp_path: Path) -> None:
    properties = "".join(f"property double p{i}\n" for i in range(20_000))
    data = PLY.format(form="ascii", count=0, length="int").replace("vertex 3\n", "vertex 300000\n" + properties)
    refused(tmp_path / "a.ply", data + POINTS, "declares 300000 rows of element 'vertex', .* with 20003 properties")


def test_memory_that_runs_out_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.READERS, ".obj", formats.Reader(Mock(side_effect=MemoryError)))
    refused(tmp_path / "a.obj", OBJ, "its 24 bytes need more memory than there is")


@pytest.mark.parametrize("number", ["1_0", "\u0661", "\uff11"], ids=["grouped", "arabic", "wide"])
def test_numbers_that_only_python_reads(tmp_path: Path, number: str) -> None:
    for name, data, place in (
        ("a.obj", OBJ + f"v 0 0 {number}\n", "line 4: "),
        ("b.obj", OBJ * 5 + f"f 1 2 {number}\n", "line 16: "),
        ("c.obj", OBJ * 5 + f"vn 0 0 1\nf 1//{number} 2//1 3//1\n", "line 17: "),
        ("a.off", OFF.format(count=1).replace("1 0 0", f"{number} 0 0") + "3 0 1 2\n", "line 3: "),
        ("b.off", OFF.format(count=1) + f"3 0 1 {number}\n", "line 5: "),
        ("c.off", OFF.format(count=number), "numbers of vertices and faces"),
        ("a.ply", ASCII_PLY.format(count=1).replace("1 0 0", f"{number} 0 0") + "3 0 1 2\n", "row 1: property 'x': "),
        ("b.ply", ASCII_PLY.format(count=1) + f"3 0 1 {number}\n", "row 0: property 'vertex_indices': "),
        ("c.ply", ASCII_PLY.format(count=number), "line 7: "),
        ("a.stl", STL.format(f"0 0 {number}"), "not an STL file, or a damaged one"),
    ):
        refused(tmp_path / name, data, place + (f".*'{number}" if name[0] != "c" or name == "c.obj" else ""))


def test_names_may_be_in_any_script(tmp_path: Path) -> None:
    named = f"mtllib m_1.mtl\no \u0661_0\n{OBJ}usemtl caf\u00e9_1\nf 1 2 3 # 1_0\n"
    assert len(read(tmp_path / "a.obj", named).faces) == 1


@pytest.mark.parametrize("suffix", [".off", ".ply"])
@pytest.mark.parametrize("other", ["3 0 1 2\n", "4 0 1 2 0\n"], ids=["one-size", "two-sizes"])
def test_indices_written_as_floats(tmp_path: Path, suffix: str, other: str) -> None:
    """What is read depends on no other polygon, and not on the version of NumPy."""
    head = (OFF if suffix == ".off" else ASCII_PLY).format(count=2)
    np.testing.assert_array_equal(read(tmp_path / f"a{suffix}", f"{head}3 0 1.0 2e0\n{other}").faces[0], [0, 1, 2])
    for index in ("1.9", "1e-9", "nan", "inf"):
        refused(tmp_path / f"b{suffix}", f"{head}3 0 1 {index}\n{other}", f"'{index}' is not a whole number")


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("form", ["ascii", "binary_little_endian", "binary_big_endian"])
def test_lists_of_negative_length(tmp_path: Path, form: str, first: bool) -> None:
    order = ">" if form.endswith("big_endian") else "<"
    head = PLY.format(form=form, count=2, length="char")
    faces = [(-3, 0, 1, 2), (3, 0, 1, 2)][:: 1 if first else -1]
    if form == "ascii":
        data = (head + POINTS + "".join(" ".join(map(str, face)) + "\n" for face in faces)).encode()
    else:
        corners = np.array(VERTS[:3], f"{order}f4").tobytes()
        data = head.encode() + corners + b"".join(struct.pack(f"{order}b3i", *face) for face in faces)
    row = 0 if first else 1
    refused(tmp_path / "a.ply", data, f"element 'face': row {row}: property 'vertex_indices': a list of -3")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("property float y\n", "property float y\n" * 2, "line 6: .* the same name, got 'property float y'"),
        ("element face", "element vertex", "line 7: expected 'element NAME COUNT' with a new name"),
        ("list int", "list float", "line 8: the length of a list should be an integer"),
        ("format", "fmt", "line 2: this line is not expected here, got 'fmt ascii 1.0'"),
        ("end_header\n", "", "no line 'end_header'"),
        ("0 1 0\n", "0 1 0 7\n", "element 'vertex': row 2: 4 numbers in the line, expected 3"),
        ("0 1 0\n", "0 1\n", "element 'vertex': row 2: property 'z': the line ends here"),
        ("0 1 0\n3 0 1 2\n", "0 1 0\n", "element 'face': row 0: the file ends here"),
        ("3 0 1 2\n", "3 0 1 99999999999\n", "row 0: .*99999999999 is not from -2147483648 to 2147483647"),
    ],
)
def test_damaged_ply(tmp_path: Path, old: str, new: str, message: str) -> None:
    whole = ASCII_PLY.format(count=1) + "3 0 1 2\n"
    assert old in whole
    refused(tmp_path / "a.ply", whole.replace(old, new, 1), message)


def test_ply_with_several_lists_and_other_elements(tmp_path: Path) -> None:
    """Another element stands before the faces, and faces have two lists."""
    edge = "element edge 2\nproperty int a\nproperty list uchar float b\n"
    text = ASCII_PLY.format(count=3).replace("element face", f"{edge}element face")
    text = text.replace("end_header", "property list uchar uchar flags\nproperty ushort label\nend_header")
    edges, faces = "7 1 0.5\n8 0\n", "3 1 4 2 0 5\n4 0 1 4 2 2 9 9 6\n3 0 1 3 1 1 7\n"
    text = text.replace("vertex 3", "vertex 5").replace(POINTS, "0 0 0\n1 0 0\n0 1 0\n0 0 1\n1 1 0\n")
    check(read(tmp_path / "a.ply", text + edges + faces))
    header = text[: text.index("end_header\n") + len("end_header\n")].replace("ascii", "binary_big_endian")
    binary = header.encode() + np.array(VERTS, ">f4").tobytes() + struct.pack(">iBf iB", 7, 1, 0.5, 8, 0)
    binary += struct.pack(">i3iBH", 3, 1, 4, 2, 0, 5) + struct.pack(">i4iB2BH", 4, 0, 1, 4, 2, 2, 9, 9, 6)
    check(read(tmp_path / "b.ply", binary + struct.pack(">i3iBBH", 3, 0, 1, 3, 1, 1, 7)))


@pytest.mark.parametrize("other", ["300 " + "0 1 2 " * 100, "3 0 1 2"], ids=["one-size", "two-sizes"])
def test_ascii_lists_longer_than_their_type_says(tmp_path: Path, other: str) -> None:
    text = ASCII_PLY.replace("list int", "list uchar").format(count=2) + "300 " + "0 1 2 " * 100
    mesh = read(tmp_path / "a.ply", f"{text}\n{other}\n")
    assert len(mesh.faces) == 298 + (298 if other.startswith("300") else 1)


def test_stl_takes_no_version_of_trimesh_into_account(tmp_path: Path) -> None:
    message = "not an STL file, or a damaged one: a vertex with 4 coordinates"
    refused(tmp_path / "a.stl", STL.format("0 0 0 0"), message)
    several = "solid vertex of a facet\nFACET NORMAL 0 0 1\n OUTER LOOP\n  VERTEX 0 0 0\n VERTEX 1 0 0\n VERTEX 0 1 0\n"
    mesh = read(tmp_path / "b.stl", several + "ENDLOOP\nENDFACET\nENDSOLID vertex\n")
    np.testing.assert_array_equal(mesh.verts, [[0, 0, 0], [1, 0, 0], [0, 1, 0]])
