"""`diffnet train regression`, `predict` and `evaluate` with its networks, and its steps as CUDA graphs."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import complaint, output
from runs import ball, results_of, table_of

from diffnet import DiffusionNet, viz
from diffnet.data import (
    DataError,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    load_targets,
    original_targets,
    standardized_targets,
    target_statistics,
    write_shards,
)
from diffnet.data.feature_names import target_parts
from diffnet.geometry import element_areas, load_attributes, load_mesh, make_mesh, random_rotations
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import full_number
from diffnet.train import MetadataError, predict_labels, predict_probabilities, predict_values
from diffnet.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from diffnet.train.export import export_network
from diffnet.train.inference.network_input import network_input
from diffnet.train.metrics import column_scores
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.regression import TASK
from diffnet.train.tasks.task import Scored

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

CPU = torch.device("cpu")
TURN = random_rotations(1, torch.Generator().manual_seed(0))[0].double().numpy()
SMALL = ["--k", 12, "--width", 16, "--blocks", 1, "--jobs", 1, "--device", "cpu", "--lr", 0.02, "--no-rotate"]


def heights(verts: np.ndarray) -> np.ndarray:
    """Targets in different units: the height as a share of the mesh's radius, and 1000 minus 5 times it."""
    height = verts[:, 2] / np.linalg.norm(verts, axis=1).max()
    return np.stack([height, 1000 - 5 * height], 1)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, small_pictures: None) -> Path:
    """A set with targets at the vertices and for whole meshes, and a run on each of them."""
    root = tmp_path_factory.mktemp("room")
    (root / "data").mkdir()
    lines = ["file,volume,size,split"]
    for i in range(9):
        mesh = ball(i)
        mesh.export(root / "data" / f"m{i}.ply")
        targets = heights(mesh.vertices)
        targets[i::7] = np.nan
        np.save(root / "data" / f"m{i}.heights.npy", targets)
        lines.append(f"m{i}.ply,{mesh.volume},{'' if i == 1 else 2 * mesh.volume},{'test' if i > 6 else 'train'}")
    (root / "data" / "targets.csv").write_text("\n".join(lines))
    (root / "data" / "train.txt").write_text("\n".join(f"m{i}" for i in range(7)))
    (root / "data" / "test.txt").write_text("m7\nm8")
    shared = ["--data", root / "data", "--cache", root / "cache", *SMALL, "--features", "xyz"]
    output("train", "regression", *shared, "--targets", "file:heights", "--out", root / "run", "--epochs", 20)
    output("train", "regression", *shared, "--out", root / "whole", "--epochs", 3)
    return root


def test_a_run_learns_and_reports(room: Path) -> None:
    results = results_of(room / "run")
    assert (results["task"], results["labels_at"]) == ("regression", "vertices")
    first, second = results["columns"]
    assert (first["name"], first["count"], second["name"]) == ("heights_0", 74, "heights_1")
    assert first["r2"] > 0.7
    assert results["test_r2"] == pytest.approx((first["r2"] + second["r2"]) / 2)
    # Errors are in the units of each column, of which the second one is 5 times the first.
    assert second["mae"] == pytest.approx(5 * first["mae"], rel=0.5)
    cases, mesh, file = table_of(room / "run" / "per_mesh.csv"), ball(7), room / "data" / "m7.ply"
    ((_, values),) = predict_values([file], DiffusionNet.load(room / "run" / "last.pt"), "cpu")
    truth = heights(mesh.vertices)
    truth[7::7] = np.nan
    areas = np.bincount(mesh.faces.reshape(-1), np.repeat(mesh.area_faces / 3, 3))[:, None]
    expected = np.sqrt(np.nansum(areas * (values - truth) ** 2, 0) / np.nansum(areas * truth**2, 0))
    found = np.array([[float(case[f"heights_{n}_relative_l2"]) for n in (0, 1)] for case in cases])
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)
    np.testing.assert_allclose([row["relative_l2"] for row in results["columns"]], found.mean(0), rtol=1e-4)
    rows = table_of(room / "run" / "metrics.csv")
    assert {"train_r2", "validation_r2", "test_r2"} < set(rows[0])
    assert float(rows[-1]["test_r2"]) == pytest.approx(results["test_r2"], rel=1e-5)
    page = (room / "run" / "predictions.html").read_text()
    assert page.count("<article>") == 2
    assert page.count("Error of heights_1") == 2
    for chart in ("scatter.png", "curves.png"):
        assert (room / "run" / chart).read_bytes().startswith(b"\x89PNG")


def test_targets_of_whole_meshes(room: Path, tmp_path: Path) -> None:
    results = results_of(room / "whole")
    assert [(row["name"], row["count"]) for row in results["columns"]] == [("volume", 2), ("size", 2)]
    assert results["labels_at"] == "meshes"
    cases = table_of(room / "whole" / "per_mesh.csv")
    assert float(cases[0]["volume"]) == pytest.approx(ball(7).volume, rel=1e-5)
    assert list(cases[0]) == ["mesh", "volume", "volume_predicted", "size", "size_predicted"]
    page = (room / "whole" / "predictions.html").read_text()
    assert page.count("<article>") == 2
    assert "truth: " in page
    meshes = [room / "data" / f"m{i}.ply" for i in (7, 8)]
    files = ["--out", tmp_path / "table.csv", "--html", tmp_path / "page.html", "--png", tmp_path / "picture.png"]
    output("predict", *meshes, "--checkpoint", room / "whole" / "last.pt", *files, "--device", "cpu")
    rows = table_of(tmp_path / "table.csv")
    assert [row["file"] for row in rows] == [str(mesh) for mesh in meshes]
    truth = [ball(i).volume for i in (7, 8)]
    errors = [abs(float(row["volume"]) - volume) for row, volume in zip(rows, truth, strict=True)]
    assert np.mean(errors) == pytest.approx(results["columns"][0]["mae"], rel=1e-5)
    assert "volume" in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def cases(room: Path) -> Path:
    """A run whose target at vertices and one whose target of meshes follow from a condition."""
    folder = room / "cases"
    folder.mkdir()
    lines = ["file,text,speed,drag,split"]
    for i in range(6):
        ball(i).export(folder / f"m{i}.ply")
        np.save(folder / f"m{i}.p.npy", np.full(42, 3.0 * i))
        lines.append(f"m{i}.ply,a,{20 + 10 * i},{i},{'test' if i == 2 else 'train'}")
    (folder / "targets.csv").write_text("\n".join(lines))
    shared = ["--cache", room / "cache", *SMALL, "--features", "xyz", "--conditions", "speed", "--epochs", 30]
    more = ["--targets", "file:p", "--max-faces", 60, "--global-tokens", 2, "--decimate", 0.1, "--variants", 1]
    output("train", "regression", "--data", folder, *shared, *more, "--out", room / "fields")
    output("train", "regression", "--data", folder, *shared, "--targets", "drag", "--out", room / "drag")
    return folder


@pytest.mark.parametrize(("run", "factor"), [("fields", 3), ("drag", 1)])
def test_conditions(cases: Path, run: str, factor: float, tmp_path: Path) -> None:
    checkpoint, mesh = cases.parent / run / "last.pt", cases / "m1.ply"
    stored, where = load_checkpoint(checkpoint), ["--device", "cpu", "--cache", cases.parent / "cache"]
    assert (stored["options"]["conditions"], stored["condition_statistics"]["mean"]) == ("speed", [46])
    conditions = [{"speed": speed} for speed in (20, 70)]
    found = predict_values([mesh] * 2, DiffusionNet.load(checkpoint), "cpu", conditions=conditions)
    np.testing.assert_allclose([values.mean() for _, values in found], [0, 5 * factor], atol=factor)
    predict = ["predict", mesh, "--checkpoint", checkpoint, "--device", "cpu", "--out"]
    for name, given in (("a.csv", "speed=30"), ("b.csv", cases / "targets.csv")):
        output(*predict, tmp_path / name, "--condition", given)
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    predict.append(tmp_path / "c.csv")
    assert "--condition speed=NUMBER is missing; the conditions of the network are speed" in complaint(*predict)
    assert "another one; the conditions" in complaint(*predict, "--condition", "speed=3", "--condition", "yaw=1")
    output("evaluate", "--checkpoint", checkpoint, "--data", cases, "--out", tmp_path / "scores", *where)
    assert results_of(tmp_path / "scores")["columns"] == results_of(checkpoint.parent)["columns"]
    start = ["--from", checkpoint, "--epochs", 1, "--lr", 1e-9, "--out", tmp_path / "run", *where]
    again = ["--conditions", "speed", "--targets", stored["options"]["targets"]]
    other = cases / "other.csv"  # whose statistics are others
    other.write_text((cases / "targets.csv").read_text().rpartition("\n")[0])
    output("train", "regression", "--data", other, *again, *start, *(["--max-faces", 60] if run == "fields" else []))
    before, after = (results_of(folder)["columns"][0]["mae"] for folder in (checkpoint.parent, tmp_path / "run"))
    assert after == pytest.approx(before, rel=1e-3)


def test_from_vtp_to_vtp(tmp_path: Path) -> None:
    """Targets and features are arrays of the files, and a condition is in their field data."""
    pyvista = pytest.importorskip("pyvista")
    for i in range(4):
        data = pyvista.PolyData(ball(i).vertices, faces=np.insert(ball(i).faces, 0, 3, axis=1))
        data["u"], data["heat"], data.field_data["speed"] = 3 * data.points, data.points[:, 2], [20.0 + 10 * i]
        data.cell_data["panel"] = np.arange(data.n_cells)
        data.save(tmp_path / f"m{i}.vtp")
    assert re.search("speed +field data +20", output("info", tmp_path / "m0.vtp"))
    options = ["--targets", "file:u", "--features", "xyz+file:heat", "--conditions", "speed", "--epochs", 1]
    output("train", "regression", "--data", tmp_path, *SMALL, *options, "--out", tmp_path / "run")
    checkpoint = tmp_path / "run" / "last.pt"
    predict = ["predict", *(tmp_path / f"m{i}.vtp" for i in (0, 3)), "--checkpoint", checkpoint, "--device", "cpu"]
    output(*predict, "--out", tmp_path / "own")
    output(*predict, "--condition", "speed=20", "--out", tmp_path / "same")
    meshes = [pyvista.read(tmp_path / place / name) for place, name in (("own", "m0.vtp"), ("own", "m3.vtp"))]
    conditions, sources = [{"speed": speed} for speed in (20, 50)], predict[1:3]
    values = predict_values(sources, DiffusionNet.load(checkpoint), "cpu", conditions=conditions)
    for mesh, (_, expected), source in zip(meshes, values, map(pyvista.read, sources), strict=True):
        np.testing.assert_allclose(mesh["u"], expected)
        np.testing.assert_array_equal(mesh["u_input"], source["u"])
        np.testing.assert_array_equal(mesh["heat"], source["heat"])
        assert mesh.cell_data["panel"].tolist() == [*range(80)]
        assert mesh.field_data["speed"] == source.field_data["speed"]
    first, last = (pyvista.read(tmp_path / "same" / f"m{i}.vtp")["u"] for i in (0, 3))
    np.testing.assert_array_equal(first, meshes[0]["u"])
    assert not np.array_equal(last, meshes[1]["u"])


def test_columns_whose_names_look_like_those_of_one_array(tmp_path: Path) -> None:
    """They stay apart in a VTP file and on the page. Text in the field data stays, and vectors count where they are."""
    pyvista = pytest.importorskip("pyvista")
    for i in range(3):
        data = pyvista.PolyData(ball(i).vertices, faces=np.insert(ball(i).faces, 0, 3, axis=1))
        data["p"], data["p_0"], data["p_1"] = data.points.T
        data["flow"] = np.where(np.arange(42)[:, None] % 3, data.points, [np.nan, 0, 0])
        data.field_data["case"] = ["hello"]
        data.save(tmp_path / f"m{i}.vtp")
    options = ["--targets", "vector:flow+file:p+file:p_0+file:p_1", "--epochs", 1, "--out", tmp_path / "run"]
    output("train", "regression", "--data", tmp_path, *SMALL, *options)
    (vector,) = results_of(tmp_path / "run")["vectors"]
    assert vector["count"] == 28
    checkpoint, source = tmp_path / "run" / "last.pt", tmp_path / "m0.vtp"
    output("predict", source, "--checkpoint", checkpoint, "--device", "cpu", "--out", tmp_path / "out.vtp")
    ((_, values),) = predict_values([source], DiffusionNet.load(checkpoint), "cpu")
    written, before = pyvista.read(tmp_path / "out.vtp"), pyvista.read(source)
    np.testing.assert_allclose(written["flow"], values[:, :3])
    for i, name in enumerate(("p", "p_0", "p_1")):
        np.testing.assert_allclose(written[name], values[:, 3 + i])
        np.testing.assert_array_equal(written[f"{name}_input"], before[name])
    assert [*written.field_data["case"]] == ["hello"]
    assert re.search("case +field data +hello", output("info", tmp_path / "out.vtp"))
    output("view", source, "--checkpoint", checkpoint, "--out", tmp_path / "page.html")
    sets = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)[1])
    shown = {one["name"]: one["values"] for one in sets["items"][0]["sets"]}
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(shown["p_0"]), "<f4"), values[:, 4], atol=1e-5)
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(shown["p_0_input"]), "<f4"), before["p_0"], atol=1e-5)
    assert full_number(1.7e9 + 0.25) == "1700000000.25"
    with pytest.raises(OptionError, match=r"each once, got .file:p"):
        target_parts("file:p+file:p")
    with pytest.raises(OptionError, match="got 'mask:flow'"):
        target_parts("mask:flow")


@pytest.fixture(scope="module")
def places(room: Path) -> Path:
    """A run on targets at vertices, at faces with quads, and of whole meshes, some of which are missing."""
    pyvista = pytest.importorskip("pyvista")
    (folder := room / "places").mkdir()
    lines = ["file,speed,drag,split"]
    for i in range(6):
        surface = pyvista.Plane(i_resolution=4 + i % 2, j_resolution=5)
        surface.points[:, 2] = 0.1 * (i + 1) * surface.points[:, 0] ** 2
        surface["wind"], surface["heat"] = 2 * surface.points, (surface.points**2).sum(1)
        load = 5 - (surface.cell_centers().points ** 2).sum(1)
        surface.cell_data["load"] = np.where(np.arange(surface.n_cells) == 3, np.nan, load)
        surface.save(folder / f"m{i}.vtp")
        lines.append(f"m{i}.vtp,{20 + i},{'' if i == 1 else i / 5},{'test' if i > 3 else 'train'}")
    (folder / "targets.csv").write_text("\n".join(lines))
    shared = ["--data", folder, "--cache", room / "cache", *SMALL[:-1], "--conditions", "speed", "--mirror"]
    more = ["--targets", "file:load+table:drag+vector:wind+file:heat", "--target-weights", "drag=2", "--scalar-targets"]
    output("train", "regression", *shared, *more, "--epochs", 25, "--batch-meshes", 2, "--out", room / "several")
    return room / "several"


def test_targets_at_several_places(places: Path, tmp_path: Path) -> None:
    pyvista, folder = pytest.importorskip("pyvista"), places.parent / "places"
    results = results_of(places)
    names = ["wind_0", "wind_1", "wind_2", "load", "heat", "drag"]
    assert [(row["name"], row["count"]) for row in results["columns"]] == list(
        zip(names, [66] * 3 + [43, 66, 2], strict=True)
    )
    assert results["labels_at"] == ["vertices"] * 3 + ["faces", "vertices", "meshes"]
    assert min(row["r2"] for row in results["columns"][3:]) > 0.5
    assert ["relative_l2" in row for row in results["columns"]] == [True] * 5 + [False]
    output("evaluate", "--data", folder, "--checkpoint", places / "last.pt", "--out", tmp_path / "e", "--device", "cpu")
    for key in ("columns", "vectors", "test_r2"):
        assert results_of(tmp_path / "e")[key] == results[key]
    case = table_of(places / "per_mesh.csv")[0]
    source = folder / "m4.vtp"
    output(
        "predict", source, "--checkpoint", places / "last.pt", "--condition", "speed=24", "--out", tmp_path / "p.vtp"
    )
    surface, before = pyvista.read(tmp_path / "p.vtp"), pyvista.read(source)
    assert (case["drag"], float(case["drag_predicted"])) == (
        "0.8",
        pytest.approx(surface.field_data["drag"][0], rel=1e-4),
    )
    load = before.cell_data["load"]
    np.testing.assert_array_equal(surface.cell_data["load_input"], load)
    errors = surface.cell_data["load"] - load
    assert float(case["load_mae"]) == pytest.approx(np.nanmean(np.abs(errors)), rel=1e-4)
    assert float(case["heat_mae"]) == pytest.approx(np.abs(surface["heat"] - before["heat"]).mean(), rel=1e-4)
    assert surface["wind"].shape == (30, 3)
    views = ["--condition", "speed=24", "--out", tmp_path / "v.vtp", "--html", tmp_path / "page.html"]
    output("predict", source, "--checkpoint", places / "last.pt", *views)
    assert all(name in (tmp_path / "page.html").read_text() for name in ("wind_0", "load", "drag"))
    page = (places / "predictions.html").read_text()
    assert re.search(r"drag [0-9.]+ \(truth 0.8\)", page)
    assert all(page.count(f"Error of {name}") == 2 for name in ("wind_2", "load"))


def test_a_run_on_several_places_goes_on_and_starts_others(places: Path, tmp_path: Path) -> None:
    folder, cache = places.parent / "places", ["--cache", places.parent / "cache"]
    targets = ["--targets", "table:drag+file:heat+vector:wind+file:load", "--conditions", "speed"]
    shared = ["--data", folder, *cache, *SMALL[:-3], *targets, "--scalar-targets", "--decimate", 0.2, "--cut", 0.2]
    more = ["--variants", 1, "--lr", 1e-9, "--schedule", "step", "--epochs"]
    output("train", "regression", *shared, *more, 1, "--from", places / "last.pt", "--out", tmp_path / "run")
    output("train", "regression", "--data", folder, *cache, "--resume", "--epochs", 2, "--out", tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "last.pt")["labels_at"] == ("vertices",) * 4 + ("faces", "meshes")
    before, after = (
        {row["name"]: row["mae"] for row in results_of(run)["columns"]} for run in (places, tmp_path / "run")
    )
    assert after == pytest.approx(before, rel=1e-3)
    network, source = DiffusionNet.load(tmp_path / "run" / "last.pt"), folder / "m4.vtp"
    ((_, values),) = predict_values([source], network, "cpu", conditions=[{"speed": 24}])
    assert (~np.isnan(values)).sum(0).tolist() == [30, 30, 30, 30, 20, 1]


def test_targets_at_several_places_that_are_refused(places: Path, tmp_path: Path) -> None:
    folder = places.parent / "places"
    with pytest.raises(OptionError, match="outputs at several places"):
        export_network(DiffusionNet(3, 2, outputs_at=["vertices", "faces"]), tmp_path / "network.pt2")
    predict = ["predict", folder / "m4.vtp", "--checkpoint", places / "last.pt", "--condition", "speed=1", "--out"]
    assert "should be a .vtp file for outputs at vertices, faces and meshes" in complaint(*predict, tmp_path / "p.ply")
    data = load_targets(folder, "file:load+table:drag")
    with pytest.raises(DataError, match="no targets at several places"):
        write_shards(data, tmp_path / "shards", Preprocessing(k=4, features="xyz"), tmp_path / "cache")
    with pytest.raises(DataError, match="no column 'lift'"):
        load_targets(folder, "file:load+table:lift")


@pytest.fixture(scope="module")
def flows(room: Path) -> Path:
    """Runs on vectors at vertices, in both heads, and at faces. Some are in files beside the meshes, some inside."""
    folder = room / "flows"
    folder.mkdir()
    for i in range(5):
        mesh = ball(i)
        mesh.apply_scale(1 + i)
        viz.write_ply(
            folder / f"m{i}.ply",
            make_mesh(mesh.vertices, mesh.faces),
            scalars=dict(zip(("w_x", "w_y", "w_z"), 3 * mesh.face_normals.T, strict=True)),
            at="faces",
        )
        np.save(folder / f"m{i}.n.npy", 2 * mesh.vertex_normals)
        np.save(folder / f"m{i}.d.npy", mesh.vertices / 2)
        np.save(folder / f"m{i}.p.npy", mesh.vertices[:, 2] * np.where(np.arange(42) < 9, np.nan, 1))
    (folder / "train.txt").write_text("m0\nm1\nm2\nm3")
    (folder / "test.txt").write_text("m4")
    shared = ["--data", folder, "--cache", room / "cache", *SMALL[:-1]]
    both = ["--targets", "file:p+vector:n+displacement:d", "--mirror", "--scalar-targets"]
    output("train", "regression", *shared, *both, "--scale-range", 1.2, "--epochs", 25, "--out", room / "surface")
    output("train", "regression", *shared, "--targets", "vector:w", "--epochs", 1, "--out", room / "faces")
    space = ["--vector-head", "space", "--features", "xyz+normals", "--epochs", 25, "--equal-weights"]
    output("train", "regression", *shared, *both, *space, "--out", room / "space")
    return folder


@pytest.mark.parametrize("run", ["surface", "faces"])
@pytest.mark.parametrize(("matrix", "step"), [(TURN, 1), (np.diag([1, -1, 1]), -1), (3 * TURN @ -np.eye(3), -1)])
def test_vectors_turn_and_mirror_with_the_mesh(flows: Path, run: str, matrix: np.ndarray, step: int) -> None:
    """Displacements have the size of the mesh, too."""
    network, mesh = DiffusionNet.load(flows.parent / run / "last.pt"), ball(7, 2)
    changed = make_mesh(mesh.vertices @ matrix, mesh.faces[:, ::step])
    (_, before), (_, after) = predict_values([make_mesh(mesh.vertices, mesh.faces), changed], network, "cpu")
    size = np.cbrt(abs(np.linalg.det(matrix)))
    for first, factor in [(0, 1), (3, size)][: before.shape[1] // 3]:
        expected = factor * before[:, first : first + 3] @ (matrix / size)
        assert np.linalg.norm(after[:, first : first + 3] - expected) < 1e-4 * np.linalg.norm(expected)
    np.testing.assert_allclose(after[:, 6:], before[:, 6:], atol=1e-3)


@pytest.mark.parametrize("run", ["surface", "space"])
def test_scores_of_vectors(flows: Path, run: str, tmp_path: Path) -> None:
    folder, mesh = flows.parent / run, flows / "m4.ply"
    results, network = results_of(folder), DiffusionNet.load(folder / "last.pt")
    statistics = load_checkpoint(folder / "last.pt")["target_statistics"]
    assert statistics["mean"][:6] == [0] * 6
    np.testing.assert_allclose(statistics["std"][:3], 2 / 3**0.5)
    assert max(statistics["std"][3:6]) < 0.5 / 3**0.5  # of the normalized mesh
    ((_, values),) = predict_values([mesh], network, "cpu")
    areas = np.ones(42) if run == "space" else element_areas(load_mesh(mesh), "vertices")
    row = table_of(folder / "per_mesh.csv")[0]
    for i, (name, truth) in enumerate((("n", np.load(flows / "m4.n.npy")), ("d", np.load(flows / "m4.d.npy")))):
        found, entry = values[:, 3 * i : 3 * i + 3], results["vectors"][i]
        error = (areas @ ((found - truth) ** 2).sum(1) / (areas @ (truth**2).sum(1))) ** 0.5
        cosine = (found * truth).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(truth, axis=1)
        angle = areas @ np.degrees(np.arccos(cosine)) / areas.sum()
        assert entry == {"name": name, "count": 42, "relative_l2": pytest.approx(error), "angle": pytest.approx(angle)}
        assert float(row[f"{name}_relative_l2"]) == pytest.approx(error, rel=1e-4)
        assert error < 0.3
    assert [column["name"] for column in results["columns"]] == ["n_0", "n_1", "n_2", "d_0", "d_1", "d_2", "p"]
    scored = ["--data", flows, "--checkpoint", folder / "last.pt", "--device", "cpu", "--out", tmp_path / "scores"]
    output("evaluate", *scored, "--cache", flows.parent / "cache")
    assert results_of(tmp_path / "scores")["vectors"] == results["vectors"]
    assert "angle in degrees" in (folder / "predictions.html").read_text()


def test_a_run_that_starts_from_vectors_predicts_them(flows: Path, tmp_path: Path) -> None:
    start = ["--data", flows, "--targets", "displacement:d+vector:n+file:p", "--scalar-targets", "--epochs", 1]
    more = ["--lr", 1e-9, "--from", flows.parent / "surface" / "last.pt", "--out", tmp_path / "run", "--seed", 1]
    output("train", "regression", *start, *more, "--cache", flows.parent / "cache", "--jobs", 1, "--device", "cpu")
    networks = [DiffusionNet.load(run / "last.pt") for run in (flows.parent / "surface", tmp_path / "run")]
    (before, after) = (predict_values([flows / "m4.ply"], network, "cpu")[0][1] for network in networks)
    np.testing.assert_allclose(after, before[:, [3, 4, 5, 0, 1, 2, 6]], atol=1e-3)


def test_vectors_that_are_refused(flows: Path, tmp_path: Path) -> None:
    train = ["train", "regression", "--data", flows, "--out", tmp_path / "run", "--epochs", 1, "--targets"]
    assert "vector:p has 1 columns, and a vector has 3" in complaint(*train, "vector:p")
    assert "Leave out --vector-head space" in complaint(*train, "vector:n", "--vector-head", "space")
    assert "write --targets vector:NAME" in complaint(*train, "file:n")


def test_sizes_count_with_fixed_units(room: Path, tmp_path: Path) -> None:
    """The choice is stored and applied in predictions."""
    shared = ["--data", room / "data", "--cache", room / "cache", *SMALL, "--features", "xyz", "--epochs", 1]
    output("train", "regression", *shared, "--normalize", "none", "--units", 2, "--out", tmp_path / "run")
    sizes = [make_mesh(size * ball(0).vertices, ball(0).faces) for size in (1, 3)]
    for run, scale in ((room / "whole", "radius"), (tmp_path / "run", 2.0)):
        network = DiffusionNet.load(run / "last.pt")
        (_, small), (_, large) = predict_values(sizes, network, "cpu")
        assert np.allclose(small, large, rtol=1e-4) is (scale == "radius")
        assert network_input(network).options.scale == scale
    command = ["train", "regression", *shared, "--units", 2, "--out", tmp_path / "other"]
    assert "units are for --normalize none, and it is radius" in complaint(*command)


def test_predict_writes_columns(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], viz.picture
    monkeypatch.setattr(viz, "picture", lambda meshes, **given: drawn.append(given["scalars"]) or draw(meshes, **given))
    mesh, checkpoint = room / "data" / "m7.ply", room / "run" / "last.pt"
    ((_, values),) = predict_values([mesh], DiffusionNet.load(checkpoint), "cpu")
    assert values.shape == (42, 2)
    assert values[:, 1].mean() == pytest.approx(1000, abs=20)
    run = ["predict", mesh, "--checkpoint", checkpoint, "--device", "cpu", "--out"]
    output(*run, tmp_path / "a.ply", "--png", tmp_path / "a.png")
    assert [list(fields) for fields in drawn[0]] == [["heights_0"]]
    output(*run, tmp_path / "a.npy")
    output(*run, tmp_path / "a.csv")
    properties = load_attributes(tmp_path / "a.ply").vertices
    np.testing.assert_array_equal(np.stack([properties["heights_0"], properties["heights_1"]], 1), values)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), values)
    assert (tmp_path / "a.csv").read_text().startswith("heights_0,heights_1\n")
    np.testing.assert_allclose(np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1), values, rtol=1e-7)
    folder = ["predict", mesh, room / "data" / "m8.ply", "--checkpoint", checkpoint, "--device", "cpu"]
    output(*folder, "--out", tmp_path / "folder")
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"m7.ply", "m8.ply", "report.csv"}


def test_evaluate_gives_the_results_of_the_run(room: Path, tmp_path: Path) -> None:
    shared = ["--cache", room / "cache", "--device", "cpu", "--jobs", 1]
    for name in ("run", "whole"):
        data = ["--data", room / "data", "--checkpoint", room / name / "last.pt"]
        output("evaluate", *data, *shared, "--out", tmp_path / name)
        run, report = (results_of(folder / name) for folder in (room, tmp_path))
        for one, other in zip(run["columns"], report["columns"], strict=True):
            assert (one.pop("name"), one.pop("count")) == (other.pop("name"), other.pop("count"))
            assert one == pytest.approx(other, rel=1e-6)
    table = tmp_path / "other.csv"
    table.write_text(f"file,volume\n{room / 'data' / 'm7.ply'},1\n")
    arguments = ["--data", table, "--checkpoint", room / "whole" / "last.pt", *shared, "--out", tmp_path / "new"]
    assert "the set has no column 'size'; its columns are volume" in complaint("evaluate", *arguments)


def test_predict_refuses(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    predict = ["predict", room / "data" / "m7.ply", "--checkpoint", room / "run" / "last.pt", "--device", "cpu"]
    line = complaint(*predict, "--out", "a.obj")
    assert "--out should be a .ply, .vtp, .npy, .csv or .shape.gii file for outputs at vertices, got a.obj" in line
    for option in (["--probabilities", "p.npz"], ["--smooth", "1"]):
        line = complaint(*predict, "--out", "a.ply", *option)
        assert f"{option[0]} is for networks that predict classes" in line


def test_functions_for_classes_refuse_numbers(room: Path) -> None:
    network = DiffusionNet.load(room / "run" / "last.pt")
    for function in (predict_labels, predict_probabilities):
        with pytest.raises(MetadataError, match="predicts numbers and not classes; call predict_values"):
            function([room / "data" / "m7.ply"], network, "cpu")
    network.metadata["task"] = "segmentation"
    network.metadata["targets"] = None
    with pytest.raises(MetadataError, match="the network is one of segmentation; call predict_labels"):
        predict_values([room / "data" / "m7.ply"], network, "cpu")


def test_a_network_of_ones_own_predicts_its_outputs(tmp_path: Path) -> None:
    """Without statistics, targets are taken as they are."""
    network = DiffusionNet(3, 2, width=8, blocks=1, outputs_at="global_mean")
    network.save(tmp_path / "own.safetensors", features="xyz", k=6, normalize=True, task="regression")
    ball(0).export(tmp_path / "a.ply")
    ((_, values),) = predict_values([tmp_path / "a.ply"], DiffusionNet.load(tmp_path / "own.safetensors"), "cpu")
    assert values.shape == (1, 2)
    assert np.abs(values).max() < 10


def test_a_checkpoint_with_other_statistics_is_refused(room: Path, tmp_path: Path) -> None:
    stored = load_checkpoint(room / "run" / "last.pt")
    for wrong in (None, {"mean": [0.0], "std": [1.0]}, {"mean": [0.0, 0.0], "std": [1.0, -1.0]}):
        save_checkpoint(tmp_path / "a.pt", {**stored, "target_statistics": wrong})
        with pytest.raises(CheckpointError, match=r"a.pt: the statistics of the targets should be"):
            load_checkpoint(tmp_path / "a.pt")


def test_options_of_other_tasks_are_refused() -> None:
    with pytest.raises(OptionError, match="loss is for regression, and the task is segmentation"):
        TrainOptions(loss="l1")
    with pytest.raises(OptionError, match="targets is for regression, and the task is classification"):
        TrainOptions(task="classification", targets="file:t")
    with pytest.raises(OptionError, match="conditions is not available for correspondence"):
        TrainOptions(task="correspondence", conditions="age")
    with pytest.raises(OptionError, match="label_smoothing is for tasks with labels, and the task is regression"):
        TrainOptions(task="regression", label_smoothing=0.1)
    with pytest.raises(OptionError, match="loss should be one of mse, l1, huber, got 'l2'"):
        TrainOptions(task="regression", loss="l2")  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_missing_targets_count_neither_in_losses_nor_in_scores(loss: str) -> None:
    options = TrainOptions(task="regression", loss=loss)
    outputs = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    targets = 3 * torch.randn(9, 2, dtype=torch.float64)
    targets[:4, 0], targets[8] = torch.nan, torch.nan
    known = ~targets.isnan()
    function = {"mse": "mse_loss", "l1": "l1_loss", "huber": "huber_loss"}[loss]
    expected = getattr(torch.nn.functional, function)(outputs[known].float(), targets[known])
    found = TASK.loss(outputs, targets, options)
    torch.testing.assert_close(found, expected, check_dtype=False)
    (gradient,) = torch.autograd.grad(found, outputs)
    assert (gradient[~known] == 0).all()
    assert (gradient[known] != 0).all()
    assert TASK.loss(outputs, torch.full_like(targets, torch.nan), options) == 0
    tally = TASK.tally(outputs.detach(), targets, 2, options)
    for i, row in enumerate(column_scores(tally)):
        p, y = outputs.detach()[known[:, i], i], targets[known[:, i], i]
        assert row["count"] == len(y)
        assert row["mae"] == pytest.approx(float((p - y).abs().mean()))
        assert row["rmse"] == pytest.approx(float(((p - y) ** 2).mean() ** 0.5))
        assert row["r2"] == pytest.approx(1 - float(((p - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()))


def test_weights_of_targets() -> None:
    options = TrainOptions(task="regression", targets="vector:u+file:p+file:q", target_weights="p=2,u=0.5")
    data = LabeledMeshes([], [], ["u_0", "u_1", "u_2", "p", "q"], "faces")
    options = TASK.prepared(data, options)[1]
    assert (options.target_weights, TASK.prepared(data, options)[1]) == ("0.5,0.5,0.5,2,1", options)
    outputs, targets = torch.randn(2, 7, 5)
    targets[0, 1] = torch.nan
    expected = ((outputs - targets) ** 2 * torch.tensor([0.5, 0.5, 0.5, 2, 1])).nanmean()
    torch.testing.assert_close(TASK.loss(outputs, targets, options), expected)
    wrong = {
        "r=1": "names 'r', and the targets are u, u_0",
        "p=-1": "finite and at least 0",
        "1,2": "2 weights for 5 columns",
    }
    for text, message in wrong.items():
        with pytest.raises(OptionError, match=message):
            TASK.prepared(data, replace(options, target_weights=text))


def test_scores_that_are_not_defined_are_null() -> None:
    nothing, constant = column_scores([[0, 0, 0, 0, 0], [3, 6, 12, 1, 1]])
    assert np.isnan([nothing["mae"], nothing["rmse"], nothing["r2"], constant["r2"]]).all()
    assert np.isnan(TASK.score(torch.zeros(2, 5), TrainOptions(task="regression")))


@pytest.mark.parametrize("offset", [0.0, 1e7, -1e11])
def test_scores_of_targets_far_from_0(offset: float) -> None:
    """Targets with deviation 1, predicted with errors of deviation 1/2. One column is constant."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 2)) * [1, 0]
    parts = draws[:1000], draws[1000:]
    items = [LabeledMesh("", make_mesh(rng.normal(size=(len(rows), 3)), None), offset + rows) for rows in parts]
    statistics = target_statistics(items, ["u", "v"])
    np.testing.assert_allclose(np.array(statistics["mean"]) - offset, draws.mean(0), atol=1e-4)
    np.testing.assert_allclose(statistics["std"], [draws[:, 0].std(), 1], rtol=1e-4)
    standardized = standardized_targets(items, statistics)
    np.testing.assert_allclose(np.concatenate([item.labels for item in standardized])[:, 0].std(), 1, rtol=1e-4)
    predictions = [
        original_targets(torch.tensor(item.labels + rng.normal(scale=0.5, size=item.labels.shape)), statistics)
        for item in standardized
    ]
    results = TASK.results(Scored(items, predictions, ["u", "v"], "vertices", TrainOptions(task="regression")))
    errors = np.concatenate(predictions) - np.concatenate([item.labels for item in items])
    expected = 1 - (errors[:, 0] ** 2).mean() / draws[:, 0].var()
    assert 0.73 < expected < 0.77
    assert results["columns"][0]["r2"] == pytest.approx(expected, rel=1e-4) == results["test_r2"]
    assert (results["columns"][0]["count"], results["columns"][1]["r2"]) == (4000, None)
