"""Files of surfaces: interactive pages, and colored PLY files with labels and scalars."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
import trimesh
from refusals import refused

from diffnet.geometry import load_mesh, make_mesh, mesh_edges
from diffnet.viz import Page, page, write_ply
from diffnet.viz.fields import make_field
from diffnet.viz.palette import UNLABELED_COLOR, colorize, label_colors
from diffnet.viz.surface import surface_of

NASTY = "</script><script>alert('ü \"1\" & <!-- {{data}} \\ \u2028')</script>"


@pytest.fixture(scope="module")
def ball() -> tuple[np.ndarray, np.ndarray]:
    mesh = trimesh.creation.icosphere(subdivisions=1)
    return np.asarray(mesh.vertices) + np.array([100, 0, 0]), np.asarray(mesh.faces)


def data_of(shown: Page) -> dict[str, Any]:
    """The data in a page."""
    content = re.search(r'<script type="application/json" id="data">(.*?)</script>', shown.html, re.S)[1]
    return json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def test_the_page_holds_the_surfaces(ball: tuple[np.ndarray, np.ndarray]) -> None:
    verts, faces = ball
    prediction, truth = np.arange(len(verts)) % 5 - 1, np.arange(len(verts)) % 300
    data = data_of(
        page(
            [ball, (verts, None)],
            labels=[{"prediction": prediction, "truth": truth}, {"truth": truth}],
            label_names=["a", "b"],
            titles=["ball", "cloud"],
        )
    )
    mesh, cloud = data["items"]
    assert (mesh["title"], cloud["title"]) == ("ball", "cloud")
    positions = array(mesh["positions"], "<f4").reshape(-1, 3)
    np.testing.assert_allclose(positions, verts - [100, 0, 0], atol=1e-6)
    assert mesh["radius"] == pytest.approx(1)
    assert not mesh["wideIndices"]
    np.testing.assert_array_equal(array(mesh["faces"], "<u2").reshape(-1, 3), faces)
    normals = array(mesh["normals"], np.int8).reshape(-1, 3, 3) / 127
    np.testing.assert_allclose(normals, (verts - [100, 0, 0])[faces], atol=0.05)
    assert [s["name"] for s in mesh["sets"]] == ["prediction", "truth"]
    np.testing.assert_array_equal(array(mesh["sets"][0]["values"], "<i4"), prediction)
    np.testing.assert_array_equal(array(mesh["sets"][1]["values"], "<i4"), truth)
    assert cloud["faces"] == ""
    assert data["names"] == {"truth": ["a", "b"], "prediction": ["a", "b"]}
    colors = array(data["colors"], np.uint8).reshape(-1, 3)
    np.testing.assert_array_equal(colors, label_colors(truth.max() + 1))  # also for labels without a name


def test_scalars_colors_and_arrows(ball: tuple[np.ndarray, np.ndarray]) -> None:
    verts, faces = ball
    height = verts[:, 1].copy()
    height[0] = np.nan
    data = data_of(
        page(
            ball,
            scalars={"height (m)": height, "area": np.arange(len(faces))},
            colors=np.tile([255, 128, 1], (len(verts), 1)),
            vectors=verts - [100, 0, 0],
            color_map={"height (m)": "coolwarm"},
            range={"area": (0, 40)},
        )
    )
    (item,) = data["items"]
    assert [(s["name"], s["kind"], s["at"]) for s in item["sets"]] == [
        ("height (m)", "scalars", "vertices"),
        ("area", "scalars", "faces"),
        ("colors", "colors", "vertices"),
    ]
    np.testing.assert_array_equal(array(item["sets"][0]["values"], "<f4"), height.astype("f4"))
    np.testing.assert_array_equal(array(item["sets"][2]["values"], "<i4"), 0xFF8001)
    scale = data["scales"]["height (m)"]
    assert scale["low"] == -scale["high"] == -np.nanmax(np.abs(height))
    assert (data["scales"]["area"]["low"], data["scales"]["area"]["high"]) == (0, 40)
    assert [tick["text"] for tick in data["scales"]["area"]["ticks"]] == ["0", "10", "20", "30", "40"]
    assert len(array(scale["table"], np.uint8)) == 3 * 256
    (arrows,) = item["arrows"].values()  # beside all values
    reach = array(arrows["positions"], "<f4").reshape(-1, 3)
    assert np.linalg.norm(reach, axis=1).max() == pytest.approx(item["radius"])
    assert item["radius"] > 1.05


def test_arrows_and_places_by_name(ball: tuple[np.ndarray, np.ndarray]) -> None:
    verts, faces = ball
    same = verts[:40], faces[(faces < 40).all(1)][:40]  # as many vertices as faces
    values = {"height": np.arange(40.0), "area": np.arange(40.0)}
    field = {"height": np.tile([0.0, 0, 1], (40, 1))}
    (item,) = data_of(page(same, scalars=values, at={"area": "faces"}, vectors=field))["items"]
    assert [(s["name"], s["at"]) for s in item["sets"]] == [("height", "vertices"), ("area", "faces")]
    assert list(item["arrows"]) == ["height"]
    with pytest.raises(ValueError, match="vectors: there are no values named 'depth'"):
        page(same, scalars=values, vectors={"depth": field["height"]})


def test_a_surface_without_values_has_one_color(ball: tuple[np.ndarray, np.ndarray]) -> None:
    (item,) = data_of(page(ball))["items"]
    (only,) = item["sets"]
    assert (only["name"], only["kind"]) == ("", "colors")
    assert len(np.unique(array(only["values"], "<i4"))) == 1
    assert item["title"] == "Shape 1"


def test_edges_come_with_the_sides_of_faces(ball: tuple[np.ndarray, np.ndarray]) -> None:
    _, faces = ball
    edges = mesh_edges(faces)
    (item,) = data_of(page(ball, labels={"truth": np.arange(len(edges))}))["items"]
    sides = array(item["elements"], "<u4").reshape(-1, 3)
    np.testing.assert_array_equal(edges[sides[:, 0]], np.sort(faces[:, 1:], axis=1))
    assert item["sets"][0]["at"] == "edges"


def test_page_is_self_contained(tmp_path: Path, ball: tuple[np.ndarray, np.ndarray]) -> None:
    shown = page(ball, labels=np.zeros(42, int))
    outside = r"https?:|//[a-z]|@import|url\(|<link|<img|\bsrc=|\bhref=|import\(|fetch\(|XMLHttp"
    assert not re.findall(outside, shown.html)
    assert "default-src 'none'" in shown.html
    assert "{{" not in shown.html
    assert "<noscript>" in shown.html  # it names missing features of a browser
    assert "needs WebGL 2" in shown.html
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == shown.html
    assert len(list(tmp_path.iterdir())) == 1


def test_notebooks_show_the_page_in_a_frame(ball: tuple[np.ndarray, np.ndarray]) -> None:
    shown = page(ball, heading=NASTY)
    frame = shown._repr_html_()  # the method that notebooks call
    source = re.fullmatch(r'<iframe srcdoc="([^"]*)" [^<>]*></iframe>', frame)[1]
    assert html.unescape(source) == shown.html


def test_text_is_escaped(ball: tuple[np.ndarray, np.ndarray]) -> None:
    verts, _ = ball
    labels = {NASTY: np.zeros(len(verts), int)}
    shown = page(ball, labels=labels, label_names=[NASTY], titles=NASTY, heading=NASTY)
    assert (shown.html.count("<script"), shown.html.count("</script")) == (2, 2)
    assert "<script>alert" not in shown.html
    assert shown.html.count("&lt;/script&gt;&lt;script&gt;alert(") == 2  # in the title and the heading
    data = data_of(shown)
    assert data["names"] == {NASTY: [NASTY]}
    assert data["items"][0]["title"] == data["items"][0]["sets"][0]["name"] == NASTY
    assert "innerHTML" not in shown.html


def test_faces_without_area_are_left_out() -> None:
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]])
    (item,) = data_of(page((verts, [[0, 1, 2], [2, 2, 2]]), labels=np.arange(2)))["items"]
    assert item["radius"] == pytest.approx(np.sqrt(0.5))
    normals = array(item["normals"], np.int8).reshape(2, 3, 3)
    np.testing.assert_array_equal(normals[0], [[0, 0, 127]] * 3)
    np.testing.assert_array_equal(normals[1], 0)


def test_bad_input_is_named(tmp_path: Path, ball: tuple[np.ndarray, np.ndarray]) -> None:
    refused(ValueError, "empty list", page, [])
    with pytest.raises(ValueError, match="truth: 2 values do not fit 42 vertices, 80 faces or 120 edges"):
        page(ball, labels={"truth": [1, 2]})
    for name, value in (("at", "faces"), ("range", (0, 1)), ("color_map", "viridis"), ("label_names", ["x"])):
        with pytest.raises(ValueError, match=f"{name}: there are no values named 'hieght'"):
            page(ball, labels={"a": np.zeros(42, int)}, scalars={"height": np.zeros(42)}, **{name: {"hieght": value}})
    with pytest.raises(ValueError, match="a page shows labels up to 2147483647, got 2147483648"):
        page(ball, labels=np.full(42, 2**31))
    with pytest.raises(ValueError, match="two fields have one name: a, a"):
        page(ball, labels={"a": np.zeros(42, int)}, scalars={"a": np.zeros(42)})
    refused(FileNotFoundError, "missing", page(ball).save, tmp_path / "missing" / "page.html")


# ---- colored PLY files ----


def ply_element(path: Path, element: str) -> np.ndarray:
    """The columns of one element of a PLY file, from another reader. Nothing follows the elements."""
    with path.open("rb") as file:
        table = plyfile.PlyData.read(file)[element].data
        assert not file.read()
    return table


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "points"])
def test_ply_round_trip(tmp_path: Path, at: str) -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    verts, faces = np.asarray(ball.vertices), np.asarray(ball.faces)
    count = {"vertices": len(verts), "faces": len(faces), "edges": len(mesh_edges(faces)), "points": len(verts)}[at]
    labels = np.random.default_rng(0).integers(-1, 300, count)
    path = tmp_path / "out.ply"
    shape = verts, None if at == "points" else faces
    write_ply(path, shape, labels=labels, at=None if at == "points" else at)
    assert [p.name for p in tmp_path.iterdir()] == ["out.ply"]

    table = ply_element(path, "face" if at == "faces" else "vertex")
    if at == "edges":
        labels = table["label"]
    np.testing.assert_array_equal(table["label"], labels)
    np.testing.assert_array_equal(np.stack([table[c] for c in ("red", "green", "blue")], 1), colorize(labels))

    write_ply(tmp_path / "plain.ply", shape)
    for again in (load_mesh(path), load_mesh(tmp_path / "plain.ply")):
        np.testing.assert_array_equal(again.verts, verts)
        np.testing.assert_array_equal(again.faces, np.zeros((0, 3)) if at == "points" else faces)
    loaded = trimesh.load(path, process=False)
    kind = "face_colors" if at == "faces" else "vertex_colors"
    colors = loaded.colors if at == "points" else getattr(loaded.visual, kind)
    np.testing.assert_array_equal(colors[:, :3], colorize(labels))


def test_ply_of_edges_takes_the_most_frequent_label(tmp_path: Path) -> None:
    faces = np.array([[0, 1, 2], [0, 2, 3]])  # edges 01 12 02 23 03
    for labels, expected in (([5, 2, 5, 2, 7], [5, 2, 2, 2]), ([-1, -1, -1, 4, 9], [9, -1, 4, 4])):
        write_ply(tmp_path / "out.ply", (np.eye(5, 3), faces), labels=labels, at="edges")
        assert ply_element(tmp_path / "out.ply", "vertex")["label"].tolist() == [*expected, -1]


def test_names_and_numbers_of_labels(tmp_path: Path) -> None:
    path, faces = tmp_path / "out.ply", np.array([[0, 1, 2], [0, 2, 3]])
    labels = [0, 2, -1, 1]
    given = {"label_names": ["arm", "Fuß\n links", "13"], "label_numbers": [11, -5, 13]}
    write_ply(path, (np.eye(4, 3), faces), labels=labels, **given)
    found = plyfile.PlyData.read(path)
    assert found.comments == ["label 11 arm", r"label -5 Fu\xdf links"]
    assert found["vertex"]["label"].tolist() == [11, 13, -1, -5]
    assert found["vertex"]["label_index"].tolist() == labels
    colors = np.stack([found["vertex"][name] for name in ("red", "green", "blue")], 1)
    np.testing.assert_array_equal(colors, colorize(labels))
    write_ply(path, (np.eye(4, 3), faces), labels=labels, label_numbers=[0, 2**40, -(2**40)])
    assert plyfile.PlyData.read(path)["vertex"]["label"].tolist() == [0, -(2**40), -1, 2**40]
    for wrong, message in (
        ({"label_numbers": [1, 2]}, "the label 2 needs 3 numbers, got 2"),
        ({"label_numbers": [1, 2, 3], "label_names": ["a"]}, "1 names for 3 label_numbers"),
        ({"label_numbers": [1, 2, 2**60]}, "is beyond 2^53"),
    ):
        refused(ValueError, re.escape(message), write_ply, path, (np.eye(4, 3), faces), labels=labels, **wrong)


def test_scalars_and_colors_read_back(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    path = tmp_path / "out.ply"
    rng = np.random.default_rng(0)
    curvature, area = rng.normal(size=42), rng.normal(size=80).astype(np.float32)
    curvature[3] = np.nan
    colors = rng.integers(0, 256, (42, 3))
    scalars = {"curvature": curvature, "area": area, "low": torch.tensor(curvature, dtype=torch.bfloat16)}
    write_ply(path, ball, labels=np.arange(42), scalars=scalars, colors=colors)
    verts, faces = ply_element(path, "vertex"), ply_element(path, "face")
    np.testing.assert_array_equal(verts["curvature"], curvature)
    np.testing.assert_array_equal(verts["low"], torch.tensor(curvature).bfloat16().float().numpy())
    np.testing.assert_array_equal(verts["label"], np.arange(42))
    np.testing.assert_array_equal(np.stack([verts[c] for c in ("red", "green", "blue")], 1), colors)
    np.testing.assert_array_equal(faces["area"], area)
    assert (verts.dtype["curvature"], verts.dtype["low"], faces.dtype["area"]) == ("<f8", "<f4", "<f4")
    np.testing.assert_array_equal(load_mesh(path).verts, ball.vertices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": [0] * 3}, "labels: 3 values do not fit 42 vertices, 80 faces or 120 edges"),
        ({"scalars": {"height (m)": np.zeros(42)}}, r"the name 'height \(m\)' can't be used"),
        ({"scalars": {"x": np.zeros(42)}}, "the name 'x' can't be used"),
        ({"scalars": {"height": np.zeros(41)}}, "height: 41 values do not fit"),
        ({"scalars": {"height": np.zeros(120)}}, "height: a PLY file has no edges"),
        ({"colors": np.zeros((42, 2))}, "colors should have shape"),
        ({"labels": np.zeros(80, int), "at": "vertices"}, "80 values do not fit 42 vertices"),
    ],
)
def test_values_that_do_not_fit_are_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    refused(ValueError, message, write_ply, tmp_path / "out.ply", trimesh.creation.icosphere(subdivisions=1), **given)
    assert not list(tmp_path.iterdir())


def test_values_at_edges_of_polygons_in_any_dtype(tmp_path: Path) -> None:
    """Cuts have no label, no value and no color."""
    verts = [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0], [1, 1, 0], [2, 1, 0]]
    mesh = make_mesh(verts, [[0, 1, 4, 3], [1, 2, 5, 4]])
    surface, numbers = surface_of(mesh), np.array([3, 4, 5, 3, 4, 5, 3])
    for dtype in (np.int64, np.uint8, np.int16):
        write_ply(tmp_path / "out.ply", mesh, labels=numbers.astype(dtype), at="edges")
        assert ply_element(tmp_path / "out.ply", "vertex")["label"].tolist() == [3, 4, 4, 3, 3, 3]
        heights = make_field("scalars", "x", numbers.astype(dtype), surface).values
        assert np.isnan(heights).sum() == 2
        colors = make_field("colors", "c", np.full((7, 3), 100, dtype), surface, "edges").values
        assert sorted(colors[:, 0].tolist()) == [100] * 7 + [UNLABELED_COLOR[0]] * 2


def test_instances_beyond_32_bits(tmp_path: Path) -> None:
    write_ply(tmp_path / "out.ply", (np.eye(3), [[0, 1, 2]]), instances=np.array([2**31 + 5]), at="faces")
    assert ply_element(tmp_path / "out.ply", "face")["instance"].tolist() == [2**31 + 5]
    large = np.array([2**63 + 5], np.uint64)
    refused(ValueError, "labels: 9223372036854775813 is beyond 2.63", page, (np.eye(3), [[0, 1, 2]]), labels=large)


def test_only_ply_files_are_written_with_scalars_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out\.obj: the file is written in PLY format"):
        write_ply(tmp_path / "out.obj", (np.eye(3), None))
    assert not list(tmp_path.iterdir())
    given = np.array([1e300, -np.inf, np.nan])
    write_ply(tmp_path / "out.ply", (np.eye(3), None), scalars={"large": given})
    np.testing.assert_array_equal(ply_element(tmp_path / "out.ply", "vertex")["large"], given)
