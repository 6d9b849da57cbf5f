"""Colors and properties of mesh files."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from diffnet.geometry import MeshError, load_attributes, load_mesh

POINTS = ["0 0 0", "1 0 0", "0 1 0"]
COLORS = [[1, 0, 0], [0, 1, 0.2], [0, 0, 1]]


def text(rows: Iterable[str]) -> str:
    return "\n".join(rows) + "\n"


def obj(colors: list[str]) -> str:
    return text([*(f"v {p} {c}" for p, c in zip(POINTS, colors, strict=True)), "f 1 2 3"])


def off(colors: list[str], header: str = "COFF", between: str = "") -> str:
    return text([header, "3 1 0", *(f"{p} {between} {c}" for p, c in zip(POINTS, colors, strict=True)), "3 0 1 2"])


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
def test_colors_of_text_files(
    tmp_path: Path, name: str, content: Callable[[list[str]], str], colors: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(content(colors))
    np.testing.assert_allclose(load_attributes(path).colors, COLORS)
    assert len(load_mesh(path).verts) == 3


def test_files_without_colors(tmp_path: Path) -> None:
    for name, content in (("a.obj", obj([""] * 3)), ("a.off", off([""] * 3, "OFF")), ("b.obj", obj(["0.5"] * 3))):
        (tmp_path / name).write_text(content)
        found = load_attributes(tmp_path / name)
        assert found.colors is None
        assert found.vertices == found.faces == {}


PLY = """ply
format ascii 1.0
element vertex 3
property float x
property float y
property float z
property {kind} red
property {kind} green
property {kind} blue
property double quality
element face 1
property list uchar int vertex_indices
property int label
end_header
0 0 0 {a} 0.5
1 0 0 {b} -2
0 1 0 {c} 7
3 0 1 2 9
"""


@pytest.mark.parametrize(("kind", "colors"), [("uchar", WHOLE), ("float", UNIT), ("int", WHOLE)])
def test_properties_of_ply_files(tmp_path: Path, kind: str, colors: list[str]) -> None:
    path = tmp_path / "a.ply"
    path.write_text(PLY.format(kind=kind, **dict(zip("abc", colors, strict=True))))
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
        ("a.obj", obj(["1 0 0", "0 300 0", "0 0 1"]), "that of vertex 1 is [0.0, 300.0, 0.0]"),
        ("a.obj", obj(["1 0 0", "0 -1 0", "0 0 1"]), "that of vertex 1 is [0.0, -1.0, 0.0]"),
        ("a.off", off(["1 0 0", "nan 0 0", "0 0 1"]), "that of vertex 1 is [nan, 0.0, 0.0]"),
        ("a.obj", obj(["1 0 0", "0 x 0", "0 0 1"]), "'x' is not a number"),
        ("a.ply", "ply\nformat ascii 1.0\n", "a.ply: the file can't be read"),
        ("a.ply", "", "a.ply: the file can't be read"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(MeshError) as caught:
        load_attributes(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(MeshError, match=r"missing\.ply: no such file"):
        load_attributes(tmp_path / "missing.ply")


def test_other_formats_have_none(tmp_path: Path) -> None:
    (tmp_path / "a.stl").write_text(
        "solid s\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendloop\nendfacet\n"
        "endsolid\n"
    )
    assert load_attributes(tmp_path / "a.stl").colors is None
    assert load_attributes(str(tmp_path / "a.stl")).vertices == {}
