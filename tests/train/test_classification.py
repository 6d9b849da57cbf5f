"""`diffnet train classification`, `predict` with its networks, `diffnet evaluate`, and options of classes."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, diffnet, output
from refusals import refused
from runs import results_of, table_of

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, index_classes, load_classes, without_classes
from diffnet.data.stored import names_of
from diffnet.geometry import element_areas, make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.ops import dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from diffnet.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from diffnet.train.inference.predict import predict_labels, predict_probabilities
from diffnet.train.metrics import class_mean, soft_accuracy
from diffnet.train.options import TrainOptions, recipe
from diffnet.train.tasks.classes import frequency_weights, with_class_options
from diffnet.train.tasks.classification import TASK
from diffnet.train.tasks.task import task_named
from diffnet.train.validation import held_out

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


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_labels_that_follow_from_a_condition(task: str, room: Path, tmp_path: Path) -> None:
    lines = ["age,file,note,label,labels,split"]
    for i in range(8):
        surface(0, i).export(tmp_path / f"m{i}.off")
        (tmp_path / f"m{i}.txt").write_text(f"{i % 2}\n" * 42)
        lines.append(
            f"{20 + 50 * (i % 2)},m{i}.off,x,{['young', 'old'][i % 2]},m{i}.txt,{'train' if i < 6 else 'test'}"
        )
    (tmp_path / "cases.csv").write_text("\n".join(lines))
    run, where = tmp_path / "run", ["--cache", room / "cache"]
    data = ["--data", tmp_path / "cases.csv"]
    output("train", task, *data, "--conditions", "age", "--epochs", 12, *SMALL, *where, "--out", run)
    assert results_of(run)["test_accuracy"] == 1
    output("evaluate", *data, "--checkpoint", run / "last.pt", "--out", tmp_path / "e", "--device", "cpu", *where)
    assert results_of(tmp_path / "e")["test_accuracy"] == 1
    network, meshes = DiffusionNet.load(run / "last.pt"), [tmp_path / "m0.off"] * 2
    ages: list[dict[str, float]] = [{"age": 20}, {"age": 70}]
    first, second = (labels.mean() for _, labels in predict_labels(meshes, network, "cpu", conditions=ages))
    assert {first, second} == {0, 1}
    predict = ["predict", meshes[0], "--checkpoint", run / "last.pt", "--device", "cpu", "--out", tmp_path / "p.csv"]
    assert "--condition age=NUMBER is missing" in complaint(*predict)
    output(*predict, "--condition", "age=70")
    assert table_of(tmp_path / "p.csv")[0]["label"] == ("old" if task == "classification" else "1")
    options = TrainOptions(task=task, conditions="age")  # type: ignore[arg-type]
    refused(OptionError, "are none", task_named(options.task).prepared, LabeledMeshes([], [], [], "meshes"), options)


def test_a_run_learns_and_reports(room: Path) -> None:
    results = results_of(room / "run")
    assert results["task"] == "classification"
    assert results["test_accuracy"] == results["balanced_accuracy"] == 1
    assert results["options"]["label_smoothing"] == 0.2
    assert [row["name"] for row in results["classes"]] == ["ball", "rod"]
    assert [row["count"] for row in results["classes"]] == [2, 2]
    rows = table_of(room / "run" / "per_mesh.csv")
    assert [row["mesh"] for row in rows] == results["meshes"]["test"]
    for row in rows:
        assert row["label"] == row["predicted"] == row["mesh"].split("/")[0]
        assert 0.5 < float(row["p_label"]) == float(row["p_predicted"]) <= 1
    page = (room / "run" / "predictions.html").read_text()
    assert page.count("<article>") == 4
    assert "Balanced accuracy" in page
    assert (room / "run" / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_predict_writes_a_table(room: Path, tmp_path: Path) -> None:
    meshes = [next((room / "data" / name / "test").iterdir()) for name in ("ball", "rod")]
    arguments = ["predict", *meshes, "--checkpoint", room / "run" / "last.pt", "--device", "cpu"]
    table, page, picture = tmp_path / "table.csv", tmp_path / "page.html", tmp_path / "picture.png"
    output(*arguments, "--out", table, "--html", page, "--png", picture)
    rows = table_of(table)
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
    results = results_of(tmp_path / "report")
    assert results["test_accuracy"] == 1
    assert [(row["name"], row["count"]) for row in results["classes"]] == [("rod", 2)]
    assert (tmp_path / "report" / "predictions.html").is_file()
    for data, out, message in (
        (table, tmp_path / "report", "already holds results"),
        (room / "data", room / "run", "already holds results"),
        (
            tmp_path / "none",
            tmp_path / "new",
            "none: no such file or folder; shapes is the built-in set of classification",
        ),
    ):
        assert message in complaint(*arguments, "--data", data, "--out", out)
    table.write_text(f"{files[0]},cone\n")
    assert "the label 'cone' is none of the 2 known classes (ball, rod). Labels are matched by name" in complaint(
        *arguments, "--data", table, "--out", tmp_path / "new"
    )


def test_a_class_that_does_not_count_needs_no_test_mesh(room: Path, tmp_path: Path) -> None:
    shutil.copytree(room / "data", tmp_path / "data")
    (tmp_path / "data" / "other" / "train").mkdir(parents=True)
    surface(0, 9).export(tmp_path / "data" / "other" / "train" / "one.off")
    run = ["train", "classification", "--data", tmp_path / "data", "--cache", tmp_path / "cache", *SMALL, "--epochs", 1]
    assert "class 'other' has no test mesh: it has 1 mesh" in complaint(*run, "--out", tmp_path / "run")
    output(*run, "--out", tmp_path / "run", "--ignore", "other")
    assert results_of(tmp_path / "run")["meshes"]["train"] == results_of(room / "run")["meshes"]["train"]


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
    run, report = (results_of(tmp_path / name) for name in ("run", "report"))
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
    assert results_of(tmp_path / "whole")["scored_training_meshes"] == 2
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
    assert results_of(tmp_path / "again")["classes"] == run["classes"]
    # Only one of the two labels occurs. It keeps the number that the network has for it.
    np.savetxt(tmp_path / "m2.txt", np.full(42, 7), fmt="%d")
    output("evaluate", *shared, *network, "--out", tmp_path / "one")
    one = results_of(tmp_path / "one")
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
    refused(ValueError, "label_smoothing should be at least 0 and below 1, got 1", TrainOptions, label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"task should be one of segmentation, .*, correspondence, got 'other'"):
        replace(TrainOptions(), task="other")
    assert class_mean("accuracy", [[8, 0, 0], [1, 1, 0], [0, 0, 0]]) == 0.75
    assert np.isnan(class_mean("accuracy", [[0, 0], [0, 0]]))


# ---- ignored classes, weights of classes and soft labels ----


SHORT = ["--k", 8, "--width", 8, "--blocks", 1, "--dropout", 0, "--jobs", 1, "--device", "cpu", "--epochs", 2]
BALL = trimesh.creation.icosphere(1)


def ball(seed: int) -> np.ndarray:
    return BALL.vertices * [1, 1, 1.5] + np.random.default_rng(seed).normal(scale=0.02, size=BALL.vertices.shape)


def three_classes() -> LabeledMeshes:
    """The upper half, a lower part, and a small class at the tip."""
    items = []
    for i in range(3):
        verts = ball(i)
        labels = np.where(verts[:, 2] > 0, 0, 1)
        labels[verts[:, 2] > 0.9] = 2
        items.append(LabeledMesh(str(i), make_mesh(verts, BALL.faces), labels))
    return LabeledMeshes(items[:2], items[2:], ["up", "down", "rare"], "vertices")


def test_options_are_resolved_by_the_data() -> None:
    data, options = with_class_options(three_classes(), TrainOptions(ignore=["2"], class_weights="down=3"))
    assert data.label_names == ["up", "down"]
    assert options.ignore == ("rare",)
    assert options.class_weights == "1,3"
    data, options = with_class_options(three_classes(), TrainOptions(ignore=["up"], class_weights="1=3"))
    assert (data.label_names, options.class_weights) == (["down", "rare"], "3,1")  # 1 is the number of down
    data, options = with_class_options(three_classes(), TrainOptions(class_weights="balanced"))
    counts = np.bincount(np.concatenate([item.labels for item in data.train]))
    weights = np.array([float(weight) for weight in options.class_weights.split(",")])
    np.testing.assert_allclose(weights * counts, counts.sum() / 3, rtol=1e-6)
    for given, words in (
        ({"ignore": ("tail",)}, "ignore can't be used: there is no class 'tail'"),
        ({"class_weights": "tail=2"}, "class_weights can't be used: there is no class 'tail'"),
        ({"class_weights": "1,2"}, "class_weights has 2 weights for 3 classes"),
        ({"class_weights": "up=2,0=3"}, "class_weights should name each class once, got 'up=2,0=3' for up, up"),
        ({"ignore": ("0",), "class_weights": "0=2"}, "should name classes that count, but ignore leaves out 'up'"),
        ({"ignore": ("up", "2")}, "ignore leaves only the class 'down'; at least 2 should be left"),
    ):
        refused(OptionError, words, with_class_options, three_classes(), TrainOptions(**given))
    with pytest.raises(OptionError, match=r"label_smoothing needs at least 2 classes, .* only 'down'"):
        with_class_options(without_classes(three_classes(), ["up", "rare"]), TrainOptions(label_smoothing=0.1))


@pytest.mark.parametrize(
    ("text", "counts", "message"),
    [
        ("balanced", (7, 300), "balanced: the weight of 'b' is 21.9, 43 times that of 'a', 0.512. .*, or sqrt, whose"),
        ("balanced", (20, 300), None),
        ("sqrt", (7, 300), None),
        ("sqrt", (1, 900), "--class-weights sqrt: the weight of 'b' is 29.1, 30 times that of 'a', 0.969"),
        ("1,50", (1, 900), None),
    ],
)
def test_weights_by_frequency(text: str, counts: tuple[int, int], message: str | None) -> None:
    labels = np.repeat([1, 0, -1], [*counts, 5])
    items = [LabeledMesh("", make_mesh(ball(0), BALL.faces), part) for part in (labels[::2], labels[1::2])]
    data = LabeledMeshes(items, items[:1], ["a", "b", "absent"], "vertices")
    text = text if text in ("balanced", "sqrt") else "1,50,1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, options = with_class_options(data, TrainOptions(class_weights=text))
    assert len(caught) == (message is not None)
    assert message is None or re.search(message, str(caught[0].message))
    rare, frequent, absent = (float(weight) for weight in np.array(options.class_weights.split(","))[[1, 0, 2]])
    assert absent == 1
    if text != "1,50,1":
        ratio = counts[1] / counts[0]
        assert rare / frequent == pytest.approx(ratio if text == "balanced" else ratio**0.5, rel=1e-6)
        assert rare * counts[0] + frequent * counts[1] == pytest.approx(sum(counts), rel=1e-6)


@pytest.mark.parametrize("are_indexed", [False, True])
def test_weights_by_frequency_are_those_of_the_meshes_that_are_trained_on(are_indexed: bool, tmp_path: Path) -> None:
    for i in range(10):
        path = tmp_path / "data" / "ab"[i % 4 == 0] / "train" / f"{i}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        surface(0, i).export(path)
        shutil.copytree(path.parent, path.parent.with_name("test"), dirs_exist_ok=True)
    whole = index_classes(tmp_path / "data", tmp_path) if are_indexed else load_classes(tmp_path / "data")
    chosen = TrainOptions(class_weights="balanced", validation=0.4, seed=3)
    others = held_out(names_of(whole.train), chosen)
    fitted = [item for i, item in enumerate(whole.train) if i not in others]
    expected = frequency_weights(replace(whole, train=fitted))
    _, options = with_class_options(whole, chosen)
    np.testing.assert_allclose([float(x) for x in options.class_weights.split(",")], expected, rtol=1e-6)
    assert not np.allclose(expected, frequency_weights(whole))


@pytest.mark.parametrize("text", ["evenly", "1,-2", "1,nan", "a=1,2", "a=1,a=2", "0,0", "", "1,,2"])
def test_texts_that_are_no_weights(text: str) -> None:
    refused(OptionError, "class_weights should", TrainOptions, class_weights=text)


def test_losses_and_their_options() -> None:
    logits, labels = torch.randn(20, 3), torch.randint(-1, 3, (20,))
    weights = torch.tensor([1.0, 0.25, 4.0])
    given = {"weights": weights, "ignored": -1}
    cross_entropy = label_smoothing_loss(logits, labels, 0.0, **given)
    smoothed = label_smoothing_loss(logits, labels, 0.2, **given)
    dice = dice_loss(logits, labels, **given)
    for chosen, expected in (
        ({}, cross_entropy),
        ({"label_loss": "focal"}, focal_loss(logits, labels, **given)),
        ({"label_loss": "dice"}, dice),
        ({"label_loss": "dice+cross-entropy"}, dice + cross_entropy),
        ({"label_loss": "dice+cross-entropy", "label_smoothing": 0.2}, dice + smoothed),
    ):
        options = TrainOptions(class_weights="1,0.25,4", **chosen)
        torch.testing.assert_close(TASK.loss(logits, labels, options), expected)
    found = TASK.loss(logits, labels, TrainOptions(label_loss="generalized-dice"))
    torch.testing.assert_close(found, generalized_dice_loss(logits, labels))
    for loss in ("focal", "dice", "generalized-dice"):
        with pytest.raises(OptionError, match=f"label_smoothing is 0.1, .* the loss is {loss};"):
            TrainOptions(label_loss=loss, label_smoothing=0.1)
        kept = recipe("default", "classification", {"label_loss": loss})
        assert TrainOptions(task="classification", **{**kept, "label_loss": loss}).label_smoothing == 0
    with pytest.raises(OptionError, match="class_weights is sqrt, but the loss generalized-dice has its own"):
        TrainOptions(label_loss="generalized-dice", class_weights="sqrt")
    assert recipe("default", "classification", {"label_loss": "dice+cross-entropy"})["label_smoothing"] == 0.2


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_weighted_mean(smoothing: float) -> None:
    logits, labels = torch.randn(20, 3), torch.randint(-1, 3, (20,))
    weights = torch.tensor([1.0, 0.25, 4.0])
    options = TrainOptions(class_weights="1,0.25,4", label_smoothing=smoothing)
    plain = replace(options, class_weights=None)
    kept = [i for i in range(20) if labels[i] >= 0]
    rows = torch.stack([TASK.loss(logits[[i]], labels[[i]], plain) for i in kept])
    each = weights[labels[kept]]
    torch.testing.assert_close(TASK.loss(logits, labels, options), (rows * each).sum() / each.sum())


def test_ignored_classes_count_nowhere(tmp_path: Path) -> None:
    for i, item in enumerate([*three_classes().train, *three_classes().test]):
        part = tmp_path / "data" / ("test" if i == 2 else "train")
        part.mkdir(parents=True, exist_ok=True)
        trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False).export(part / f"{i}.off")
        (part / f"{i}.txt").write_text("\n".join(map(str, item.labels * 10)))
    where = ["--data", tmp_path / "data", "--cache", tmp_path / "cache"]
    arguments = ["--ignore", 20, "--class-weights", "balanced", "--outputs-at", "faces"]
    output("train", "segmentation", *where, *SHORT, *arguments, "--out", tmp_path / "run")
    results = results_of(tmp_path / "run")
    assert [row["name"] for row in results["classes"]] == ["0", "10"]
    assert sum(row["count"] for row in results["classes"]) < len(BALL.faces)
    assert results["options"]["ignore"] == ["20"]
    assert len(results["options"]["class_weights"].split(",")) == 2
    checkpoint = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (checkpoint["labels_at"], checkpoint["label_names"]) == ("faces", ["0", "10"])
    assert checkpoint["options"]["ignore"] == ["20"]

    report = [*where, "--checkpoint", tmp_path / "run" / "last.pt", "--device", "cpu", "--jobs", 1]
    (tmp_path / "data" / "train" / "0.off").write_text("broken")  # an evaluation doesn't read it
    output("evaluate", *report, "--out", tmp_path / "report")
    again = results_of(tmp_path / "report")
    assert again["classes"] == results["classes"]
    assert (again["labels_at"], again["test_meshes"]) == ("faces", 1)
    status, _, err = diffnet("train", "segmentation", *where, *SHORT, "--ignore", "7", "--out", tmp_path / "x")
    assert (status, len(err.splitlines())) == (1, 1)


def test_the_score_by_soft_labels(tmp_path: Path) -> None:
    verts, faces = ball(0), BALL.faces
    mesh = make_mesh(verts, faces)
    edges = mesh_edges(mesh.faces)
    root = tmp_path / "data"
    for i in range(2):
        folder = root / ("test" if i else "train")
        folder.mkdir(parents=True)
        trimesh.Trimesh(verts, faces, process=False).export(folder / f"{i}.obj", digits=17)
        for name, content in (
            (f"seg/{i}.eseg", "\n".join(str(1 + k % 2) for k in range(len(edges)))),
            (f"sseg/{i}.seseg", "\n".join("1 0" if k % 3 else "0.5 0.5" for k in range(len(edges)))),
        ):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(content)
    where = ["--data", root, "--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    out = output("train", "segmentation", *where, *SHORT, "--class-weights", "1,0")
    results = results_of(tmp_path / "run")
    assert results["soft_accuracy"] == 1  # the network learns only the first class, which is right everywhere
    assert results["test_accuracy"] == pytest.approx(0.5, abs=0.01)
    assert "accuracy by soft labels 100.00 %" in " ".join(out.split())
    assert "Accuracy by soft labels" in (tmp_path / "run" / "predictions.html").read_text()
    accepted = np.array([[True, k % 3 == 0] for k in range(len(edges))])
    areas = element_areas(mesh, "edges")
    whole = trimesh.Trimesh(verts, faces, process=False).area
    assert soft_accuracy(np.ones(len(edges), int), accepted, areas) == pytest.approx(areas[::3].sum() / whole)
