"""Ignored classes, weights of classes and soft labels in training and evaluation."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import diffnet, output

from diffnet.data import LabeledMesh, LabeledMeshes, without_classes
from diffnet.geometry import element_areas, make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.ops import dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.metrics import soft_accuracy
from diffnet.train.options import TrainOptions, recipe
from diffnet.train.tasks.classes import with_class_options
from diffnet.train.tasks.labels import label_loss

pytestmark = pytest.mark.usefixtures("small_pictures")

SMALL = ["--k", 8, "--width", 8, "--blocks", 1, "--dropout", 0, "--jobs", 1, "--device", "cpu", "--epochs", 2]
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
        with pytest.raises(OptionError, match=words):
            with_class_options(three_classes(), TrainOptions(**given))
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


@pytest.mark.parametrize("text", ["evenly", "1,-2", "1,nan", "a=1,2", "a=1,a=2", "0,0", "", "1,,2"])
def test_texts_that_are_no_weights(text: str) -> None:
    with pytest.raises(OptionError, match="class_weights should"):
        TrainOptions(class_weights=text)


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
        torch.testing.assert_close(
            label_loss(logits, labels, TrainOptions(class_weights="1,0.25,4", **chosen)), expected
        )
    found = label_loss(logits, labels, TrainOptions(label_loss="generalized-dice"))
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
    rows = torch.stack([label_loss(logits[[i]], labels[[i]], plain) for i in kept])
    torch.testing.assert_close(
        label_loss(logits, labels, options), (rows * weights[labels[kept]]).sum() / weights[labels[kept]].sum()
    )


def test_ignored_classes_count_nowhere(tmp_path: Path) -> None:
    for i, item in enumerate([*three_classes().train, *three_classes().test]):
        part = tmp_path / "data" / ("test" if i == 2 else "train")
        part.mkdir(parents=True, exist_ok=True)
        trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False).export(part / f"{i}.off")
        (part / f"{i}.txt").write_text("\n".join(map(str, item.labels * 10)))
    where = ["--data", tmp_path / "data", "--cache", tmp_path / "cache"]
    arguments = ["--ignore", 20, "--class-weights", "balanced", "--outputs-at", "faces"]
    output("train", "segmentation", *where, *SMALL, *arguments, "--out", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
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
    again = json.loads((tmp_path / "report" / "results.json").read_text())
    assert again["classes"] == results["classes"]
    assert (again["labels_at"], again["test_meshes"]) == ("faces", 1)
    status, _, err = diffnet("train", "segmentation", *where, *SMALL, "--ignore", "7", "--out", tmp_path / "x")
    assert (status, len(err.splitlines())) == (1, 1)


def test_the_score_by_soft_labels(tmp_path: Path) -> None:
    verts, faces = ball(0), BALL.faces
    mesh = make_mesh(verts, faces)
    edges = mesh_edges(mesh.faces)
    root = tmp_path / "data"
    for i in range(2):
        folder = root / ("test" if i else "train")
        folder.mkdir(parents=True)
        lines = [f"v {x} {y} {z}" for x, y, z in verts] + ["f " + " ".join(str(v + 1) for v in face) for face in faces]
        (folder / f"{i}.obj").write_text("\n".join(lines))
        for name, content in (
            (f"seg/{i}.eseg", "\n".join(str(1 + k % 2) for k in range(len(edges)))),
            (f"sseg/{i}.seseg", "\n".join("1 0" if k % 3 else "0.5 0.5" for k in range(len(edges)))),
        ):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(content)
    where = ["--data", root, "--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    status, out, err = diffnet("train", "segmentation", *where, *SMALL, "--class-weights", "1,0")
    assert status == 0, err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["soft_accuracy"] == 1  # the network learns only the first class, which is right everywhere
    assert results["test_accuracy"] == pytest.approx(0.5, abs=0.01)
    assert "accuracy by soft labels 100.00 %" in " ".join(out.split())
    assert "Accuracy by soft labels" in (tmp_path / "run" / "predictions.html").read_text()
    accepted = np.array([[True, k % 3 == 0] for k in range(len(edges))])
    areas = element_areas(mesh, "edges")
    assert soft_accuracy(np.ones(len(edges), int), accepted, areas) == pytest.approx(areas[::3].sum() / mesh_area(mesh))


def mesh_area(mesh: trimesh.Trimesh) -> float:
    return trimesh.Trimesh(mesh.verts, mesh.faces, process=False).area
