"""Reading, checking and describing meshes, and their faults."""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import relative
from polygon_files import FAN, POLYGONS, VERTS as CORNERS, ascii_stl, binary_stl, check, lines, read, refused, written
from shapes import arrays, soup

from diffnet.geometry import MeshError, diagnose, load_mesh, make_mesh, mesh_edges, normalize_positions

obj, off, ply = (partial(written, form) for form in ("obj", "off", "ply"))


def binary_ply(polygons: list[list[int]], order: str = "<") -> bytes:
    """Vertices have a color. Faces have a color before their corners and a list after them."""
    header = (
        f"ply\nformat binary_{'little' if order == '<' else 'big'}_endian 1.0\nelement vertex {len(CORNERS)}\n"
        "property double x\nproperty double y\nproperty uchar red\nproperty double z\n"
        f"element face {len(polygons)}\n"
        "property uchar red\nproperty list uchar uint vertex_index\nproperty list int float other\nend_header\n"
    )
    verts = b"".join(struct.pack(order + "ddBd", x, y, 7, z) for x, y, z in CORNERS)
    faces = b"".join(
        struct.pack(f"{order}BB{len(p)}Ii{i % 3}f", 7, len(p), *p, i % 3, *[0.5] * (i % 3))
        for i, p in enumerate(polygons)
    )
    return header.encode() + verts + faces


def triangles(verts: Any) -> list[Any]:
    """The coordinates of the corners of the fan."""
    return [[verts[i] for i in t] for t in FAN]


WRITERS = {".obj": obj, ".off": off, ".ply": ply}


@pytest.mark.parametrize("suffix", WRITERS)
def test_mixed_polygons_become_fans_in_order(tmp_path: Path, suffix: str) -> None:
    text = WRITERS[suffix](CORNERS, POLYGONS)
    check(read(tmp_path / f"a{suffix}", text))
    check(read(tmp_path / f"b{suffix.upper()}", text.replace("\n", "\r\n")))
    check(load_mesh(str(tmp_path / f"a{suffix}")))


@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
def test_binary_ply(tmp_path: Path, order: str) -> None:
    check(read(tmp_path / "a.ply", binary_ply(POLYGONS, order)))
    many = POLYGONS * 300  # plyfile reads runs of equal rows together
    mesh = read(tmp_path / "b.ply", binary_ply(many, order))
    np.testing.assert_array_equal(mesh.faces, FAN * 300)
    np.testing.assert_array_equal(mesh.polygons, np.repeat(np.arange(900), [len(p) - 2 for p in many]))


def test_polygons_of_fewer_than_three_corners_count(tmp_path: Path) -> None:
    mesh = read(tmp_path / "a.off", off(CORNERS, [[0, 1], *POLYGONS]))
    np.testing.assert_array_equal(mesh.polygons, [1, 2, 2, 3])
    assert mesh.polygon_count == 4
    refused(tmp_path / "b.off", off(CORNERS, [[0, 1]]), "none of the 1 polygons")


def test_obj_seams_materials_and_groups_leave_vertices_alone(tmp_path: Path) -> None:
    text = (
        "# a comment\nmtllib some.mtl\no thing\n"
        + lines(CORNERS, "v ")
        + "vt 0 0\nvt 1 0\nvt 0 1\nvn 0 0 1\ng one\nusemtl red\ns off\n"
        + "f 2/1/1 5/2/1 3/3/1 # a comment\n\nl 1 2\ng two\nusemtl blue\n"
        + "f 1/1 2/3 \\\n5/1 3/2\nf 1//1 2//1 4//1\n"
    )
    check(read(tmp_path / "a.obj", text))


def test_obj_negative_indices(tmp_path: Path) -> None:
    """They count back from the last vertex before the face, not from the last vertex of the file."""
    text = lines(CORNERS[:4], "v ") + "f -4 -3 -1\n" + lines(CORNERS[4:], "v ") + "f -4/-1 -1/-1 -3/-1\nf -5 -4 -1 -3\n"
    mesh = read(tmp_path / "a.obj", text)
    np.testing.assert_array_equal(mesh.verts, CORNERS)
    np.testing.assert_array_equal(mesh.faces, [FAN[3], *FAN[:3]])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("OFF\n5 3 0", "OFF 5 3 0"),
        ("OFF\n5 3 0", "OFF # a comment\n\n# another\n5 3"),
        ("OFF\n5 3 0", "COFF\n5 3 0"),
        ("OFF\n5 3 0", "OFF5 3 0"),
        ("OFF\n5 3 0", "off5 3 0"),
        ("OFF\n5 3 0", "COFF5 3"),
        ("OFF\n5 3 0", "Off\n5 3"),
        ("0.0 0 0\n", "\t0.0 0 0   # a comment\n\n"),
        ("3 1 4 2\n", "3 1 4 2 255 0 0\n"),
    ],
)
def test_off_headers_and_comments(tmp_path: Path, old: str, new: str) -> None:
    text = off(CORNERS, POLYGONS)
    assert old in text
    check(read(tmp_path / "a.off", text.replace(old, new, 1)))


def test_stl_corners_are_merged_by_first_appearance(tmp_path: Path) -> None:
    order = [1, 4, 2, 0, 3]  # as they appear in the fan
    expected = np.array(CORNERS)[order]
    renumbered = np.argsort(order)[np.array(FAN)]
    for content in (
        ascii_stl(triangles(CORNERS)),
        ascii_stl(triangles(CORNERS)[:2]) + ascii_stl(triangles(CORNERS)[2:]),
        binary_stl(triangles(CORNERS)),
        binary_stl(triangles(CORNERS), b"a header"),
    ):
        mesh = read(tmp_path / "a.stl", content)
        np.testing.assert_array_equal(mesh.verts, expected)
        np.testing.assert_array_equal(mesh.faces, renumbered)
        assert mesh.polygon_count == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.obj", obj(CORNERS, [])),
        ("a.off", off(CORNERS, [])),
        ("b.off", off(CORNERS, []).replace("OFF\n", "OFF ")),
        ("a.ply", ply(CORNERS, [])),
        ("b.ply", ply(CORNERS, None)),
    ],
)
def test_point_cloud_files(tmp_path: Path, name: str, text: str) -> None:
    mesh = read(tmp_path / name, text)
    assert mesh.is_point_cloud
    np.testing.assert_array_equal(mesh.verts, CORNERS)
    assert (mesh.faces.shape, mesh.polygons.shape, mesh.polygon_count) == ((0, 3), (0,), 0)


@pytest.mark.parametrize("faces", [None, [], (), np.zeros((0, 3)), np.zeros((0, 3), int), torch.zeros(0, 3)])
def test_point_cloud_arrays(faces: Any) -> None:
    mesh = load_mesh((CORNERS, faces))
    assert mesh.is_point_cloud
    assert mesh.faces.shape == (0, 3)
    assert mesh.faces.dtype == np.int64


@pytest.mark.parametrize(
    "convert",
    [
        lambda v, f: (v, f),
        lambda v, f: (np.array(v, np.float32), np.array(f, np.int32)),
        lambda v, f: (np.array(v, np.float64), np.array(f, np.uint16)),
        lambda v, f: (np.asfortranarray(v), np.array(f)[:, ::-1][:, ::-1]),
        lambda v, f: (torch.tensor(v, dtype=torch.float64), torch.tensor(f)),
        lambda v, f: (torch.tensor(v, requires_grad=True), torch.tensor(f, dtype=torch.int32)),
        lambda v, f: (torch.tensor(v, dtype=torch.bfloat16), torch.tensor(f, dtype=torch.uint8)),
        lambda v, f: (np.array(v), torch.tensor(f).T.contiguous().T),
    ],
)
def test_arrays(convert: Any) -> None:
    mesh = load_mesh(convert(CORNERS, FAN))
    np.testing.assert_array_equal(mesh.verts, CORNERS)
    np.testing.assert_array_equal(mesh.faces, FAN)
    np.testing.assert_array_equal(mesh.polygons, range(4))
    assert mesh.verts.dtype == np.float64
    assert mesh.faces.dtype == np.int64
    assert load_mesh(mesh) is mesh
    verts, faces = np.array(CORNERS), np.array(FAN)
    mesh = load_mesh((verts, faces))
    verts[:], faces[:] = 9, 1  # the arrays were copied
    np.testing.assert_array_equal(mesh.verts, CORNERS)
    np.testing.assert_array_equal(mesh.faces, FAN)


def test_trimesh_objects(sphere: trimesh.Trimesh) -> None:
    mesh = load_mesh(sphere)
    np.testing.assert_array_equal(mesh.verts, sphere.vertices)
    np.testing.assert_array_equal(mesh.faces, sphere.faces)
    cloud = load_mesh(trimesh.PointCloud(CORNERS))
    assert cloud.is_point_cloud
    np.testing.assert_array_equal(cloud.verts, CORNERS)


@pytest.mark.parametrize(
    ("verts", "faces", "message"),
    [
        ([[0, 0, np.nan], *CORNERS], None, "NaN or infinite coordinates at 1 of 6 vertices, the first is vertex 0"),
        ([*CORNERS, [np.inf, 0, 0]], FAN, "the first is vertex 5"),
        (np.zeros((4, 2)), None, r"shape is \(4, 2\)$"),
        (np.zeros((3, 8)), None, r"shape is \(3, 8\)\. Pass its transpose"),
        (np.zeros(3), None, r"shape is \(3,\)"),
        (np.zeros((0, 3)), None, "empty"),
        ([], None, "shape|empty"),
        ([[0, 0, 0], [1, 1]], None, "not an array of numbers"),
        ([["a", "b", "c"]], None, "not an array of numbers"),
        (CORNERS, [[0, 1, 5]], r"face 0 is \[0, 1, 5\], but vertex indices run from 0 to 4"),
        (CORNERS, [[0, 1, 2], [0, -1, 2]], r"face 1 is \[0, -1, 2\]"),
        (CORNERS, [[0.0, 1, 2]], "float64"),
        (CORNERS, [["a", "b", "c"]], "integers"),
        (CORNERS, [[0, 1, 2, 5]], r"face 0 is \[0, 1, 2, 5\]"),
        (CORNERS, [[0, 1, 2, 3, 4]], r"shape is \(1, 5\)"),
        (CORNERS, [[0, 0], [1, 1], [2, 3]], r"shape is \(3, 2\)\. Pass its transpose"),
        ([[0, 1e300, 0], *CORNERS], None, "coordinates up to 1e.300 are beyond single precision .* at vertex 0"),
        (CORNERS, [0, 1, 2], r"shape is \(3,\)"),
        (CORNERS, [[0, 1, 2], [0, 1]], "faces"),
        (CORNERS, 5, "faces"),
        (np.array(CORNERS) * 1j, None, r"not an array of numbers \(they are complex\)"),
        (CORNERS, [[0, 1, 2**63]], "faces|face 0"),
    ],
)
def test_bad_arrays(verts: Any, faces: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message) as e:
        make_mesh(verts, faces, name="the name")
    assert str(e.value).startswith("the name: ")


def broken_files() -> dict[str, tuple[str | bytes, str]]:
    """Contents by file name, and a pattern of the expected message."""
    files: dict[str, tuple[str | bytes, str]] = {}
    for suffix in (".obj", ".off", ".ply", ".stl"):
        write = WRITERS.get(suffix, lambda v, _: ascii_stl(triangles(v)))
        files |= {f"empty{suffix}": ("", "empty"), f"blank{suffix}": ("\n \n", "empty")}
        files[f"garbage{suffix}"] = (np.random.default_rng(0).bytes(999), ": ")
        files[f"prose{suffix}"] = ("once upon a time\nthere was a mesh\n", ": ")
        for word in ("nan", "inf", "-inf"):
            message = "NaN or infinite coordinates .* the first is vertex 2"
            files[f"{word}{suffix}"] = (write([*CORNERS[:2], [0, word, 0], *CORNERS[3:]], POLYGONS), message)
        where = {".ply": "row 2: property ", ".stl": "not an STL file, or a damaged one"}.get(suffix, "line ")
        files[f"word{suffix}"] = (write([*CORNERS[:2], [0, "abc", 0], *CORNERS[3:]], POLYGONS), where)
        files[f"short{suffix}"] = (write([*CORNERS[:2], [0, 1], *CORNERS[3:]], POLYGONS), where)
    for suffix, write in WRITERS.items():
        files[f"range{suffix}"] = (write(CORNERS, [*POLYGONS, [0, 5, 1]]), r"face 4 is \[0, 5, 1\]")
        files[f"huge{suffix}"] = (write(CORNERS, [[0, 10**30, 1]]), "row 0" if suffix == ".ply" else "64 bits")
        for index in ("abc", "1.5", "nan"):
            where = "row 1" if suffix == ".ply" else f"line .*{index}"
            files[f"index {index}{suffix}"] = (write(CORNERS, [[0, 1, 2], [0, 1, index]]), where)
    for suffix in (".off", ".ply"):
        whole = WRITERS[suffix](CORNERS, [[0, 1, 2], [0, 12, 3]])  # so that no truncated file is a valid mesh
        start = whole.index("\n0.0 0 0") + 1
        for cut in range(start, len(whole) - 2):
            files[f"cut at {cut}{suffix}"] = (whole[:cut], ": ")
        files[f"negative{suffix}"] = (WRITERS[suffix](CORNERS, [[0, -1, 1]]), r"face 0 is \[0, -1, 1\]")
    binary = binary_ply(POLYGONS)
    files |= {f"binary cut at {cut}.ply": (binary[:cut], ": ") for cut in range(len(binary) - 1, 0, -9)}
    stl = ascii_stl(triangles(CORNERS))
    files |= {
        "four corners.stl": (stl.replace("endloop", "vertex 0 0 0\nendloop", 1), "not an STL file"),
        "zero.obj": (obj(CORNERS, []) + "f 0 1 2\n", "line 6: index 0"),
        "far back.obj": (obj(CORNERS, []) + "f -6 1 2\n", "line 6: index -6"),
        "no vertices.obj": ("f 1 2 3\n", "empty"),
        "no vertices.off": ("OFF\n0 0 0\n", "empty"),
        "no header.off": (off(CORNERS, POLYGONS)[4:], "header should be OFF"),
        "only header.off": ("OFF\n", "ends after its header"),
        "counts.off": ("OFF\n-5 3 0\n", "numbers of vertices and faces, got .-5 3 0"),
        "many.off": (off(CORNERS, POLYGONS).replace("5 3 0", "99999999999 3 0"), "99999999999 vertices"),
        "length.off": (off(CORNERS, []).replace("5 0 0", "5 1 0") + "-3 0 1 2\n", "list of -3"),
        "no x.ply": (ply(CORNERS, POLYGONS).replace("float x", "float u"), "x, y and z"),
        "no corners.ply": (ply(CORNERS, POLYGONS).replace("vertex_indices", "other"), "vertex_indices"),
        "float corners.ply": (ply(CORNERS, POLYGONS).replace("uchar int", "uchar float"), "vertex_indices"),
        "type.ply": (ply(CORNERS, POLYGONS).replace("float x", "quad x"), "line 5"),
        "format.ply": (ply(CORNERS, POLYGONS).replace("ascii", "middle_endian"), "line 2"),
        "strips.ply": (ply(CORNERS, [[0, 1, 2]]).replace("element face", "element tristrips"), "strips"),
        "long list.ply": (binary_ply(POLYGONS).replace(b"\x07\x03\x01\x00", b"\x07\xff\x01\x00"), "row 0"),
    }
    return files


BROKEN = broken_files()


@pytest.mark.parametrize("name", [name for name in BROKEN if "cut at" not in name])
def test_broken_files(tmp_path: Path, name: str) -> None:
    refused(tmp_path / name, *BROKEN[name])


def test_truncated_files(tmp_path: Path) -> None:
    """A file that declares its length is refused wherever it is cut."""
    names = [name for name in BROKEN if "cut at" in name]
    assert len(names) > 100
    for name in names:
        refused(tmp_path / name, BROKEN[name][0], re.escape(name))


def test_binary_nan(tmp_path: Path) -> None:
    verts = np.array(CORNERS)
    verts[4, 1] = np.nan
    refused(tmp_path / "a.stl", binary_stl(triangles(verts)), "NaN")
    content = bytearray(binary_ply(POLYGONS))
    start = content.index(b"end_header\n") + len("end_header\n")
    content[start : start + 8] = struct.pack("<d", np.inf)
    refused(tmp_path / "a.ply", bytes(content), "the first is vertex 0")


def test_edges_against_a_loop(sphere: trimesh.Trimesh) -> None:
    seen = {}
    for face in sphere.faces.tolist():
        for i in range(3):
            seen.setdefault(tuple(sorted((face[i], face[(i + 1) % 3]))), len(seen))
    np.testing.assert_array_equal(mesh_edges(np.array(sphere.faces)), list(seen))
    assert mesh_edges(np.zeros((0, 3), np.int64)).shape == (0, 2)


def test_normalized_positions(sphere: trimesh.Trimesh) -> None:
    verts = np.array(sphere.vertices) * [3, 2, 1] + 7
    unit = normalize_positions(verts)
    np.testing.assert_allclose(unit.mean(0), 0, atol=1e-12)
    assert np.linalg.norm(unit, axis=1).max() == pytest.approx(1)
    assert relative(unit * (np.ptp(verts) / np.ptp(unit)), verts - verts.mean(0)) < 1e-12
    tensor = normalize_positions(torch.tensor(verts, dtype=torch.float32))
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor, unit, atol=1e-6)
    np.testing.assert_array_equal(normalize_positions(verts[:1]), np.zeros((1, 3)))
    np.testing.assert_array_equal(normalize_positions(torch.ones(3, 3)), np.zeros((3, 3)))


def test_diagnosis_of_a_sphere_an_open_surface_and_a_point_cloud(sphere: trimesh.Trimesh, plane: Any) -> None:
    found = diagnose(load_mesh(sphere))
    assert found.faults == []
    assert (found.vertices, found.faces, found.edges) == (642, 1280, 1920)
    assert (found.components, found.euler, found.boundary_edges) == (1, 2, 0)
    assert found.area == pytest.approx(sphere.area)
    found = diagnose(load_mesh(plane))
    assert (found.faults, found.boundary_edges, found.euler) == ([], 40, 1)
    found = diagnose(load_mesh(([*CORNERS, CORNERS[0]], None)))
    assert (found.vertices, found.faces, found.edges, found.components, found.euler, found.area) == (6, 0, 0, 0, 0, 0)
    assert found.faults == ["vertices at the position of another: 1"]


TRIANGLES = [[0, 1, 2], [0, 2, 3]]
SQUARE = [[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("verts", "faces", "field", "count"),
    [
        (SQUARE, [*TRIANGLES, [0, 2, 4], [3, 2, 5], [6, 2, 3]], "non_manifold_edges", 2),
        (SQUARE, [[0, 1, 2], [0, 3, 2]], "misoriented_edges", 1),
        (SQUARE, [*TRIANGLES, [1, 1, 2], [3, 3, 3]], "degenerate_faces", 2),
        (SQUARE, [[0, 1, 2], [0, 2, 6], [3, 0, 7]], "zero_area_faces", 1),
        (SQUARE, [*TRIANGLES, [2, 1, 0], [1, 2, 0], [3, 0, 2]], "duplicate_faces", 3),
        (SQUARE, [[0, 1, 2]], "unreferenced_vertices", 1),
        ([*SQUARE, SQUARE[1], SQUARE[1]], [*TRIANGLES, [4, 5, 3]], "coincident_vertices", 2),
        ([*SQUARE, *np.array(SQUARE) + 5], [*TRIANGLES, [4, 5, 6]], "components", 2),
    ],
)
def test_diagnosis_counts(verts: Any, faces: Any, field: str, count: int) -> None:
    extra = [[0.5, 0.5, 1.0], [0.5, 0.5, -1], [0.5, 0.5, 0], [-1, 0.5, 0]]  # vertices 4 to 7
    verts = [*verts, *extra][: max(len(verts), np.max(faces) + 1)]
    found = diagnose(load_mesh((verts, faces)))
    assert getattr(found, field) == count
    clean = diagnose(load_mesh((SQUARE, TRIANGLES)))
    assert getattr(clean, field) == (1 if field == "components" else 0)
    if field != "components":
        assert any(fault.endswith(f": {count}") for fault in found.faults)


def test_a_vertex_that_no_face_uses_makes_no_face_small(sphere: trimesh.Trimesh) -> None:
    found = diagnose(make_mesh([*sphere.vertices, [1e6, 0, 0]], sphere.faces))
    assert (found.zero_area_faces, found.unreferenced_vertices) == (0, 1)


def test_diagnosis_of_a_triangle_soup(sphere: trimesh.Trimesh) -> None:
    """Each face has its own three vertices. Two spheres are left if they are joined."""
    both = trimesh.util.concatenate([sphere, sphere.copy().apply_translation([5, 0, 0])])
    found = diagnose(load_mesh(soup(arrays(both))))
    assert (found.components, found.joined_components, found.coincident_vertices) == (2560, 2, 3 * 2560 - 2 * 642)
    assert "components, of 2560, that joining these vertices would leave: 2" in found.faults
    connected = diagnose(load_mesh(both))
    assert (connected.components, connected.joined_components) == (2, 2)
    assert connected.faults == []
    # Joining two copies of one sphere is possible, too, although no face is separate.
    twice = diagnose(load_mesh(trimesh.util.concatenate([sphere, sphere])))
    assert (twice.components, twice.joined_components) == (2, 1)
