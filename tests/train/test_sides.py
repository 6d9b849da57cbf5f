"""Mirrored training meshes whose classes have sides: jaws with FDI numbers, and names with left and right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from command import complaint, output
from jaws import jaw, write_jaws

from diffnet.data import LabeledMesh, LabeledMeshes, TargetsAt, collate_samples, labels_at, make_sample
from diffnet.geometry import make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.train.checkpoint import load_checkpoint, save_checkpoint
from diffnet.train.options import TrainOptions
from diffnet.train.options.sides import found_sides
from diffnet.train.steps.augmentation import draw_changes
from diffnet.train.tasks.classes import check_sides, with_class_options

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

TEETH = ["0", *(f"{quadrant}{number}" for quadrant in (1, 2) for number in range(1, 8))]

GAUCHE = [("pied droit", "pied gauche"), ("main_gauche", "main_droite")]


def options(mirror_labels: str | None, **given: bool) -> TrainOptions:
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
    _, chosen = with_class_options(data, options(text))
    assert chosen.mirror_labels == expected
    assert with_class_options(data, chosen)[1] == chosen  # as when a run is resumed
    check_sides(data, chosen)


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
        check_sides(*with_class_options(data, options(text)))


def test_pairs_need_mirrored_meshes_and_labels() -> None:
    with pytest.raises(OptionError, match="mirror_labels is fdi, but no mesh is mirrored; add --mirror"):
        TrainOptions(mirror_labels="fdi")
    with pytest.raises(OptionError, match="mirror_labels is for tasks with labels, and the task is regression"):
        TrainOptions(task="regression", mirror=True, mirror_labels="none")


@pytest.mark.parametrize("at", ["vertices", "edges", "faces", "meshes"])
@pytest.mark.parametrize("text", ["fdi", "none"])
def test_mirrored_jaws_are_jaws(at: TargetsAt, text: str) -> None:
    """With exchanged classes, the teeth of quadrant 1 are on the same side as before."""
    data, chosen = with_class_options(jaws(at=at, count=4), options(text, rotate=False))
    batch = collate_samples([make_sample(item, chosen.preprocessing) for item in data.train])
    torch.manual_seed(0)
    changes = draw_changes(4, chosen, torch.device("cpu"), at)
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
    small = ["--k", 8, "--width", 8, "--blocks", 1, "--epochs", 1, "--jobs", 1, "--device", "cpu", "--schedule", "step"]
    run = ["train", "segmentation", "--data", tmp_path / "data", "--cache", tmp_path / "cache", *small]
    run += ["--features", "xyz", "--no-rotate", "--mirror", "--out"]
    assert "--mirror leaves labels as they are" in complaint(*run, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    output(*run, tmp_path / "run", "--mirror-labels", "fdi")
    stored = load_checkpoint(tmp_path / "run" / "last.pt")
    assert stored["options"]["mirror_labels"] == "0,8,9,10,11,12,13,14,1,2,3,4,5,6,7"
    resumed = ["train", "segmentation", "--data", tmp_path / "data", "--cache", tmp_path / "cache"]
    output(*resumed, "--out", tmp_path / "run", "--resume", "--epochs", 2, "--jobs", 1)
    # A run of an older version, which could not say it, can be resumed.
    stored["options"]["mirror_labels"] = None
    save_checkpoint(tmp_path / "run" / "last.pt", stored)
    output(*resumed, "--out", tmp_path / "run", "--resume", "--epochs", 2, "--jobs", 1)
