"""Files of others: vertices of no face, polygons, shared buffers, lines, gray colors and STL, from file to score."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
import trimesh
from command import complaint, diffnet, output
from numpy.typing import NDArray
from polygon_files import FORMS, lines, read, refused, written

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, Preprocessing, array_statistics, load_dataset, prepare
from diffnet.geometry import (
    Mesh,
    MeshError,
    diagnose,
    element_areas,
    file_edges,
    load_mesh,
    make_mesh,
    mesh_edges,
    normalize_positions,
    on_triangles,
    precompute,
)
from diffnet.geometry.elements.elements import polygon_shares
from diffnet.geometry.mesh.attributes import mesh_arrays
from diffnet.train import match_meshes, predict_labels, predict_probabilities, predict_values
from diffnet.viz import picture

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

L_SHAPE = np.array([[0, 0], [2, 0], [2, 1], [1, 1], [1, 2], [0, 2]], float)


def ball(seed: int = 0) -> trimesh.Trimesh:
    found = trimesh.creation.icosphere(2)
    found.vertices *= np.random.default_rng(seed).uniform(0.6, 1.4, 3)
    return found


def with_strays(mesh: trimesh.Trimesh, far: float) -> Mesh:
    """Vertex 5 is of no face, the last one of a face with a repeated corner."""
    verts = np.insert(np.asarray(mesh.vertices), 5, [far, 0, 0], axis=0)
    faces = np.asarray(mesh.faces) + (np.asarray(mesh.faces) >= 5)
    verts = np.concatenate([verts, [[0, far, far]]])
    return make_mesh(verts, np.concatenate([faces, [[len(verts) - 1, 0, 0]]]), name=f"far {far}")


def network(at: str = "vertices", features: str = "xyz", out: int = 3, **metadata: Any) -> DiffusionNet:
    from diffnet.data import feature_channels

    torch.manual_seed(1)
    found = DiffusionNet(feature_channels(features), out, width=8, blocks=1, outputs_at=at)  # type: ignore[arg-type]
    found.metadata = {"features": features, "k": 8, "normalize": True, **metadata}
    return found


def saved(path: Path, *arguments: Any, **more: Any) -> DiffusionNet:
    """A network in a file."""
    found = network(*arguments, **more)
    found.save(path, **found.metadata)
    return found


def area(mesh: Mesh) -> float:
    return float(element_areas(mesh, "faces").sum())


# Vertices of no face


@pytest.mark.parametrize("rule", ["radius", "area"])
def test_vertices_of_no_face_do_not_count_for_center_and_scale(rule: Any) -> None:
    clean = make_mesh(ball().vertices, ball().faces)
    expected = normalize_positions(clean.verts, clean.faces, rule)
    for far in (2.0, 1e9, np.float64(0)):
        mesh = with_strays(ball(), far)
        for convert in (np.asarray, torch.as_tensor):
            found = normalize_positions(convert(mesh.verts), convert(mesh.faces), rule)  # type: ignore[type-var]
            np.testing.assert_allclose(np.asarray(found)[mesh.on_surface], expected, atol=1e-12)
        _, operators = prepare(mesh, Preprocessing(k=8, normalize=rule))
        _, cleaned = prepare(clean, Preprocessing(k=8, normalize=rule))
        np.testing.assert_allclose(operators.evals, cleaned.evals, rtol=1e-4, atol=1e-4)
        assert float(operators.mass.sum()) == pytest.approx(float(cleaned.mass.sum()), rel=1e-6)
        before = normalize_positions(mesh.verts, mesh.faces, f"all-{rule}")  # type: ignore[arg-type]
        np.testing.assert_allclose(before.mean(0), 0, atol=1e-6)
    cloud = np.random.default_rng(0).random((9, 3))
    np.testing.assert_array_equal(normalize_positions(cloud, np.zeros((0, 3), int)), normalize_positions(cloud))


def test_the_original_counts_all_vertices() -> None:
    mesh = with_strays(ball(), 9)
    original = precompute(mesh, k=4, normalize=True, operators="original")
    by_hand = precompute(replace(mesh, verts=normalize_positions(mesh.verts)), k=4, operators="original")
    assert torch.equal(original.mass, by_hand.mass)
    assert Preprocessing(operators="original", normalize="area").normalize == "all-area"


@pytest.mark.parametrize("features", ["xyz", "normals", "curvature+diffused-curvature+log-hks", "wks+hks"])
def test_predictions_are_those_without_them(features: str) -> None:
    clean = make_mesh(ball().vertices, ball().faces)
    net = network(features=features)
    ((_, expected),) = predict_probabilities([clean], net, "cpu")
    for far in (2.0, 100.0):
        mesh = with_strays(ball(), far)
        ((_, shares),) = predict_probabilities([mesh], net, "cpu")
        np.testing.assert_allclose(shares[mesh.on_surface], expected, atol=2e-4)
        assert np.isnan(shares[~mesh.on_surface]).all()
        ((_, labels),) = predict_labels([mesh], net, "cpu")
        assert labels[~mesh.on_surface].tolist() == [-1, -1]
        np.testing.assert_array_equal(labels[mesh.on_surface], shares[mesh.on_surface].argmax(1))
    ((_, values),) = predict_values([mesh], network(out=2, task="regression", features=features), "cpu")
    np.testing.assert_array_equal(np.isnan(values).all(1), ~mesh.on_surface)


def test_files_of_predictions_have_minus_one_and_nan(tmp_path: Path) -> None:
    mesh = with_strays(ball(), 3)
    trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(tmp_path / "m.ply")
    stray = ~load_mesh(tmp_path / "m.ply").on_surface
    assert stray.sum() == 2
    saved(tmp_path / "a.safetensors", label_names=list("abc"), label_numbers=[5, 7, 9])
    predict = ["predict", tmp_path / "m.ply", "--device", "cpu", "--checkpoint", tmp_path / "a.safetensors", "--out"]
    for more in ([], ["--smooth", 1]):
        for form in ("txt", "npy", "csv", "json", "ply"):
            file = tmp_path / f"o.{form}"
            output(*predict, file, *more)
            if form == "csv":
                rows = list(csv.DictReader(file.open()))
                labels = np.array([int(row["label"]) for row in rows])
                assert [row["name"] for row in rows if row["label"] == "-1"] == ["", ""]
            elif form == "ply":
                labels = plyfile.PlyData.read(file)["vertex"]["label"]
            else:
                text = {"txt": np.loadtxt, "npy": np.load, "json": lambda f: json.loads(f.read_text())["labels"]}
                labels = np.array(text[form](file))
            np.testing.assert_array_equal(labels == -1, stray)
            assert set(labels.tolist()) <= {-1, 5, 7, 9}
    output(*predict, tmp_path / "i.npy", "--instances", "--html", tmp_path / "i.html", "--png", tmp_path / "i.png")
    assert np.load(tmp_path / "i.npy")[stray].tolist() == [[-1, -1]] * 2
    saved(tmp_path / "a.safetensors", out=1, task="regression")
    for form in ("npy", "csv", "ply"):
        output(*predict, tmp_path / f"r.{form}")
    np.testing.assert_array_equal(np.isnan(np.load(tmp_path / "r.npy")[:, 0]), stray)
    np.testing.assert_array_equal(np.isnan(np.genfromtxt(tmp_path / "r.csv")[1:]), stray)


def test_labels_of_vertices_of_no_face_are_ignored(tmp_path: Path) -> None:
    """In training and in scores: a set with wrong labels there is the set without labels there."""
    from diffnet.train.inference.network_input import network_input
    from diffnet.train.options import TrainOptions
    from diffnet.train.tasks.task import task_named

    mesh = with_strays(ball(), 3)
    item = LabeledMesh("m", mesh, np.ones(len(mesh.verts), np.int64))
    data = LabeledMeshes([item], [item], ["a", "b", "c"], "vertices")
    task = task_named("segmentation")
    trained, _ = task.prepared(data, TrainOptions())
    tested = task.test_set(data, network_input(network(label_names=list("abc"))))
    for own in (trained.train[0], tested.test[0]):
        np.testing.assert_array_equal(own.labels == -1, ~mesh.on_surface)
    assert task.prepared(data, TrainOptions(operators="original"))[0] is data
    older = network(label_names=list("abc"), normalize="all-radius")
    assert (task.test_set(data, network_input(older)).test[0].labels == 1).all()
    targets = replace(data, test=[replace(item, labels=np.ones((len(mesh.verts), 3)))])
    regression = task_named("regression")
    tested = regression.test_set(targets, network_input(network(task="regression", label_names=list("abc"))))
    np.testing.assert_array_equal(np.isnan(tested.test[0].labels).all(1), ~mesh.on_surface)
    own = np.where(mesh.on_surface, 1.0, 1e6)
    item = replace(item, arrays={"q": own})
    assert array_statistics([item], "file:q") == {"q": {"mean": [1.0], "std": [1.0]}}
    assert array_statistics([item], "file:q", scale="all-radius")["q"]["mean"][0] > 1


def test_networks_of_older_versions_predict_as_before(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    mesh = with_strays(ball(), 3)
    saved(tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = {**file.metadata(), "diffnet_format": "1"}
        del texts["sha256"]  # older files have none
    save_file(weights, tmp_path / "old.safetensors", texts)
    older, newer = (DiffusionNet.load(tmp_path / f"{name}.safetensors") for name in ("old", "new"))
    assert (older.metadata["normalize"], newer.metadata["normalize"]) == ("all-radius", True)
    ((_, shares),) = predict_probabilities([mesh], older, "cpu")
    moved = replace(mesh, verts=normalize_positions(mesh.verts))
    ((_, expected),) = predict_probabilities([moved], network(normalize=False), "cpu")
    np.testing.assert_allclose(shares[mesh.on_surface], expected[mesh.on_surface], atol=1e-5)
    assert np.isfinite(shares).all()
    assert np.isnan(expected[~mesh.on_surface]).all()


def test_matches_leave_out_vertices_of_no_face() -> None:
    metadata = {"task": "correspondence", "map_k": 6, "normalize": "area"}
    a, b = with_strays(ball(1), 5), with_strays(ball(2), 7)
    clean = [make_mesh(ball(i).vertices, ball(i).faces) for i in (1, 2)]
    for method, zoomout in (("supervised", False), ("unsupervised", False), ("unsupervised", True)):
        net = network(out=16, features="wks", k=20, method=method, **metadata)
        found = match_meshes(a, b, net, "cpu", zoomout=zoomout)
        np.testing.assert_array_equal(found.matches == -1, ~b.on_surface)
        expected = np.flatnonzero(a.on_surface)[match_meshes(*clean, net, "cpu", zoomout=zoomout).matches]
        assert (found.matches[b.on_surface] == expected).mean() > 0.95  # up to rounding


@pytest.mark.parametrize("name", ["stray_2", "stray_10", "stray_100", "organised_zeros"])
def test_scans_with_stray_vertices(shared: Path, name: str) -> None:
    folder = shared / "data" / "cases" / "17_stray"
    clean = "organised_clean" if name == "organised_zeros" else "clean"
    net = network(features="xyz+normals+log-hks")
    ((_, expected), (mesh, shares)) = predict_probabilities([folder / f"{n}.ply" for n in (clean, name)], net, "cpu")
    np.testing.assert_allclose(shares[mesh.on_surface], expected, atol=1e-3)
    assert np.isnan(shares[~mesh.on_surface]).all()


def test_a_used_vertex_that_is_too_far_is_named() -> None:
    found = ball()
    found.vertices[17] = [1e9, 0, 0]
    for normalize in (False, True):
        with pytest.raises(MeshError, match=r"no area.* the farthest is vertex 17"):
            precompute((found.vertices, found.faces), k=4, normalize=normalize)


# Polygons


def prism(sign: int = 1) -> tuple[NDArray[np.float64], list[list[int]]]:
    """An L prism of hexagons: its vertices, and its faces turned outward."""
    verts = np.concatenate([np.insert(L_SHAPE, 2, z, axis=1) for z in (0, 2)])
    sides = [[i, (i + 1) % 6, 6 + (i + 1) % 6, 6 + i] for i in range(6)]
    return verts, [[5, 4, 3, 2, 1, 0], [6, 7, 8, 9, 10, 11], *sides]


@pytest.mark.parametrize("form", FORMS)
def test_polygons_are_cut_inside(tmp_path: Path, form: str) -> None:
    verts, faces = prism()
    for turn in range(6):  # fans at some corners are inside
        turned = [[*f[turn % len(f) :], *f[: turn % len(f)]] for f in faces]
        path = tmp_path / f"{turn}{FORMS[form]}"
        mesh = read(path, written(form, verts, turned), tmp_path / "cache")
        again = load_mesh(path, tmp_path / "cache")
        assert area(mesh) == pytest.approx(22)
        found = diagnose(mesh)
        assert (found.faces, found.euler, found.boundary_edges, found.misoriented_edges) == (20, 2, 0, 0)
        assert not found.inside_out
        for own in (mesh, again):
            assert own.sizes.tolist() == [len(f) for f in faces]
            assert own.corners.tolist() == [i for f in turned for i in f]
        edges = mesh_edges(mesh.faces)[file_edges(mesh)]
        pairs = [tuple(sorted((f[i - 1], f[i]))) for f in turned for i in [*range(1, len(f)), 0]]
        assert [tuple(edge) for edge in edges] == list(dict.fromkeys(pairs))


def test_polygons_of_all_shapes_keep_their_area(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for count in (4, 5, 9, 40):
        for _ in range(10):
            angles = 2 * np.pi * (np.arange(count) + rng.uniform(0, 0.9, count)) / count
            radii = rng.uniform(0.2, 1, count)
            flat = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
            flat = np.insert(flat, 1, (flat[0] + flat[1]) / 2, axis=0)  # a corner on a side
            x, y = flat.T
            expected = abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
            verts = np.insert(flat, 2, 0, axis=1) @ np.linalg.qr(rng.normal(size=(3, 3)))[0].T + rng.normal(size=3)
            mesh = read(tmp_path / "a.off", written("off", verts.tolist(), [list(range(count + 1))]))
            assert area(mesh) == pytest.approx(expected)
            assert len(mesh.faces) == count - 1
            assert set(mesh.faces.ravel()) == set(range(count + 1))
    crossed = read(tmp_path / "a.off", written("off", [[0, 0, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2, 3]]))
    assert crossed.faces.tolist() == [[0, 1, 2], [0, 2, 3]]


def test_convex_polygons_keep_their_fans(tmp_path: Path) -> None:
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    for lift in (0, 0.1):
        verts = np.stack([np.cos(angles), np.sin(angles), lift * np.cos(2 * angles)], axis=1)
        mesh = read(tmp_path / "a.off", written("off", verts.tolist(), [list(range(12)), list(range(12))[::-1]]))
        fan = [[0, i, i + 1] for i in range(1, 11)] + [[11, i, i - 1] for i in range(10, 0, -1)]
        assert mesh.faces.tolist() == fan


def test_quads_given_as_arrays() -> None:
    verts = [[0, 0, 0], [4, 0, 0], [1, 1, 0], [0, 4, 0]]
    for turn in range(4):
        mesh = load_mesh((np.array(verts, float), np.roll([[0, 1, 2, 3]], turn, axis=1)))
        assert area(mesh) == pytest.approx(4)


# Labels and targets at faces and edges of the file


def quads(seed: int = 0) -> tuple[NDArray[np.float64], list[list[int]]]:
    """A torus of 97 faces: quadrilaterals, a hexagon and four triangles."""
    u, v = (2 * np.pi * np.arange(n) / n for n in (12, 8))
    r = np.random.default_rng(seed).uniform(0.3, 0.5)
    verts = [[(1 + r * np.cos(b)) * np.cos(a), (1 + r * np.cos(b)) * np.sin(a), r * np.sin(b)] for a in u for b in v]
    faces = [
        [8 * i + j, 8 * ((i + 1) % 12) + j, 8 * ((i + 1) % 12) + (j + 1) % 8, 8 * i + (j + 1) % 8]
        for i in range(12)
        for j in range(8)
    ]
    joined = [*faces[10][:3], *faces[11][2:], faces[10][3]]
    split = [[f[0], *f[k : k + 2]] for f in faces[20:22] for k in (1, 2)]
    faces = [*faces[:10], joined, *faces[12:20], *split, *faces[22:]]
    return np.round(verts, 6), faces


@pytest.mark.parametrize("form", FORMS)
def test_one_prediction_for_each_face_of_the_file(tmp_path: Path, form: str) -> None:
    verts, faces = quads()
    path = tmp_path / f"m{FORMS[form]}"
    mesh = read(path, written(form, verts.tolist(), faces))
    assert len(mesh.faces) == 192
    net = saved(tmp_path / "a.safetensors", "faces", label_names=list("abc"))
    ((_, shares),) = predict_probabilities([path], net, "cpu")
    assert shares.shape == (97, 3)
    triangles = make_mesh(mesh.verts, mesh.faces)
    ((_, own),) = predict_probabilities([triangles], net, "cpu")
    logits = np.zeros((97, 3))
    np.add.at(logits, mesh.polygons, np.log(own) * polygon_shares(mesh)[:, None])
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(shares, expected, atol=1e-3)
    predict = ["predict", path, "--device", "cpu", "--checkpoint", tmp_path / "a.safetensors", "--out"]
    labels = shares.argmax(1)
    for more, load in (("seg", np.loadtxt), ("txt", np.loadtxt), ("npy", np.load)):
        output(*predict, tmp_path / f"o.{more}")
        np.testing.assert_array_equal(load(tmp_path / f"o.{more}"), labels)
    output(*predict, tmp_path / "o.csv")
    output(*predict, tmp_path / "o.ply", "--html", tmp_path / "o.html", "--png", tmp_path / "o.png")
    table = plyfile.PlyData.read(tmp_path / "o.ply")["face"]
    np.testing.assert_array_equal(table["label"], labels)
    assert [f.tolist() for f in table["vertex_indices"]] == faces
    output(*predict, tmp_path / "s.npy", "--smooth", 0.5, "--instances", "--probabilities", tmp_path / "p.npz")
    assert np.load(tmp_path / "s.npy").shape == (97, 2)
    assert np.load(tmp_path / "p.npz")[str(path)].shape == (97, 3)
    ((_, values),) = predict_values([path], network("faces", out=2, task="regression"), "cpu")
    assert values.shape == (97, 2)
    drawn = picture(mesh, vectors=np.ones((97, 3)), size=(60, 60))
    np.testing.assert_array_equal(drawn.pixels, picture(mesh, vectors=np.ones((192, 3)), size=(60, 60)).pixels)


def test_one_prediction_for_each_edge_of_the_file(tmp_path: Path) -> None:
    verts, faces = quads()
    path = tmp_path / "m.obj"
    mesh = read(path, written("obj", verts.tolist(), faces))
    assert len(mesh_edges(mesh.faces)) == 288
    ((_, labels),) = predict_labels([path], network("edges"), "cpu")
    assert labels.shape == (len(file_edges(mesh)),) == (193,)
    on_all = on_triangles(mesh, labels, "edges")
    assert (on_all == -1).sum() == 95
    np.testing.assert_array_equal(on_all[file_edges(mesh)], labels)
    saved(tmp_path / "a.safetensors", "edges", label_names=list("abc"))
    predict = ["predict", path, "--device", "cpu", "--checkpoint", tmp_path / "a.safetensors", "--out"]
    for more in ("eseg", "ply"):
        output(*predict, tmp_path / f"o.{more}")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "o.eseg"), labels)


def write_meshes(folder: Path) -> Iterator[tuple[Path, Mesh, list[NDArray[np.float64]]]]:
    """Four meshes of polygons, in `train` and `test`: their files, and the corners of each polygon."""
    for i in range(4):
        verts, faces = quads(i)
        place = folder / ("test" if i == 3 else "train") / f"m{i}.obj"
        place.parent.mkdir(parents=True, exist_ok=True)
        yield place, read(place, written("obj", verts.tolist(), faces)), [verts[f] for f in faces]


def write_set(folder: Path, at: str) -> list[NDArray[np.int64]]:
    """The meshes with two classes. Returns the labels of each."""
    found = []
    for place, mesh, polygons in write_meshes(folder):
        if at == "faces":
            values = np.array([corners[:, 0].mean() > 0.2 for corners in polygons], int)
        else:
            values = (mesh.verts[mesh_edges(mesh.faces)[file_edges(mesh)], 0].mean(1) > 0.2).astype(int)
        file = place.with_suffix(".txt") if at == "faces" else folder / "seg" / f"{place.stem}.eseg"
        file.parent.mkdir(exist_ok=True)
        np.savetxt(file, values, fmt="%d")
        found.append(values)
    return found


@pytest.mark.parametrize("at", ["faces", "edges"])
@pytest.mark.parametrize("decimated", [False, True])
def test_scores_count_elements_of_the_file(tmp_path: Path, at: str, decimated: bool) -> None:
    labels = write_set(tmp_path / "set", at)
    more = ["--max-faces", 120] if decimated else []
    common = ["--device", "cpu", "--cache", tmp_path / "cache", "--jobs", 1]
    options = ["--epochs", 1, "--k", 8, "--width", 8, "--blocks", 1, "--features", "xyz", "--validation", 0.34, *more]
    train = ["train", "segmentation", "--data", tmp_path / "set", "--out", tmp_path / "run", *common, *options]
    assert diffnet(*train)[0] == 0
    counts = [row["count"] for row in json.loads((tmp_path / "run" / "results.json").read_text())["classes"]]
    assert counts == np.bincount(labels[3]).tolist()
    shards = ["precompute", tmp_path / "set", "--write-shards", tmp_path / "shards", "--task", "segmentation", "--k", 8]
    assert diffnet(*shards, "--cache", tmp_path / "cache", "--jobs", 1, "--device", "cpu")[0] == 0
    for name in ("shards", "set"):
        evaluate = ["evaluate", "--checkpoint", tmp_path / "run" / "last.pt", "--data", tmp_path / name, *common]
        assert diffnet(*evaluate, "--out", tmp_path / f"scores of {name}")[0] == 0
        results = json.loads((tmp_path / f"scores of {name}" / "results.json").read_text())
        assert [row["count"] for row in results["classes"]] == counts
    network = DiffusionNet.load(tmp_path / "run" / "last.pt")
    ((_, predicted),) = predict_labels([tmp_path / "set" / "test" / "m3.obj"], network, "cpu")
    assert len(predicted) == len(labels[3])
    assert results["test_accuracy"] == pytest.approx((predicted == labels[3]).mean())


def test_targets_at_faces_of_the_file(tmp_path: Path) -> None:
    for place, _, polygons in write_meshes(tmp_path / "set"):
        truth = [corners[:, 2].mean() for corners in polygons]
        np.save(place.with_suffix(".height.npy"), truth)
    common = ["--device", "cpu", "--cache", tmp_path / "cache", "--jobs", 1]
    options = ["--epochs", 1, "--k", 8, "--width", 8, "--blocks", 1, "--features", "xyz", "--no-rotate"]
    train = ["train", "regression", "--data", tmp_path / "set", "--targets", "file:height", "--out", tmp_path / "run"]
    assert diffnet(*train, *common, *options)[0] == 0
    (column,) = json.loads((tmp_path / "run" / "results.json").read_text())["columns"]
    assert column["count"] == 97
    ((_, values),) = predict_values([place], DiffusionNet.load(tmp_path / "run" / "last.pt"), "cpu")
    assert column["mae"] == pytest.approx(np.abs(values[:, 0] - truth).mean(), rel=1e-4)


def test_labels_become_those_of_polygons() -> None:
    """Each polygon votes once, and gets the vote of its corners."""
    from diffnet.data import with_labels_at

    verts, faces = quads()
    mesh = load_mesh((verts, np.array(faces[30:50])))
    labels = np.arange(20) % 3
    item = LabeledMesh("m", mesh, on_triangles(mesh, labels, "faces"))
    at_vertices = with_labels_at(LabeledMeshes([], [item], ["a", "b", "c"], "faces"), "vertices").test[0].labels
    for vertex in range(len(verts)):
        votes = [label for f, label in zip(faces[30:50], labels, strict=True) if vertex in f]
        assert at_vertices[vertex] == (np.bincount(votes).argmax() if votes else -1)
    back = with_labels_at(LabeledMeshes([], [replace(item, labels=at_vertices)], ["a", "b", "c"], "vertices"), "faces")
    expected = [np.bincount(at_vertices[f]).argmax() for f in faces[30:50]]
    np.testing.assert_array_equal(back.test[0].labels, np.repeat(expected, 2))


def test_the_quads_of_a_set_of_others(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "cases" / "36_quads_face_labels"
    data = load_dataset(folder)
    assert data.labels_at == "faces"
    net = network("faces", out=2, label_names=data.label_names)
    assert {len(labels) for _, labels in predict_labels(sorted(folder.glob("*.obj")), net, "cpu")} == {216}


# Formats


def shared_gltf(parts: int, count: int = 1) -> dict[str, Any]:
    """A ball in parts, each with its own indices into one buffer of vertices, shown by several nodes."""
    sphere = trimesh.creation.icosphere(2)
    verts, faces = sphere.vertices.astype("<f4"), sphere.faces.astype("<u4")
    pieces = np.array_split(faces, parts)
    content = verts.tobytes() + faces.tobytes()
    ends = np.cumsum([0, *(piece.nbytes for piece in pieces)])
    views = [{"buffer": 0, "byteLength": verts.nbytes}]
    views += [{"buffer": 0, "byteOffset": verts.nbytes + int(a), "byteLength": int(b - a)} for a, b in pairwise(ends)]
    accessors = [{"bufferView": 0, "componentType": 5126, "count": len(verts), "type": "VEC3"}]
    accessors += [
        {"bufferView": i + 1, "componentType": 5125, "count": piece.size, "type": "SCALAR"}
        for i, piece in enumerate(pieces)
    ]
    primitives = [{"attributes": {"POSITION": 0}, "indices": i + 1} for i in range(parts)]
    uri = "data:application/octet-stream;base64," + base64.b64encode(content).decode()
    node = {"mesh": 0, "rotation": [0, 0, 1, 0], "scale": [2, 1, 1]}
    nodes = [{**node, "translation": [9 * i, 0, 0]} for i in range(count)]
    return {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": list(range(count))}],
        "nodes": nodes,
        "meshes": [{"primitives": primitives}],
        "accessors": accessors,
        "bufferViews": views,
        "buffers": [{"uri": uri, "byteLength": len(content)}],
    }


def test_gltf_parts_share_their_vertices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFNET_MAX_UNPACKED_GIB", str(3e5 / 2**30))  # 200 copies of the vertices would be 780 kB
    sphere = trimesh.creation.icosphere(2)
    for parts in (1, 8, 200):
        mesh = read(tmp_path / f"{parts}.gltf", json.dumps(shared_gltf(parts)))
        np.testing.assert_allclose(mesh.verts, sphere.vertices * [-2, -1, 1], atol=1e-6)
        np.testing.assert_array_equal(mesh.faces, sphere.faces)
        assert diagnose(mesh).unreferenced_vertices == 0
    copied = shared_gltf(8)  # each part has its own accessor of the same buffer
    for i, primitive in enumerate(copied["meshes"][0]["primitives"]):
        copied["accessors"].append(copied["accessors"][0])
        primitive["attributes"] = {"POSITION": 9 + i}
    parts = copied["meshes"][0]["primitives"]  # and is a mesh of its own
    copied["meshes"], copied["scenes"] = [{"primitives": [part]} for part in parts], [{"nodes": list(range(8))}]
    copied["nodes"] = [{**copied["nodes"][0], "mesh": i} for i in range(8)]
    assert len(read(tmp_path / "copied.gltf", json.dumps(copied)).verts) == 162
    assert len(read(tmp_path / "two.gltf", json.dumps(shared_gltf(3, count=2))).verts) == 2 * 162
    refused(tmp_path / "many.gltf", json.dumps(shared_gltf(2, count=60)), "DIFFNET_MAX_UNPACKED_GIB")


@pytest.mark.parametrize("form", ["glb", "off"])
def test_arrays_of_gltf_and_off_are_listed(tmp_path: Path, form: str) -> None:
    box, path = trimesh.creation.box(), tmp_path / f"a.{form}"
    colors = np.array([[255, 0, 0, 255], [0, 0, 255, 255]], np.uint8)
    if form == "glb":
        box.visual.vertex_colors = colors[np.arange(8) % 2]
        box.vertex_attributes["_part"] = np.arange(8, dtype=np.float32) % 3
        path.write_bytes(box.export(file_type="glb"))
        expected = [("colors", "vertices", np.eye(3)[[0, 2] * 4]), ("labels", "vertices", np.arange(8) % 3)]
    else:
        faces = [[3, *face, *colors[i % 2]] for i, face in enumerate(box.faces.tolist())]
        path.write_text("OFF\n8 12 0\n" + lines(box.vertices.tolist()) + lines(faces))
        expected = [("colors", "faces", np.eye(3)[[0, 2] * 6])]
    arrays = mesh_arrays(path)
    assert [(array.kind, array.at) for array in arrays] == [each[:2] for each in expected]
    for array, (_, _, values) in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array.values, values)


def test_the_shared_buffer_of_others(shared: Path) -> None:
    mesh = load_mesh(shared / "data" / "cases" / "34_shared_vertex_buffer_8.glb")
    assert (len(mesh.verts), len(mesh.faces), diagnose(mesh).faults) == (642, 1280, [])


POINTS = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\n"


def test_files_of_lines_are_refused(tmp_path: Path, shared: Path) -> None:
    refused(tmp_path / "a.obj", POINTS + "l 1 2\nl 2 3 4\n", "it holds lines, expected polygons")
    refused(tmp_path / "b.obj", POINTS + "cstype bezier\nsurf 0 1 0 1 1 2 3 4\nend\n", "it holds free-form surfaces")
    assert read(tmp_path / "c.obj", POINTS + "p 1 2 3 4\n").is_point_cloud
    assert len(read(tmp_path / "d.obj", POINTS + "l 1 2\nf 1 2 3\n").faces) == 1
    element = "element edge 1\nproperty int vertex1\nproperty int vertex2\n"
    edges = written("ply", np.eye(3).tolist(), []).replace("end_header", f"{element}end_header")
    refused(tmp_path / "a.ply", edges + "0 1\n", "it holds edges, expected polygons")
    lines = shared_gltf(1)
    lines["meshes"][0]["primitives"][0]["mode"] = 1
    refused(tmp_path / "a.gltf", json.dumps(lines), "a primitive has mode 1")
    with pytest.raises(MeshError, match="it holds lines"):
        load_mesh(shared / "data" / "cases" / "38_lines_only.obj")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("ends", [("\n", "\r\n"), ("\r\n", "\n"), ("\n", " \n"), ("\r", "\r")])
def test_line_ends_of_a_ply_header(tmp_path: Path, ends: tuple[str, str], binary: bool) -> None:
    sphere = trimesh.creation.icosphere(1)
    sphere.vertices[0] = np.frombuffer(b"\n\n\n\n" * 3, "<f4")  # the first bytes of data are line feeds
    data = sphere.export(file_type="ply", encoding="binary" if binary else "ascii", vertex_normal=False)
    header, _, rest = data.partition(b"end_header\n")
    header = header.replace(b"\n", ends[0].encode()) + b"end_header" + ends[1].encode()
    mesh = read(tmp_path / "a.ply", header + rest)
    np.testing.assert_array_equal(mesh.faces, sphere.faces)
    np.testing.assert_allclose(mesh.verts, sphere.vertices, atol=1e-7)


def painted(vertices: Any, faces: Any) -> str:
    """A pyramid with colors of its vertices and of its faces."""
    text = written("ply", np.eye(4)[:, :3].tolist(), [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]])
    colors = "".join(f"property uchar {name}\n" for name in ("red", "green", "blue"))
    head, _, rows = text.partition("end_header\n")
    head = head.replace("element face", f"{colors}element face") + colors
    every = zip(rows.splitlines(), [*vertices, *faces], strict=True)
    lines = [f"{row} {' '.join(map(str, own))}" for row, own in every]
    return f"{head}end_header\n" + "\n".join(lines) + "\n"


GRAY, RED, GREEN = [192] * 3, [255, 0, 0], [0, 255, 0]


@pytest.mark.parametrize(
    ("vertices", "faces", "at", "names"),
    [
        ([GRAY] * 4, [RED, RED, GREEN, RED], "faces", ["#00ff00", "#ff0000"]),
        ([RED, RED, GREEN, RED], [GRAY] * 4, "vertices", ["#00ff00", "#ff0000"]),
        ([GRAY] * 4, [RED] * 4, "faces", ["#ff0000"]),
        ([RED] * 4, [GRAY] * 4, "vertices", ["#ff0000"]),
        ([RED, RED, GREEN, RED], [RED, RED, GREEN, RED], "vertices", ["#00ff00", "#ff0000"]),
    ],
)
def test_the_colors_that_differ_are_the_labels(tmp_path: Path, vertices: Any, faces: Any, at: str, names: Any) -> None:
    from diffnet.data.folders.sources import read_source

    (tmp_path / "a.ply").write_text(painted(vertices, faces))
    found = read_source(tmp_path / "a.ply")
    assert (found.at, found.names) == (at, names)


def test_gray_vertices_of_others(shared: Path) -> None:
    data = load_dataset(shared / "data" / "cases" / "07b_grey_vertices_coloured_faces")
    assert (data.labels_at, len(data.label_names)) == ("faces", 2)


def test_stl_files_have_no_numbers_of_vertices(tmp_path: Path) -> None:
    ball().export(tmp_path / "m.stl")
    saved(tmp_path / "a.safetensors", label_names=list("abc"))
    predict = ["predict", tmp_path / "m.stl", "--device", "cpu", "--checkpoint"]
    for form in ("txt", "npy", "csv", "json"):
        line = complaint(*predict, tmp_path / "a.safetensors", "--out", tmp_path / f"o.{form}")
        assert "an STL file has no order of vertices" in line
        assert not (tmp_path / f"o.{form}").exists()
    output(*predict, tmp_path / "a.safetensors", "--out", tmp_path / "o.ply")
    labels = plyfile.PlyData.read(tmp_path / "o.ply")["vertex"]["label"]
    assert len(labels) == len(load_mesh(tmp_path / "o.ply").verts)
    saved(tmp_path / "b.safetensors", "faces", label_names=list("abc"))
    output(*predict, tmp_path / "b.safetensors", "--out", tmp_path / "o.txt")
    assert len(np.loadtxt(tmp_path / "o.txt")) == len(ball().faces)
    metadata = {"task": "correspondence", "map_k": 6, "method": "unsupervised", "normalize": "area"}
    saved(tmp_path / "c.safetensors", out=16, features="wks", **metadata)
    match = ["match", tmp_path / "m.stl", tmp_path / "m.stl", "--device", "cpu", "--out", tmp_path / "m.txt"]
    line = complaint(*match, "--checkpoint", tmp_path / "c.safetensors")
    assert "an STL file has no order of vertices" in line


def test_info_counts_faces_of_the_file(tmp_path: Path) -> None:
    verts, faces = prism()
    read(tmp_path / "a.obj", written("obj", verts, [f[::-1] for f in faces]))
    text = output("info", tmp_path / "a.obj")
    assert "8, cut into 20 triangles" in text
    assert "18, 0 of them on the boundary" in text
    assert "components that are inside out, whose normals are turned: 1" in text
