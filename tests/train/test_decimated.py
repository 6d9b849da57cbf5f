"""`--max-faces`: training on decimated meshes, and scores and predictions on the full ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import output
from plyfile import PlyData
from rich.console import Console
from runs import results_of

from diffnet import DiffusionNet
from diffnet.data import (
    UNLABELED,
    Interpolation,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    collate_samples,
    decimated,
    decimated_to_score,
    derived as derived_meshes,
    interpolation_weights,
    make_sample,
    transferred_labels,
)
from diffnet.data.derived import make_decimated
from diffnet.data.places import rows_at
from diffnet.data.stored import computed
from diffnet.geometry import decimate, element_points, load_mesh
from diffnet.train.inference.predict import predict_labels
from diffnet.train.options import TrainOptions
from diffnet.train.run import run_training

pytestmark = pytest.mark.usefixtures("small_pictures")

PLACES = ("vertices", "faces", "edges")
EGG = trimesh.creation.icosphere(3)
EGG.vertices = EGG.vertices * [1, 1, 1.5]
MESH = load_mesh(EGG)
SMALL = decimate(MESH, 300)


@pytest.mark.parametrize("at", PLACES)
def test_labels_go_to_the_decimated_mesh_and_back(at: str) -> None:
    halves = (element_points(MESH, at)[:, 2] > 0).astype(np.int64)
    item = decimated(LabeledMesh("egg", MESH, halves), at, 300, "xyz")
    height = element_points(item.mesh, at)[:, 2]
    clear = abs(height) > 0.15
    np.testing.assert_array_equal(item.labels[clear], height[clear] > 0)
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(item.labels), 2).float()
    back = Interpolation.of(interpolation_weights(MESH, item.mesh, at))(one_hot).argmax(1).numpy()
    assert (back == halves).mean() > 0.95
    unlabeled = transferred_labels(np.full(len(halves), UNLABELED), MESH, item.mesh, at)
    assert (unlabeled == UNLABELED).all()


def test_majorities_and_elements_without_votes() -> None:
    # Of the faces that vote at a decimated face, most have label 1, and every seventh has label 2.
    labels = np.ones(len(MESH.faces), np.int64)
    labels[::7] = 2
    assert (transferred_labels(labels, MESH, SMALL, "faces") == 1).mean() > 0.95
    # In the other direction, most faces of the fine mesh get no vote, but the label of their place.
    fine = transferred_labels((element_points(SMALL, "faces")[:, 0] > 0).astype(np.int64), SMALL, MESH, "faces")
    assert (fine == (element_points(MESH, "faces")[:, 0] > 0)).mean() > 0.95


def test_values_at_vertices_are_linear_on_faces() -> None:
    back = Interpolation.of(interpolation_weights(MESH, SMALL, "vertices"))
    np.testing.assert_allclose(back(torch.from_numpy(SMALL.verts).float()), MESH.verts, atol=0.1)
    assert back.elements.shape == back.weights.shape == (3 * len(MESH.verts),)
    full = LabeledMesh("egg", MESH, np.zeros(642, np.int64), {"x": MESH.verts[:, :2]})
    item = decimated(full, "vertices", 300, "file:x")
    np.testing.assert_allclose(item.arrays["x"], item.mesh.verts[:, :2], atol=0.05)


def test_numbers_are_interpolated() -> None:
    numbers = np.stack([MESH.verts[:, 0], np.full(len(MESH.verts), np.nan)], axis=1)
    item = decimated(LabeledMesh("egg", MESH, numbers), "vertices", 300, "xyz")
    np.testing.assert_allclose(item.labels[:, 0], item.mesh.verts[:, 0], atol=0.05)
    assert np.isnan(item.labels[:, 1]).all()
    assert transferred_labels(numbers[:, 0], MESH, SMALL, "vertices").shape == (len(SMALL.verts),)


def test_a_missing_number_counts_where_it_has_a_weight() -> None:
    """Each vertex is its own closest point, with weight 0 for the other corners of the face."""
    numbers = np.arange(float(len(MESH.verts)))
    numbers[::20] = np.nan
    np.testing.assert_allclose(transferred_labels(numbers, MESH, MESH, "vertices"), numbers, atol=1e-9)


def test_targets_at_several_places_go_there_and_back() -> None:
    """Those at each place as if they were alone, also from polygons."""
    polygons = replace(MESH, polygons=np.arange(len(MESH.faces)) // 2, polygon_count=len(MESH.faces) // 2)
    at, values = ("meshes", "faces", "vertices"), np.random.default_rng(0).normal(size=(642 + 1280 + 1, 3))
    item = decimated(LabeledMesh("egg", MESH, values), at, 300, "xyz")
    small, back = item.mesh, interpolation_weights(polygons, item.mesh, at)
    rows = rows_at(torch.from_numpy(values[: len(item.labels)]).float(), len(small.verts), at)
    found = rows_at(Interpolation.to_score(polygons, at, back)(torch.cat([part for _, part in rows])), 642, at)
    for i, (place, part) in enumerate(rows):
        alone = Interpolation.to_score(polygons, place, interpolation_weights(polygons, small, place))
        torch.testing.assert_close(found[i][1], alone(part))
        whole = rows_at(values, 642, at)[i][1]
        expected = whole if place == "meshes" else transferred_labels(whole, MESH, small, place)
        np.testing.assert_array_equal(rows_at(item.labels, len(small.verts), at)[i][1], expected)


def test_a_sample_with_labels_of_the_full_mesh() -> None:
    full = LabeledMesh("egg", MESH, np.zeros(len(MESH.verts), np.int64))
    options = Preprocessing(k=4, features="xyz")
    taken, back = decimated_to_score(full, "vertices", 300, "xyz")
    assert back is not None
    sample = replace(make_sample(taken, options), interpolation=Interpolation.of(back))
    assert len(sample.labels) == len(MESH.verts)
    assert sample.operators.num_vertices == len(taken.mesh.verts) < len(MESH.verts)
    assert sample.to("cpu").interpolation is not None
    with pytest.raises(ValueError, match="egg: a sample with an interpolation can't be packed with others"):
        collate_samples([sample, sample])
    assert decimated_to_score(full, "vertices", None, "xyz") == (full, None)
    shape = LabeledMesh("egg", MESH, np.array(3))
    taken, back = decimated_to_score(shape, "meshes", 300, "xyz")
    assert (int(taken.labels), back) == (3, None)
    assert int(decimated(shape, "meshes", 300, "xyz").labels) == 3


def test_processes_decimate(tmp_path: Path) -> None:
    """With the results of a single process."""
    items = [LabeledMesh(mesh.name, mesh, np.zeros(len(mesh.faces), np.int64)) for mesh in (MESH, SMALL, MESH)]
    work = partial(decimated_to_score, at="faces", max_faces=310, features="xyz", cache_dir=tmp_path)
    found = dict(computed(work, items, 2, 1))
    assert {i: len(item.mesh.faces) for i, (item, _) in found.items()} == {0: 310, 1: 300, 2: 310}
    small, unchanged = found[1]
    np.testing.assert_array_equal(small.mesh.faces, SMALL.faces)
    assert unchanged is None
    (item, back), (expected, weights) = found[2], work(items[2])
    np.testing.assert_array_equal(item.mesh.verts, expected.mesh.verts)
    np.testing.assert_array_equal(back[0], weights[0])


def test_meshes_of_another_form_in_the_cache_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of the decimation."""
    items = [LabeledMesh("egg", MESH, np.zeros(len(MESH.verts), np.int64))]
    for form, faces in (("a", 300), ("b", 200), ("a", 300)):
        monkeypatch.setattr(derived_meshes, "FORM", form)
        make = partial(make_decimated, at="vertices", max_faces=faces, features="xyz", cache_dir=None, to_score=False)
        (item,) = derived_meshes.derived(items, make, "decimated", cache_dir=tmp_path, jobs=1)
        assert len(item.mesh.faces) == faces


def test_a_mesh_with_few_polygons_keeps_them_beside_a_decimated_one(tmp_path: Path) -> None:
    items = []
    for side in (4, 12):
        number = np.arange(side * side).reshape(side, side)
        corners = [number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]]
        verts = np.stack([number // side, number % side, 0 * number], -1).reshape(-1, 3)
        mesh = load_mesh((verts, np.stack(corners, -1).reshape(-1, 4)))
        items.append(LabeledMesh(f"grid of {side}", mesh, mesh.polygons % 2))
    options = TrainOptions(features="xyz", k=4, width=8, blocks=1, epochs=1, max_faces=100)
    how = {"device": torch.device("cpu"), "cache_dir": tmp_path / "cache", "jobs": 1, "console": Console(quiet=True)}
    results = run_training(LabeledMeshes(items, items, ["a", "b"], "faces"), options, tmp_path / "run", **how)
    assert sum(row["count"] for row in results["classes"]) == 9 + 121


def test_a_run_on_decimated_meshes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(3):
        verts = EGG.vertices + rng.normal(scale=0.01, size=EGG.vertices.shape)
        mesh = trimesh.Trimesh(verts, EGG.faces, process=False)
        path = tmp_path / "data" / ("train" if i < 2 else "test") / f"{i}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        mesh.export(path)
        height = element_points(load_mesh(path), "faces")[:, 2]
        path.with_suffix(".txt").write_text("\n".join(str(int(z > 0)) for z in height))
        np.save(path.with_suffix(".height.npy"), verts[:, 2])
    where = ["--data", tmp_path / "data", "--cache", tmp_path / "cache", "--device", "cpu", "--jobs", 1]
    small = ["--features", "file:height", "--k", 8, "--width", 8, "--blocks", 1, "--dropout", 0, "--lr", 0.02]
    run = ["train", "segmentation", *where, *small, "--epochs", 12, "--max-faces", 200, "--out", tmp_path / "run"]
    output(*run)
    results = results_of(tmp_path / "run")
    assert sum(row["count"] for row in results["classes"]) == len(EGG.faces)  # of the full mesh
    assert results["test_accuracy"] > 0.9
    assert results["options"]["max_faces"] == 200

    network = DiffusionNet.load(tmp_path / "run" / "last.pt")
    test = tmp_path / "data" / "test" / "2.off"
    ((mesh, labels),) = predict_labels([test], network, "cpu")
    assert len(mesh.faces) == len(EGG.faces)
    truth = np.loadtxt(test.with_suffix(".txt"), dtype=int)
    assert (labels == truth).mean() == pytest.approx(results["test_accuracy"])

    checkpoint = ["--checkpoint", tmp_path / "run" / "last.pt"]
    output("evaluate", *where, *checkpoint, "--out", tmp_path / "report")
    report = results_of(tmp_path / "report")
    assert report["test_accuracy"] == results["test_accuracy"]
    out = tmp_path / "smooth.ply"
    output("predict", test, *checkpoint, "--device", "cpu", "--out", out, "--smooth", 2)
    smooth = np.array(PlyData.read(out)["face"]["label"])
    assert len(smooth) == len(EGG.faces)
    first, second = EGG.face_adjacency.T
    assert 0 < (smooth[first] != smooth[second]).sum() <= (labels[first] != labels[second]).sum()
