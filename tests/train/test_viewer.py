"""The interactive page of surfaces."""

import base64
import json
import re
from importlib import resources

import numpy as np
import pytest
import trimesh

from diffnet.geometry import mesh_edges
from diffnet.train.report.palette import label_colors
from diffnet.train.report.viewer import ViewerItem, write_html

NASTY = "</script><script>alert('ü \"1\" & <!-- {{data}} \\ \u2028')</script>"


@pytest.fixture(scope="module")
def ball():
    mesh = trimesh.creation.icosphere(subdivisions=1)
    return np.asarray(mesh.vertices) + np.array([100, 0, 0]), np.asarray(mesh.faces)


def data_of(path):
    """The text of a page, and the data in it."""
    page = path.read_text(encoding="utf-8")
    content = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    return page, json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def test_the_page_holds_the_surfaces(tmp_path, ball):
    verts, faces = ball
    prediction, truth = np.arange(len(verts)) % 5 - 1, np.arange(len(verts)) % 300
    write_html(
        tmp_path / "page.html",
        [
            ViewerItem("ball", verts, faces, {"prediction": prediction, "truth": truth}),
            ("cloud", verts, None, {"truth": truth}, "vertices"),
        ],
        ["a", "b"],
    )
    _, data = data_of(tmp_path / "page.html")
    mesh, cloud = data["items"]
    positions = array(mesh["positions"], "<f4").reshape(-1, 3)
    np.testing.assert_allclose(positions, verts - [100, 0, 0], atol=1e-6)
    assert mesh["radius"] == pytest.approx(1)
    assert not mesh["wideIndices"]
    np.testing.assert_array_equal(array(mesh["faces"], "<u2").reshape(-1, 3), faces)
    normals = array(mesh["normals"], np.int8).reshape(-1, 3, 3) / 127
    np.testing.assert_allclose(normals, (verts - [100, 0, 0])[faces], atol=0.05)
    assert [s["name"] for s in mesh["sets"]] == ["prediction", "truth"]
    np.testing.assert_array_equal(array(mesh["sets"][0]["labels"], "<i4"), prediction)
    np.testing.assert_array_equal(array(mesh["sets"][1]["labels"], "<i4"), truth)
    assert cloud["faces"] == ""
    assert data["names"] == ["a", "b"]
    colors = array(data["colors"], np.uint8).reshape(-1, 3)
    np.testing.assert_array_equal(colors, label_colors(truth.max() + 1))  # also for labels without a name
    assert len(list(tmp_path.iterdir())) == 1


def test_edges_come_with_the_sides_of_faces(tmp_path, ball):
    verts, faces = ball
    edges = mesh_edges(faces)
    write_html(tmp_path / "page.html", [("ball", verts, faces, {"truth": np.arange(len(edges))}, "edges")], [])
    item = data_of(tmp_path / "page.html")[1]["items"][0]
    sides = array(item["elements"], "<u4").reshape(-1, 3)
    np.testing.assert_array_equal(edges[sides[:, 0]], np.sort(faces[:, 1:], axis=1))
    assert len(array(item["sets"][0]["labels"], "<i4")) == len(edges)


def test_page_is_self_contained(tmp_path, ball):
    write_html(tmp_path / "page.html", [("ball", *ball, {"truth": np.zeros(42, int)}, "vertices")], ["a"])
    page, _ = data_of(tmp_path / "page.html")
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<link|<img|\bsrc=|\bhref=|import\(|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    assert "{{" not in page


def test_text_is_escaped(tmp_path, ball):
    verts, faces = ball
    labels = {NASTY: np.zeros(len(verts), int)}
    write_html(tmp_path / "page.html", [(NASTY, verts, faces, labels, "vertices")], [NASTY], title=NASTY)
    page, data = data_of(tmp_path / "page.html")
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert "<script>alert" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(") == 2  # in the title and the heading
    assert data["names"] == [NASTY]
    assert data["items"][0]["title"] == data["items"][0]["sets"][0]["name"] == NASTY
    assert "innerHTML" not in page


def test_the_page_names_missing_browser_features():
    template = resources.files("diffnet.train.report").joinpath("viewer.html").read_text(encoding="utf-8")
    assert "<noscript>" in template
    assert "needs WebGL 2" in template


def test_broken_coordinates_are_left_out(tmp_path):
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [np.nan, 0, 0]])
    faces = [[0, 1, 2], [0, 1, 3], [2, 2, 2]]
    write_html(tmp_path / "page.html", [("bad", verts, faces, {"truth": np.arange(3)}, "faces")], [])
    item = data_of(tmp_path / "page.html")[1]["items"][0]  # strict JSON has no NaN
    assert item["radius"] == pytest.approx(np.sqrt(0.5))
    assert len(array(item["sets"][0]["labels"], "<i4")) == 3
    normals = array(item["normals"], np.int8).reshape(3, 3, 3)
    np.testing.assert_array_equal(normals[0], [[0, 0, 127]] * 3)
    np.testing.assert_array_equal(normals[1:], 0)


def test_bad_input_is_named(tmp_path, ball):
    with pytest.raises(ValueError, match="at least one mesh"):
        write_html(tmp_path / "page.html", [], [])
    with pytest.raises(ValueError, match="ball: an item needs"):
        write_html(tmp_path / "page.html", [("ball", *ball, {}, "vertices")], [])
    with pytest.raises(ValueError, match=r"\(42,\)"):
        write_html(tmp_path / "page.html", [("ball", *ball, {"truth": [1, 2]}, "vertices")], [])
    assert not list(tmp_path.iterdir())
