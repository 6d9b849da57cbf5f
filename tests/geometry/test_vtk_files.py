"""VTK files: legacy .vtk, and XML .vtp and .vtu."""

from __future__ import annotations

import gzip
import locale
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polygon_files import POLYGONS, VERTS, check, read, refused

from diffnet.geometry import load_mesh
from diffnet.geometry.mesh import vtk_files
from diffnet.geometry.mesh.arrays import mesh_arrays

HEAD = "# vtk DataFile Version 3.0\na surface\nASCII\n"
POINTS = "POINTS 5 float\n0 0 0  1 0 0  0 1 0\n0 0 1  1 1 0\n"
FACES = "POLYGONS 3 13\n3 1 4 2\n4 0 1 4 2\n3 0 1 3\n"
POLYDATA = HEAD + "DATASET POLYDATA\n" + POINTS + FACES
GRID = HEAD + "DATASET UNSTRUCTURED_GRID\n" + POINTS + "CELLS 3 13\n3 1 4 2\n4 0 1 4 2\n3 0 1 3\nCELL_TYPES 3\n5 9 5\n"
SCALARS = "POINT_DATA 5\nSCALARS s float 1\nLOOKUP_TABLE default\n1 2 3 4 5\n"

needs_vtk = pytest.mark.usefixtures("_vtk")


@pytest.fixture
def _vtk() -> Iterator[None]:
    pytest.importorskip("vtkmodules", reason="the package vtk is not installed: pip install 'diffnet[vtk]'")
    before = locale.setlocale(locale.LC_ALL)
    yield
    locale.setlocale(locale.LC_ALL, before)  # older VTK that writes a file leaves C, so that text is ASCII


@needs_vtk
def test_legacy_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(read(tmp_path / "a.vtk", POLYDATA + SCALARS))
    check(read(tmp_path / "b.VTK.gz", gzip.compress(GRID.replace("\n", "\r\n").encode())))
    check(read(tmp_path / "c.vtk", POLYDATA.replace("\n", "\r")))
    cloud = read(tmp_path / "d.vtk", HEAD + "DATASET POLYDATA\n" + POINTS + "VERTICES 2 4\n1 4\n1 0\n")
    assert cloud.is_point_cloud
    np.testing.assert_array_equal(cloud.verts, VERTS)
    assert capfd.readouterr() == ("", "")


@needs_vtk
def test_arrays_of_points_and_cells(tmp_path: Path) -> None:
    """Cells that are no polygons are left out, and each triangle of a strip has the values of its cell."""
    lines, strips = "LINES 1 3\n2 0 1\n", "TRIANGLE_STRIPS 1 5\n4 0 1 2 4\n"
    head = "int 1\nLOOKUP_TABLE default\n"
    cells = f"CELL_DATA 5\nSCALARS part {head}9 1 2 1 4\nSCALARS further {head}5 6 7 8 9\n"
    points = "POINT_DATA 5\nVECTORS wind float\n" + "0 3 4 " * 5
    points += "\nSCALARS rgb unsigned_char 3\nLOOKUP_TABLE default\n" + "255 0 0 " * 5 + "\n"
    place = tmp_path / "a.vtk"
    place.write_text(HEAD + "DATASET POLYDATA\n" + POINTS + lines + FACES + strips + cells + points)
    colors, wind, part, further = mesh_arrays(place)
    assert (colors.name, colors.kind, colors.values.tolist()) == ("colors", "colors", [[1, 0, 0]] * 5)
    assert (wind.name, wind.kind, wind.at, wind.summary) == ("wind", "vectors", "vertices", "lengths 5 to 5")
    assert (part.name, part.kind, part.at, part.values.tolist()) == ("part", "labels", "faces", [1, 2, 1, 4, 4])
    assert further.values.tolist() == [6, 7, 8, 9, 9]
    assert load_mesh(place).polygon_count == 5
    grid = GRID.replace("CELLS 3 13\n3 1 4 2", "CELLS 3 12\n2 1 4").replace("5 9 5", "3 9 5")
    place.write_text(grid + f"CELL_DATA 3\nSCALARS part {head}7 8 9\n")
    assert [own.values.tolist() for own in mesh_arrays(place)] == [[8, 9]]


def dataset(kind: str) -> Any:
    """The surface as an object of VTK."""
    from vtkmodules import vtkCommonCore as core
    from vtkmodules import vtkCommonDataModel as model

    data = getattr(model, kind)()
    points = core.vtkPoints()
    for point in VERTS:
        points.InsertNextPoint(point)
    data.SetPoints(points)
    data.Allocate(3)
    for corners in POLYGONS:
        ids = core.vtkIdList()
        for corner in corners:
            ids.InsertNextId(corner)
        data.InsertNextCell(model.VTK_TRIANGLE if len(corners) == 3 else model.VTK_POLYGON, ids)
    return data


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
@pytest.mark.parametrize(
    ("kind", "suffix", "version", "modes"),
    [
        ("vtkPolyData", ".vtp", 42, ("Ascii", "Appended")),
        ("vtkUnstructuredGrid", ".vtu", 51, ("Binary", "Appended")),
    ],
    ids=[".vtp", ".vtu"],
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
    polydata = HEAD + "DATASET POLYDATA\n" + POINTS
    strip = read(tmp_path / "a.vtk", polydata + "POLYGONS 1 4\n3 0 1 3\nTRIANGLE_STRIPS 2 10\n4 0 1 2 4\n4 0 1 1 3\n")
    np.testing.assert_array_equal(strip.faces, [[0, 1, 3], [0, 1, 2], [4, 2, 1]])
    np.testing.assert_array_equal(strip.polygons, [0, 1, 2])
    normals = np.cross(*(strip.verts[strip.faces[1:, i]] - strip.verts[strip.faces[1:, 0]] for i in (1, 2)))
    np.testing.assert_array_equal(normals, [[0, 0, 1], [0, 0, 1]])
    grid = HEAD + "DATASET UNSTRUCTURED_GRID\n" + POINTS
    mixed = read(tmp_path / "b.vtk", grid + "CELLS 4 16\n4 0 1 2 4\n2 0 1\n4 0 1 2 4\n2 1 3\nCELL_TYPES 4\n8 3 6 3\n")
    np.testing.assert_array_equal(mixed.faces, [[0, 1, 4], [0, 4, 2], [0, 1, 2], [4, 2, 1]])
    np.testing.assert_array_equal(mixed.polygons, [0, 0, 1, 2])


TETRAHEDRON = GRID.replace("CELLS 3 13\n", "CELLS 4 18\n4 0 1 2 3\n").replace("TYPES 3\n", "TYPES 4\n10 ")


REFUSED = {
    "tetrahedron": (TETRAHEDRON, r"1 of its 4 cells are not triangles.*the first is a Tetra\. Extract the surface"),
    "lines": (HEAD + "DATASET POLYDATA\n" + POINTS + "LINES 1 3\n2 0 1\n", "its cells are lines, expected polygons"),
    "structured points": (
        HEAD + "DATASET STRUCTURED_POINTS\n",
        "holds STRUCTURED_POINTS, expected POLYDATA or UNSTRUCTURED_GRID",
    ),
    "parallel file": ('<VTKFile type="PPolyData">', "holds PPolyData, expected PolyData or UnstructuredGrid"),
    "no header": ("hello\n", "not a VTK file, or a damaged one: the header should begin with"),
    "no points": (HEAD + "DATASET POLYDATA\n", "the mesh is empty"),
    "index out of range": (
        POLYDATA.replace("3 0 1 3", "3 0 1 5"),
        r"face 3 is \[0, 1, 5\], but vertex indices run from 0 to 4",
    ),
    "points are missing": (POLYDATA.replace("POINTS 5", "POINTS 6"), "not a VTK file, or a damaged one"),
    "huge number of points": (POLYDATA.replace("POINTS 5", "POINTS 4000000000000"), "VTK crashes|damaged"),
    "no cell types": (GRID[: GRID.index("CELL_TYPES")], "it has CELLS without CELL_TYPES"),
    "cut off after a number": (POLYDATA[: POLYDATA.index("1 1 0\n") + 3], "not a VTK file, or a damaged one"),
}


@needs_vtk
@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused(tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    refused(tmp_path / "a.vtk", *REFUSED[fault])
    assert capfd.readouterr() == ("", "")  # VTK prints nothing to the terminal


@needs_vtk
def test_damaged_binary_files(tmp_path: Path) -> None:
    """VTK itself crashes on some of these: with SIGSEGV, or because it asks for any amount of memory."""
    path = tmp_path / "a.vtk"
    write_legacy(path, "vtkPolyData", 42)
    whole = path.read_bytes()
    first = whole.index(b"POLYGONS")
    corners = whole.index(b"\n", first) + 1
    refused(path, whole[: first - 20], "not a VTK file, or a damaged one .*Error reading binary data")
    refused(path, whole.replace(b"float", b"\xff\xfe"), "not a VTK file, or a damaged one$")
    refused(path, whole[:corners] + b"\x70\0\0\0" + whole[corners + 4 :], r"VTK crashes on it \(SIG|damaged one")
    path = tmp_path / "a.vtu"
    write_xml(path, "vtkUnstructuredGrid", "Ascii")
    text = path.read_text()
    for name, count in (("NumberOfPoints", "999999999"), ("NumberOfCells", "9223372036854775807")):
        changed = text.replace(f'{name}="', f'{name}="{count}', 1)
        assert changed != text
        refused(path, changed, r"VTK crashes on it \(SIG|damaged one|memory|does not finish")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vtkmodules.py").write_text("raise ImportError('No module named vtkmodules')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    refused(tmp_path / "a.vtk", POLYDATA, r"need the package vtk .*Install it with: pip install 'diffnet\[vtk\]'")


def test_a_failure_that_is_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match=r"the process that reads VTK files failed: .*Traceback"):
        vtk_files.read_vtk(POLYDATA.encode())
