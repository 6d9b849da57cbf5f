"""`diffnet train classification`, `predict` with its networks, and `diffnet evaluate`."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, diffnet, output

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh
from diffnet.geometry import make_mesh
from diffnet.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from diffnet.train.inference.predict import predict_labels, predict_probabilities
from diffnet.train.metrics import balanced_accuracy
from diffnet.train.options import TrainOptions

pytestmark = pytest.mark.usefixtures("small_pictures")

CPU = torch.device("cpu")
SMALL = ["--k", 12, "--width", 16, "--blocks", 1, "--dropout", 0, "--jobs", 1, "--device", "cpu", "--lr", 0.02]
SMALL += ["--features", "hks", "--schedule", "step"]


def surface(label: int, seed: int) -> trimesh.Trimesh:
    """A ball or a rod, with noise."""
    ball = trimesh.creation.icosphere(1)
    stretch = (1, 1, 4) if label else (1, 1, 1)
    noise = np.random.default_rng(seed).normal(scale=0.02, size=ball.vertices.shape)
    return trimesh.Trimesh(ball.vertices * stretch + noise, ball.faces, process=False)


def two_classes(count: int) -> list[LabeledMesh]:
    meshes = [surface(i % 2, i) for i in range(count)]
    return [LabeledMesh(str(i), make_mesh(mesh.vertices, mesh.faces), np.array(i % 2)) for i, mesh in enumerate(meshes)]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, small_pictures: None) -> Path:
    """A data set of two classes, and a run on it."""
    root = tmp_path_factory.mktemp("room")
    for label, name in enumerate(("ball", "rod")):
        for part, count in (("train", 4), ("test", 2)):
            for i in range(count):
                path = root / "data" / name / part / f"{name}_{part}_{i}.off"
                path.parent.mkdir(parents=True, exist_ok=True)
                surface(label, 100 * i + label + 1000 * (part == "test")).export(path)
    where = ["--data", root / "data", "--out", root / "run", "--cache", root / "cache", "--epochs", 12]
    output("train", "classification", *where, *SMALL)
    return root


def test_a_run_learns_and_reports(room: Path) -> None:
    results = json.loads((room / "run" / "results.json").read_text())
    assert results["task"] == "classification"
    assert results["test_accuracy"] == results["balanced_accuracy"] == 1
    assert results["options"]["label_smoothing"] == 0.2
    assert [row["name"] for row in results["classes"]] == ["ball", "rod"]
    assert [row["count"] for row in results["classes"]] == [2, 2]
    page = (room / "run" / "predictions.html").read_text()
    assert page.count("<article>") == 4
    assert "Balanced accuracy" in page
    assert (room / "run" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    where = ["--data", room / "data", "--out", room / "run", "--cache", room / "cache", "--epochs", 13]
    assert "--label-smoothing is 0.1, and the run in" in complaint(
        "train", "classification", *where, *SMALL, "--resume", "--label-smoothing", 0.1
    )


def test_a_run_can_be_resumed(room: Path, tmp_path: Path) -> None:
    where = ["--data", room / "data", "--out", tmp_path / "run", "--cache", room / "cache"]
    output("train", "classification", *where, *SMALL, "--epochs", 6)
    output("train", "classification", *where, *SMALL, "--epochs", 12, "--resume")
    whole, parts = (load_checkpoint(folder / "run" / "last.pt")["model"] for folder in (room, tmp_path))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    status, _, err = diffnet("train", "segmentation", *where, *SMALL, "--epochs", 12, "--resume")
    assert status == 1
    assert len(err.splitlines()) == 1


def test_predict_writes_a_table(room: Path, tmp_path: Path) -> None:
    meshes = [next((room / "data" / name / "test").iterdir()) for name in ("ball", "rod")]
    arguments = ["predict", *meshes, "--checkpoint", room / "run" / "last.pt", "--device", "cpu"]
    table, page, picture = tmp_path / "table.csv", tmp_path / "page.html", tmp_path / "picture.png"
    output(*arguments, "--out", table, "--html", page, "--png", picture)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["ball", "rod"]
    assert [row["file"] for row in rows] == [str(mesh) for mesh in meshes]
    network = DiffusionNet.load(room / "run" / "last.pt")
    for row, (_, shares) in zip(rows, predict_probabilities(meshes, network, CPU), strict=True):
        np.testing.assert_allclose([float(row["ball"]), float(row["rod"])], shares[0], rtol=1e-4)
        assert shares.sum() == pytest.approx(1, abs=1e-5)
    assert [labels.tolist() for _, labels in predict_labels(meshes, network, CPU)] == [[0], [1]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "rod" in page.read_text()
    assert "--out should be a .csv file" in complaint(*arguments, "--out", tmp_path / "folder")


def test_evaluate_scores_a_labeled_folder(room: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    files = sorted((room / "data" / "rod" / "test").iterdir())
    table.write_text("".join(f"{file},rod\n" for file in files))
    arguments = ["evaluate", "--checkpoint", room / "run" / "last.pt", "--device", "cpu", "--cache", tmp_path / "cache"]
    output(*arguments, "--data", table, "--out", tmp_path / "report")
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["test_accuracy"] == 1
    assert [(row["name"], row["count"]) for row in results["classes"]] == [("rod", 2)]
    assert (tmp_path / "report" / "predictions.html").is_file()
    for data, out, message in (
        (table, tmp_path / "report", "already holds results"),
        (room / "data", room / "run", "already holds results"),
        (tmp_path / "none", tmp_path / "new", "none: no such file or folder; shapes is the generated set"),
    ):
        assert message in complaint(*arguments, "--data", data, "--out", out)
    table.write_text(f"{files[0]},cone\n")
    assert "the label 'cone' is none of the 2 known classes (ball, rod). Labels are matched by name" in complaint(
        *arguments, "--data", table, "--out", tmp_path / "new"
    )


def test_evaluate_scores_a_segmentation(tmp_path: Path) -> None:
    """Labels of a test set without a training part are matched by name. Its results are those of the run."""
    for i in range(3):
        mesh = surface(1, i)
        mesh.export(tmp_path / f"m{i}.off")
        np.savetxt(tmp_path / f"m{i}.txt", np.where(mesh.vertices[:, 2] > 0, 7, 3), fmt="%d")
    (tmp_path / "train.txt").write_text("m0.off\nm1.off")
    (tmp_path / "test.txt").write_text("m2.off")
    shared = ["--data", tmp_path, "--cache", tmp_path / "cache", "--device", "cpu"]
    options = [*SMALL[:-4], *SMALL[-2:], "--epochs", 2, "--features", "xyz"]
    output("train", "segmentation", *shared, *options, "--out", tmp_path / "run")
    (tmp_path / "train.txt").unlink()
    network = ["--checkpoint", tmp_path / "run" / "last.pt"]
    status, said, _ = diffnet("evaluate", *shared, *network, "--out", tmp_path / "report")
    assert status == 0
    assert "scored meshes in the training part: 0 of 1" in said
    assert "test accuracy" in said
    run, report = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "report"))
    for name in ("test_accuracy", "balanced_accuracy", "mean_iou", "classes"):
        assert run[name] == report[name]
    assert report["scored_training_meshes"] == 0
    # Without a split, all meshes are scored, also those of the training.
    lists = (tmp_path / "test.txt").read_text()
    (tmp_path / "test.txt").unlink()
    said = diffnet("evaluate", *shared, *network, "--out", tmp_path / "whole")[1]
    assert "scored meshes in the training part: 2 of 3" in said
    assert "accuracy" in said
    assert "test accuracy" not in said
    assert json.loads((tmp_path / "whole" / "results.json").read_text())["scored_training_meshes"] == 2
    page = (tmp_path / "whole" / "predictions.html").read_text()
    assert "<dt>In the training part</dt><dd>2</dd>" in page
    assert "<h1>Segmentation of the scored meshes</h1>" in page
    assert "<h2>Meshes</h2>" in page
    assert "<dt>Accuracy</dt>" in page
    (tmp_path / "test.txt").write_text(lists)
    # Checkpoints of older versions name no task and no training meshes.
    older = load_checkpoint(tmp_path / "run" / "last.pt")
    del older["options"]["task"], older["options"]["label_smoothing"], older["train_meshes"]
    save_checkpoint(tmp_path / "older.pt", older)
    assert load_checkpoint(tmp_path / "older.pt")["options"]["task"] == "segmentation"
    again = ["--checkpoint", tmp_path / "older.pt", "--out", tmp_path / "again"]
    status, said, _ = diffnet("evaluate", *shared, *again)
    assert status == 0
    assert "doesn't say which meshes it was trained on" in said
    assert "test accuracy" not in said
    assert json.loads((tmp_path / "again" / "results.json").read_text())["classes"] == run["classes"]
    # Only one of the two labels occurs. It keeps the number that the network has for it.
    np.savetxt(tmp_path / "m2.txt", np.full(42, 7), fmt="%d")
    output("evaluate", *shared, *network, "--out", tmp_path / "one")
    one = json.loads((tmp_path / "one" / "results.json").read_text())
    assert [row["name"] for row in one["classes"]] == ["7"]
    # Probabilities on request.
    files = ["--out", tmp_path / "p.ply", "--probabilities", tmp_path / "p.npz"]
    output("predict", tmp_path / "m2.off", *network, *files, "--device", "cpu")
    with np.load(tmp_path / "p.npz") as found:
        assert found["label_names"].tolist() == ["3", "7"]
        (shares,) = (found[name] for name in found.files if name != "label_names")
    assert shares.shape == (42, 2)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    files = ["--out", tmp_path / "p.ply", "--probabilities", tmp_path / "p.csv"]
    output("predict", tmp_path / "m2.off", *network, *files, "--device", "cpu")
    header, *rows = (line.split(",") for line in (tmp_path / "p.csv").read_text().splitlines())
    assert header == ["file", "element", "3", "7"]
    assert [row[:2] for row in rows] == [[str(tmp_path / "m2.off"), str(i)] for i in range(42)]
    np.testing.assert_allclose([[float(share) for share in row[2:]] for row in rows], shares, rtol=1e-5)


def test_a_checkpoint_names_its_task(room: Path, tmp_path: Path) -> None:
    stored = load_checkpoint(room / "run" / "last.pt")
    assert DiffusionNet.load(room / "run" / "last.pt").metadata["task"] == "classification"
    stored["options"]["task"] = "segmentation"
    save_checkpoint(tmp_path / "a.pt", stored)
    with pytest.raises(CheckpointError, match=r"a.pt: labels_at is meshes, which is not allowed in segmentation"):
        load_checkpoint(tmp_path / "a.pt")


def test_options_and_scores() -> None:
    with pytest.raises(ValueError, match="label_smoothing should be at least 0 and below 1, got 1"):
        TrainOptions(label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"task should be one of segmentation, .*, correspondence, got 'other'"):
        replace(TrainOptions(), task="other")
    assert balanced_accuracy([[8, 0, 0], [1, 1, 0], [0, 0, 0]]) == 0.75
    assert np.isnan(balanced_accuracy([[0, 0], [0, 0]]))
