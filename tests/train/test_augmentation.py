"""Augmentation in training: its options, draws, resumed runs, captured steps, and classes with sides."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import complaint, output
from graph_emulator import EmulatedGraph
from jaws import jaw, write_jaws
from rich.console import Console
from runs import TINY, labeled_balls, table_of

from diffnet.data import LabeledMesh, LabeledMeshes, Sample, TargetsAt, collate_samples, labels_at, make_sample
from diffnet.geometry import make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.train import teeth_scores
from diffnet.train.checkpoint import Checkpoint, build_model, load_checkpoint, save_checkpoint
from diffnet.train.options import TrainOptions
from diffnet.train.options.sides import found_sides
from diffnet.train.run import run_training
from diffnet.train.steps.augmentation import draw_changes, draw_variants
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.classes import with_class_options
from diffnet.train.tasks.segmentation import TASK as SEGMENTATION
from diffnet.train.tasks.task import task_named

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

CPU = torch.device("cpu")
BALLS = labeled_balls(3, 1, sizes=(1, 2))
ALL: dict[str, Any] = {"rotate_about": "z", "scale_range": 1.5, "jitter": 0.01, "cut": 0.5, "variants": 2}
ALL |= {"mirror": True, "mirror_labels": "1,0"}


def options(**given: Any) -> TrainOptions:
    small = {"features": "xyz+hks", "k": 8, "width": 8, "blocks": 1, "epochs": 3, "dropout": 0.0}
    return TrainOptions(**{**small, **given})


def test_nothing_is_changed_by_default() -> None:
    sample = make_sample(BALLS.train[0], options().preprocessing)
    changes = draw_changes(5, options(rotate=False), CPU)
    assert changes.made(sample, 0) is sample
    assert changes.rotations_of(0, 2) is None
    assert options().mesh_variants.count == 0
    assert draw_variants([["a"], ["b"]]) == ["a", "b"]


def test_what_is_drawn() -> None:
    torch.manual_seed(0)
    changes = draw_changes(2000, options(**ALL), CPU)
    torch.testing.assert_close(changes.rotations[:, :, 2], torch.tensor([0.0, 0, 1]).expand(2000, 3))
    torch.testing.assert_close(torch.linalg.det(changes.rotations), torch.ones(2000))
    assert torch.equal(changes.rotations_of(3, 2), changes.rotations[3:5])
    assert changes.rotations[:, 0, :2].mean(0).abs().max() < 0.1
    assert 0.45 < changes.mirror.float().mean() < 0.55
    assert 1 / 1.5 <= changes.factors.min() < 0.7
    assert 1.4 < changes.factors.max() <= 1.5
    assert changes.factors.log().mean().abs() < 0.03
    drawn = Counter(draw_variants([["whole", "first", "second", "third"]] * 4000))
    assert 0.3 < drawn["whole"] / 4000 < 0.37
    assert all(0.19 < drawn[name] / 4000 < 0.26 for name in ("first", "second", "third"))


def test_each_mesh_of_a_batch_has_its_own_changes() -> None:
    samples = [make_sample(item, options().preprocessing) for item in BALLS.train]
    changes = draw_changes(6, options(scale_range=2.0, mirror=True), CPU)
    batch = changes.made(collate_samples(samples), 2)
    for i, sample in enumerate(samples):
        alone = changes.made(sample, 2 + i)
        torch.testing.assert_close(batch.operators[i].evecs, alone.operators.evecs)
        torch.testing.assert_close(batch.operators[i].gradient.values, alone.operators.gradient.values)
        torch.testing.assert_close(batch.operators.unpack(batch.features)[i], alone.features)


def run(out: Path, epochs: int, resume: bool = False, **given: Any) -> tuple[Checkpoint, str]:
    """The last checkpoint, and what the run prints."""
    shown = io.StringIO()
    how: dict[str, Any] = {"device": CPU, "jobs": 1, "resume": resume, "console": Console(file=shown, width=200)}
    run_training(BALLS, options(epochs=epochs, **given), out, cache_dir=out.parent / "cache", **how)
    return load_checkpoint(out / "last.pt"), shown.getvalue()


@pytest.mark.usefixtures("addresses")
def test_a_run_with_everything_resumes_and_says_what_it_makes(tmp_path: Path) -> None:
    chosen = {**ALL, "schedule": "step"}  # the cosine schedule depends on the number of epochs
    whole, text = run(tmp_path / "whole", 3, **chosen)
    run(tmp_path / "parts", 2, **chosen)
    resumed, _ = run(tmp_path / "parts", 3, resume=True, **chosen)
    plain, _ = run(tmp_path / "plain", 1)
    assert "variants: 2 of each training mesh" in text
    assert "10/10" in text.replace(" ", "")  # 3 meshes with 2 variants each, and a test mesh
    assert all(torch.equal(weight, resumed["model"][name]) for name, weight in whole["model"].items())
    assert {name: whole["options"][name] for name in ALL} == ALL
    assert whole["history"][0]["train_loss"] != plain["history"][0]["train_loss"]


def losses(samples: list[Sample], chosen: TrainOptions, capture: bool) -> Any:
    torch.manual_seed(0)
    model = build_model(chosen, ["low", "high"], "vertices")
    step = TrainingStep(task_named(chosen.task), model, chosen, CPU)
    if capture:
        step.capture([s.operators for s in samples], EmulatedGraph)
    torch.manual_seed(1)
    changes = draw_changes(len(samples), chosen, CPU)
    return torch.stack([step(changes.made(s, i), changes.rotations_of(i, 1)) for i, s in enumerate(samples)])


def test_captured_steps_see_the_changes() -> None:
    chosen = options(scale_range=2.0, mirror=True, mirror_labels="1,0", jitter=0.01)
    samples = [make_sample(item, chosen.preprocessing) for item in BALLS.train] * 3
    samples = [replace(s, operators=s.operators.with_gradient_evecs()) for s in samples]
    before = EmulatedGraph.replays
    captured = losses(samples, chosen, True)
    assert EmulatedGraph.replays - before == len(samples) - 2  # 42 and 162 vertices
    torch.testing.assert_close(captured, losses(samples, chosen, False), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(captured, losses(samples, options(), False), rtol=1e-3)


@pytest.mark.gpu
def test_changes_wait_for_nothing() -> None:
    chosen = options(scale_range=2.0, mirror=True, mirror_labels="1,0", jitter=0.01, features="xyz+hks+wks")
    samples = [make_sample(item, chosen.preprocessing).to("cuda") for item in BALLS.train]
    batches = [collate_samples(samples), samples[0]]
    changes = draw_changes(3, chosen, torch.device("cuda"))
    for batch in batches:
        changes.made(batch, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            made = changes.made(batch, 0)
            assert made.operators.evecs.shape == batch.operators.evecs.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- mirrored meshes whose classes have sides: jaws with FDI numbers, and names with left and right ----

TEETH = ["0", *(f"{quadrant}{number}" for quadrant in (1, 2) for number in range(1, 8))]
GAUCHE = [("pied droit", "pied gauche"), ("main_gauche", "main_droite")]


def mirroring(mirror_labels: str | None, **given: bool) -> TrainOptions:
    return TrainOptions(features="xyz", k=4, mirror=True, mirror_labels=mirror_labels, **given)


def jaws(names: list[str] = TEETH, at: TargetsAt = "vertices", count: int = 2) -> LabeledMeshes:
    items = []
    for one in map(jaw, range(count)):
        labels = np.searchsorted(np.sort(np.array(TEETH, np.int64)), one.labels)
        if at == "meshes":
            labels = labels.max()
        elif at != "vertices":
            labels = labels_at(labels, one.faces, source="vertices", target=at)
        items.append(LabeledMesh("jaw", make_mesh(one.verts, one.faces), labels))
    return LabeledMeshes(items, items[:1], names, at)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (TEETH, [(f"1{i}", f"2{i}") for i in range(1, 8)]),
        (["gum", "55", "65", "71", "81", "36"], [("55", "65"), ("71", "81")]),
        (["-1", *map(str, range(259))], []),
        ([str(i) for i in range(33)], []),
        (["Left hand", "right hand", "head"], [("Left hand", "right hand")]),
        (["hand_l", "hand_r", "LFoot", "RFoot"], [("hand_l", "hand_r"), ("LFoot", "RFoot")]),
        (["l.eye", "r.eye"], [("l.eye", "r.eye")]),
        (["armleft", "armright"], [("armleft", "armright")]),
        (["light", "right", "lock", "rock", "left"], [("right", "left")]),
        (["arm", "leg", "hull", "hurr"], []),
        (["Left", "left", "Right", "right"], [("Left", "Right"), ("left", "right")]),
        (["Left", "left", "right"], [("Left", "right")]),
        (["linke Hand", "rechte Hand", "links", "rechts"], [("linke Hand", "rechte Hand"), ("links", "rechts")]),
        (["pied droit", "main_gauche", "main_droite", "pied gauche"], GAUCHE),
        (["IZQUIERDA", "DERECHA", "lh.pial", "rh.pial"], [("IZQUIERDA", "DERECHA"), ("lh.pial", "rh.pial")]),
        (["левая рука", "правая рука", "左手", "右手"], [("левая рука", "правая рука"), ("左手", "右手")]),
        (["höger arm", "vänster arm"], [("höger arm", "vänster arm")]),
    ],
)
def test_which_names_have_sides(names: list[str], expected: list[tuple[str, str]]) -> None:
    assert found_sides(names) == expected


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("fdi", TEETH, "0,8,9,10,11,12,13,14,1,2,3,4,5,6,7"),
        ("a=c", ["a", "b", "c"], "2,1,0"),
        ("0 = 2", ["left arm", "head", "right arm"], "2,1,0"),
        ("none", TEETH, "none"),
        (None, ["a", "b"], None),
    ],
)
def test_pairs_become_numbers_of_classes(text: str | None, names: list[str], expected: str | None) -> None:
    data = LabeledMeshes(jaws().train, jaws().test, names, "vertices")
    _, chosen = with_class_options(data, mirroring(text))
    assert chosen.mirror_labels == expected
    assert with_class_options(data, chosen)[1] == chosen  # as when a run is resumed
    SEGMENTATION.check(data, chosen)


def test_a_tooth_without_its_partner_is_unlabeled_when_mirrored() -> None:
    with pytest.warns(UserWarning, match="no class for the mirror image of 21, so these are unlabeled"):
        _, chosen = with_class_options(jaws(), TrainOptions(mirror=True, mirror_labels="fdi", ignore=("11",)))
    assert chosen.mirror_labels is not None
    assert chosen.mirror_labels.split(",")[:8] == ["0", "8", "9", "10", "11", "12", "13", "-1"]


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        (None, TEETH, "mirror leaves labels as they are, but .* '11' and '21'. .* --mirror-labels fdi"),
        (None, ["an l", "an r"], "add --mirror-labels 'an l=an r'. If labels don't depend on the side, .* none"),
        ("11=21,12=99", TEETH, "mirror_labels can't be used: there is no class '99'"),
        ("fdi", ["gum", "tooth"], "mirror_labels is fdi, but no class is an FDI number .*; they are gum, tooth"),
        ("11=21,21=22", TEETH, "mirror_labels should name each class once, got '11=21,21=22'"),
        ("11=21,1=22", TEETH, "mirror_labels should name each class once"),
        ("0,1", TEETH, "mirror_labels should be the numbers of 15 classes, from 0, got 0,1"),
        ("1,2", ["a", "b"], "mirror_labels should be the numbers of 2 classes"),
        ("11:21", TEETH, "mirror_labels should be fdi, none or pairs such as 11=21,12=22, got '11:21'"),
        ("11=21=31", TEETH, "mirror_labels should be fdi, none or pairs"),
        ("11=", TEETH, "mirror_labels should be fdi, none or pairs"),
    ],
)
def test_what_is_refused(text: str | None, names: list[str], message: str) -> None:
    data = LabeledMeshes(jaws().train, jaws().test, names, "vertices")
    with pytest.raises(OptionError, match=message):
        SEGMENTATION.check(*with_class_options(data, mirroring(text)))


def test_pairs_need_mirrored_meshes_and_labels() -> None:
    with pytest.raises(OptionError, match="mirror_labels is fdi, but no mesh is mirrored; add --mirror"):
        TrainOptions(mirror_labels="fdi")
    with pytest.raises(OptionError, match="mirror_labels is for tasks with labels, and the task is regression"):
        TrainOptions(task="regression", mirror=True, mirror_labels="none")


@pytest.mark.parametrize("at", ["vertices", "edges", "faces", "meshes"])
@pytest.mark.parametrize("text", ["fdi", "none"])
def test_mirrored_jaws_are_jaws(at: TargetsAt, text: str) -> None:
    """With exchanged classes, the teeth of quadrant 1 are on the same side as before."""
    data, chosen = with_class_options(jaws(at=at, count=4), mirroring(text, rotate=False))
    batch = collate_samples([make_sample(item, chosen.preprocessing) for item in data.train])
    torch.manual_seed(0)
    changes = draw_changes(4, chosen, CPU, at)
    assert changes.mirror is not None
    assert 0 < changes.mirror.sum() < 4
    changed = changes.made(batch, 0)
    if at == "meshes":
        exchanged = torch.tensor([7 if mirrored and text == "fdi" else 14 for mirrored in changes.mirror])
        assert torch.equal(changed.labels, exchanged)
        return
    faces, x = batch.operators.faces.numpy(), changed.features[:, 0].numpy()
    places = {"vertices": x, "edges": x[mesh_edges(faces)].mean(1), "faces": x[faces].mean(1)}[at]
    right, tooth = (changed.labels.numpy() <= 7), changed.labels.numpy() > 0
    agrees = (right == (places < 0))[tooth & (np.abs(places) > 0.1)]
    assert agrees.all() == (text == "fdi")
    assert np.array_equal(tooth, batch.labels.numpy() > 0)


def test_the_command_line(tmp_path: Path) -> None:
    write_jaws(tmp_path / "data", 4)
    run = ["train", "segmentation", "--data", tmp_path / "data", "--cache", tmp_path / "cache", *TINY]
    run += ["--schedule", "step", "--features", "xyz", "--no-rotate", "--mirror", "--out"]
    assert "--mirror leaves labels as they are" in complaint(*run, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    output(*run, tmp_path / "run", "--mirror-labels", "fdi")
    stored = load_checkpoint(tmp_path / "run" / "last.pt")
    assert stored["options"]["mirror_labels"] == "0,8,9,10,11,12,13,14,1,2,3,4,5,6,7"
    resumed = [*run[:6], "--out", tmp_path / "run", "--resume", "--epochs", 2, "--jobs", 1]
    output(*resumed)
    # A run of an older version, which could not say it, can be resumed.
    stored["options"]["mirror_labels"] = None
    save_checkpoint(tmp_path / "run" / "last.pt", stored)
    output(*resumed)
    network = ["--checkpoint", tmp_path / "run", "--cache", tmp_path / "cache"]
    content = json.loads((tmp_path / "data" / "jaw0.json").read_text())
    content["instances"] = [min(label, 12) for label in content["labels"]]
    (tmp_path / "data" / "jaw0.json").write_text(json.dumps(content))  # these count in the scores of the challenge
    evaluate = ["evaluate", *network, "--data", tmp_path / "data", "--score", "teeth", "--jobs", 1, "--out"]
    (tmp_path / "data" / "test.txt").write_text("jaw0")
    text = output(*evaluate, tmp_path / "scores")
    evaluate[evaluate.index("teeth")] = "roc-auc"
    assert "ROC-AUC" in output(*evaluate, tmp_path / "ranked")  # of 15 classes
    output("predict", tmp_path / "data" / "jaw0.ply", *network, "--out", tmp_path / "new.txt")
    scores = teeth_scores(jaw(0).verts, jaw(0).labels, np.loadtxt(tmp_path / "new.txt"), content["instances"])
    assert f"TSA {scores.tsa:.4g}" in text
    (row,) = table_of(tmp_path / "scores" / "per_mesh.csv")
    for name in ("tla", "tsa", "tir"):
        assert float(row[name]) == pytest.approx(getattr(scores, name), rel=1e-5)
    # The same labels in another place, and compressed
    (tmp_path / "data" / "labels").mkdir()
    for file in list((tmp_path / "data").glob("*.json")):
        (tmp_path / "data" / "labels" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    evaluate[evaluate.index("roc-auc")] = "teeth"
    output(*evaluate, tmp_path / "moved")
    assert table_of(tmp_path / "moved" / "per_mesh.csv") == table_of(tmp_path / "scores" / "per_mesh.csv")
