"""`diffnet view`, and `diffnet demo` with the built-in networks."""

import base64
import json
import re
import sys
import webbrowser
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
import trimesh
from command import complaint, output
from PIL import Image

from diffnet import DiffusionNet, viz
from diffnet.data import BODIES, BODY_MAPS, load_dataset, load_pairs
from diffnet.pretrained import network_path
from diffnet.train import match_meshes, predict_labels, predict_values
from diffnet.train.commands.demo import BODY, MAPS, PARTS
from diffnet.train.commands.view import open_page


@pytest.fixture
def ball(tmp_path: Path) -> Path:
    trimesh.creation.icosphere(2).export(tmp_path / "ball.off")
    return tmp_path / "ball.off"


def network(path: Path, outputs_at: str = "vertices", **metadata: Any) -> Path:
    model = DiffusionNet(16, 3, width=8, blocks=1, outputs_at=outputs_at)  # type: ignore[arg-type]
    model.save(path / "network.safetensors", features="hks", k=16, normalize=True, **metadata)
    return path / "network.safetensors"


def data_in(path: Path) -> dict[str, Any]:
    """What a page shows."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)[1])


def item_in(path: Path) -> dict[str, Any]:
    """The mesh of a page."""
    (item,) = data_in(path)["items"]
    return item


def sets_in(path: Path) -> list[tuple[str, str, str]]:
    """Name, kind and place of the values on a page."""
    return [(one["name"], one["kind"], one["at"]) for one in item_in(path)["sets"]]


OWN = [
    *[f"eigenfunction {i}" for i in range(1, 9)],
    *[f"log HKS at t = {t}" for t in ("0.01", "0.1", "1")],
    *[f"gradient of eigenfunction {i}" for i in range(1, 4)],
]


def test_view(ball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(f"opened {url}"))
    out = tmp_path / "new" / "page.html"
    assert output("view", ball, "--out", out) == f"wrote {out}\n"
    assert sets_in(out) == [(name, "scalars", "vertices") for name in OWN]
    assert list(item_in(out)["arrows"]) == OWN[-3:]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    written = Path(output("view", ball).removeprefix("wrote ").rstrip("\n"))
    assert written.name == "ball.html"
    assert written.is_relative_to(tmp_path)
    assert written.read_text() == out.read_text()


def test_arrays_of_a_file_have_buttons_and_lines(tmp_path: Path) -> None:
    """Colors, labels, scalars and vectors at vertices, labels at faces, and labels in a file beside the mesh."""
    ball = trimesh.creation.icosphere(1)
    verts, faces = np.asarray(ball.vertices), np.asarray(ball.faces)
    half = (verts[:, 2] > 0).astype(np.int32)
    columns = {"x": verts[:, 0], "y": verts[:, 1], "z": verts[:, 2], "part": half, "quality": verts[:, 1]}
    columns |= dict(zip(("nx", "ny", "nz"), verts.T, strict=True))
    columns |= {name: 255 * half.astype(np.uint8) for name in ("red", "green", "blue", "alpha")}
    rows = np.array([*zip(*columns.values(), strict=True)], [(name, x.dtype) for name, x in columns.items()])
    table = np.empty(len(faces), [("vertex_indices", "i4", 3), ("part", "u1")])
    table["vertex_indices"], table["part"] = faces, np.arange(len(faces)) % 4
    elements = [plyfile.PlyElement.describe(rows, "vertex"), plyfile.PlyElement.describe(table, "face")]
    plyfile.PlyData(elements).write(tmp_path / "a.ply")
    np.savetxt(tmp_path / "a.txt", half, fmt="%d")
    (tmp_path / "a.json").write_text("{}")
    said = [line.split() for line in output("info", tmp_path / "a.ply").partition("arrays:\n")[2].splitlines()]
    assert said == [
        ["colors", "colors", "at", "the", "vertices", "2", "different"],
        ["part", "labels", "at", "the", "vertices", "2", "classes:", "0,", "1"],
        ["quality", "scalars", "at", "the", "vertices", "-1", "to", "1"],
        ["normals", "vectors", "at", "the", "vertices", "lengths", "1", "to", "1"],
        ["part", "labels", "at", "the", "faces", "4", "classes:", "0,", "1,", "2,", "3"],
        ["a.txt", "labels", "at", "the", "vertices", "2", "classes:", "0,", "1"],
        ["no", "faults", "found"],
    ]
    output("view", tmp_path / "a.ply", "--out", tmp_path / "page.html")
    own = [("part", "labels", "vertices"), ("part at the faces", "labels", "faces"), ("a.txt", "labels", "vertices")]
    own += [("quality", "scalars", "vertices"), ("normals", "scalars", "vertices")]
    everything = sets_in(tmp_path / "page.html")
    assert everything == [*own, *((name, "scalars", "vertices") for name in OWN), ("colors", "colors", "vertices")]
    assert list(item_in(tmp_path / "page.html")["arrows"]) == ["normals", *OWN[-3:]]


def test_view_of_a_point_cloud_in_several_parts(tmp_path: Path) -> None:
    """The constant functions of the parts are left out."""
    verts = np.asarray(trimesh.creation.icosphere(2).vertices)
    trimesh.PointCloud(np.concatenate([verts, verts + 5.0])).export(tmp_path / "two.ply")
    output("view", tmp_path / "two.ply", "--out", tmp_path / "page.html")
    assert [name for name, *_ in sets_in(tmp_path / "page.html")][:2] == ["eigenfunction 2", "eigenfunction 3"]


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "global_mean"])
def test_view_with_a_segmentation_or_classification(ball: Path, tmp_path: Path, at: str) -> None:
    checkpoint, out = network(tmp_path, at, label_names=["a", "b", "c"]), tmp_path / "page.html"
    output("view", ball, "--checkpoint", checkpoint, "--out", out)
    place = "vertices" if at == "global_mean" else at
    assert sets_in(out) == [("prediction", "labels", place), *((name, "scalars", "vertices") for name in OWN)]
    ((_, expected),) = predict_labels([ball], DiffusionNet.load(checkpoint), "cpu")
    page = out.read_text(encoding="utf-8")
    assert '"names":{"prediction":["a","b","c"]}' in page
    values = np.frombuffer(base64.b64decode(item_in(out)["sets"][0]["values"]), "<i4")
    np.testing.assert_array_equal(values, np.broadcast_to(expected, values.shape))


def test_labels_of_the_file_are_classes_of_the_network(tmp_path: Path) -> None:
    """A label file has their numbers, and so has a truth. Other labels have no names, and are no truth."""
    ball, out = trimesh.creation.icosphere(2), tmp_path / "page.html"
    labels = np.where(ball.vertices[:, 2] > 0, 4, np.where(ball.vertices[:, 2] < -0.5, -1, 2))
    checkpoint = network(tmp_path, label_names=["a", "b", "c"], label_numbers=[2, 3, 4])
    for truth, title, names in ((labels, "truth", ["a", "b", "c"]), (labels + 1, "truth_input", None)):
        viz.write_ply(tmp_path / "a.ply", ball, scalars={"truth": truth, "region": labels})
        np.savetxt(tmp_path / "a.txt", labels, fmt="%d")
        output("view", tmp_path / "a.ply", "--checkpoint", checkpoint, "--out", out)
        values = {
            entry["name"]: np.frombuffer(base64.b64decode(entry["values"]), "<i4")
            for entry in item_in(out)["sets"]
            if entry["kind"] == "labels"
        }
        shown = data_in(out)["names"]
        assert [*values] == ["prediction", title, "region", "a.txt"]
        np.testing.assert_array_equal(values["a.txt"], [{4: 2, 2: 0, -1: -1}[label] for label in labels.tolist()])
        np.testing.assert_array_equal(values[title], values["a.txt"] if names else truth)
        np.testing.assert_array_equal(values["region"], labels)
        assert (shown.get(title), shown["a.txt"], shown.get("region")) == (names, ["a", "b", "c"], None)


def test_arrays_of_one_name_with_several_columns(tmp_path: Path) -> None:
    pyvista = pytest.importorskip("pyvista")
    ball = pyvista.Icosphere(nsub=1)
    ball.point_data["stress"], ball.cell_data["stress"] = ball.points[:, :2], ball.cell_centers().points[:, :2]
    ball.save(tmp_path / "a.vtp")
    output("view", tmp_path / "a.vtp", "--out", tmp_path / "page.html")
    expected = [f"stress {i}" for i in (0, 1)] + [f"stress at the faces {i}" for i in (0, 1)]
    assert [name for name, *_ in sets_in(tmp_path / "page.html") if name.startswith("stress")] == expected


def test_view_with_a_regression(ball: Path, tmp_path: Path) -> None:
    checkpoint = network(tmp_path, task="regression", label_names=["x", "y", "z"])
    output("view", ball, "--checkpoint", checkpoint, "--out", tmp_path / "page.html")
    assert [name for name, *_ in sets_in(tmp_path / "page.html")] == ["x", "y", "z", *OWN]


def test_view_with_conditions(ball: Path, tmp_path: Path) -> None:
    statistics = {"mean": [1.0, 2.0], "std": [1.0, 2.0]}
    facts: dict[str, Any] = {"conditions": "speed,yaw", "condition_statistics": statistics, "label_names": ["y"]}
    model = DiffusionNet(16, 1, width=8, blocks=1, condition_channels=2)
    torch.nn.init.normal_(model.modulation.weight)
    checkpoint, out = tmp_path / "a.safetensors", tmp_path / "page.html"
    model.save(checkpoint, features="hks", k=16, normalize=True, task="regression", **facts)
    view = ["view", ball, "--checkpoint", checkpoint, "--out", out]
    (tmp_path / "t.csv").write_text("file,yaw\nball.off,5")
    output(*view, "--condition", "speed=3", "--condition", tmp_path / "t.csv")
    model = DiffusionNet.load(checkpoint)
    ((_, expected),) = predict_values([ball], model, "cpu", conditions=[{"speed": 3, "yaw": 5}])
    ((_, others),) = predict_values([ball], model, "cpu", conditions=[{"speed": 3, "yaw": 4}])
    shown = np.frombuffer(base64.b64decode(item_in(out)["sets"][0]["values"]), "<f4")
    assert np.abs(others[:, 0] - expected[:, 0]).max() > 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(shown, expected[:, 0], rtol=1e-3, atol=1e-4)
    assert "--condition yaw=NUMBER is missing" in complaint(*view, "--condition", "speed=3")
    assert "for the network of --checkpoint" in complaint("view", ball, "--condition", "speed=3")


def test_bad_input(ball: Path, tmp_path: Path) -> None:
    assert "no such file" in complaint("view", tmp_path / "none.off").lower()
    assert ".html file, got" in complaint("view", tmp_path / "x.off", "--out", tmp_path / "page.htm")
    correspondence = network(tmp_path, task="correspondence")
    assert "correspondence" in complaint("view", ball, "--checkpoint", correspondence)


# ---- diffnet demo ----


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(f"opened {url}"))
    told = output("demo")
    assert output("demo") == told  # the folder is written again
    out = tmp_path / "diffnet-demo"
    assert sorted(path.name for path in out.iterdir()) == [
        *("a.ply", "b.ply", "map.html", "map.png", "parts.html", "parts.ply", "parts.png")
    ]
    right = float(re.search(r"([\d.]+) % of its ", told)[1])
    assert right > 90
    html = (out / "parts.html").read_text(encoding="utf-8")
    assert '"name":"prediction"' in html
    assert '"name":"truth"' in html
    for name in ("parts", "map"):
        assert np.asarray(Image.open(out / f"{name}.png")).std() > 10
    # The first two commands of "Next" work as they are printed.
    for command in re.findall(r"diffnet ((?:predict|match) .*)", told):
        output(*command.split())
    body = load_dataset(BODIES).test[BODY]
    labels = np.loadtxt("labels.txt", np.int64) - 1  # the files of the training count from 1
    assert 100 * (labels == body.labels).mean() == pytest.approx(right, abs=0.1)
    assert len(np.loadtxt("map.txt")) == len(trimesh.load(out / "b.ply", process=False).vertices)


def test_demo_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "parts.png").write_text("mine")
    assert "this folder holds other files" in complaint("demo", "--out", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("display", ["", ":0"])
@pytest.mark.parametrize("terminal", [False, True])
def test_demo_opens_its_page_on_a_desktop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, display: str, terminal: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) is None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert open_page(Path("a b.html")) == bool(display and terminal)
    assert opened == [f"{tmp_path.as_uri()}/a%20b.html"] * bool(display and terminal)


def test_built_in_networks() -> None:
    """They are small, their files say what they are, and they work on bodies that they have not seen."""
    assert sum(network_path(name).stat().st_size for name in (PARTS, MAPS)) < 4e6
    parts, maps = (DiffusionNet.from_pretrained(name) for name in (PARTS, MAPS))
    for network, task in ((parts, "segmentation"), (maps, "correspondence")):
        assert network.metadata["task"] == task
        assert (network.metadata["license"], network.metadata["data_license"]) == ("MIT", "CC0-1.0")
        assert any(name.startswith("test_bodies") for name in network.metadata)
    items = load_dataset(BODIES).test
    predicted = predict_labels([item.mesh for item in items], parts, "cpu")
    shares = [labels == item.labels for (_, labels), item in zip(predicted, items, strict=True)]
    assert np.concatenate(shares).mean() > 0.95
    a, b = load_pairs(BODY_MAPS).test[:2]
    matches = match_meshes(a.mesh, b.mesh, maps).matches
    away = np.linalg.norm(a.mesh.verts[matches[b.template]] - a.mesh.verts[a.template], axis=1)
    assert np.median(away) < 0.04  # meters; vertices are 0.03 apart
