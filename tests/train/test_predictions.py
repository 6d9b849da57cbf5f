"""The files that `diffnet predict` writes: the user's numbers in each form, folders, and the report."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import plyfile
import pytest
import torch
import trimesh
from command import complaint, diffnet, output
from copies import ends_of_copies
from runs import TINY, table_of, write_ball

from diffnet import DiffusionNet
from diffnet.data import LabelsAt, load_classes, load_dataset
from diffnet.data.numbers import read_columns
from diffnet.data.prepared import PreparedSamples
from diffnet.geometry import Attributes, label_instances, load_attributes, load_mesh
from diffnet.geometry.files import csv_rows, csv_text
from diffnet.geometry.preprocessing import one
from diffnet.train import network_input, predict_labels
from diffnet.train.checkpoint import load_checkpoint, save_checkpoint
from diffnet.train.inference import predict as predict_module
from diffnet.viz import write_ply
from diffnet.viz.palette import colorize

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

NUMBERS = [11, 21, 47]


def write_balls(folder: Path, count: int) -> list[Path]:
    return [write_ball(folder / f"m{i}.off", i) for i in range(count)]


def write_network(path: Path, at: str = "vertices", **metadata: Any) -> Path:
    torch.manual_seed(1)
    channels = 4 if "file" in str(metadata.get("features")) else 3
    network = DiffusionNet(channels, 3, width=8, blocks=1, outputs_at=at)  # type: ignore[arg-type]
    network.save(path, **{"features": "xyz", "k": 8, "normalize": True, **metadata})
    return path


@pytest.mark.parametrize(
    ("at", "form"),
    [
        *(("vertices", form) for form in ("ply", "txt", "npy", "csv", "json")),
        *(("faces", form) for form in ("ply", "txt", "npy", "csv", "seg")),
    ],
)
def test_predictions_are_read_as_labels(tmp_path: Path, at: LabelsAt, form: str) -> None:
    """Beside the meshes, they are a data set on which the network is always right."""
    checkpoint = write_network(tmp_path / "a.safetensors", at, label_names=list("abc"), label_numbers=NUMBERS)
    meshes = write_balls(tmp_path / "meshes", 2)
    out, network = tmp_path / "labels", DiffusionNet.load(checkpoint)
    output("predict", tmp_path / "meshes", "--checkpoint", checkpoint, "--out", out, "--format", form)
    assert {file.name for file in out.iterdir()} == {f"m0.{form}", f"m1.{form}", "report.csv"}
    if form != "ply":
        for mesh in meshes:
            shutil.copy(mesh, out)
    data = load_dataset(out, needs_train=False)
    (out / "report.csv").unlink()
    predicted = predict_labels(meshes, network, "cpu")
    assert data.labels_at == at
    assert data.label_numbers is not None
    assert len(data.label_numbers) > 1
    for item, (_, classes) in zip(data.test, predicted, strict=True):
        numbers = np.array(network_input(network).label_numbers)[classes]
        np.testing.assert_array_equal(np.array(data.label_numbers)[item.labels], numbers)
    checkpoint = write_network(tmp_path / "b.safetensors", at, label_names=["11", "21", "47"])
    evaluate = ["evaluate", "--checkpoint", checkpoint, "--data", out, "--cache", tmp_path / "cache", "--jobs", 1]
    text = output(*evaluate, "--device", "cpu", "--out", tmp_path / "scores")
    assert "accuracy 100.00 %" in text


POLYGONS = [(3, 1, 4, 2), (4, 0, 1, 4, 2), (3, 0, 1, 3)]


def write_polygons(path: Path) -> Path:
    """Three polygons, of which the second is cut into two triangles, with arrays at vertices and faces."""
    pyvista = pytest.importorskip("pyvista")
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], np.float32)
    if path.suffix == ".vtp":
        data = pyvista.PolyData(verts, faces=np.concatenate(POLYGONS))
        data["wind"], data.field_data["speed"] = verts * 2, [30.0]
        data.cell_data["label"] = np.array([7, 9, 7], np.int16)
        data.save(path)
        return path
    more = Attributes(vertices={"wind": verts * 2}, faces={"label": np.array([7, 9, 7], np.int16)})
    write_ply(path, load_mesh(write_polygons(path.with_suffix(".vtp"))), attributes=more)
    return path


@pytest.mark.parametrize(
    ("at", "source", "form"), [("vertices", "vtp", "ply"), ("faces", "vtp", "vtp"), ("faces", "ply", "ply")]
)
def test_predictions_beside_the_arrays_of_the_input(tmp_path: Path, at: LabelsAt, source: str, form: str) -> None:
    """A polygon keeps one row, and an array whose name the prediction has gets another one."""
    mesh = write_polygons(tmp_path / f"a.{source}")
    checkpoint = write_network(tmp_path / "a.safetensors", at, label_names=["ä b", "b", "c"], label_numbers=NUMBERS)
    out, shares = tmp_path / f"out.{form}", tmp_path / "p.npz"
    output("predict", mesh, "--checkpoint", checkpoint, "--out", out, "--probabilities", shares)
    ((_, classes),) = predict_labels([mesh], DiffusionNet.load(checkpoint), "cpu")
    attributes = load_attributes(out)
    tables = {"vertices": attributes.vertices, "faces": attributes.faces}
    np.testing.assert_array_equal(tables[at]["label"], np.array(NUMBERS)[classes])
    first = tables[at]["probability_ä b" if form == "vtp" else "probability___b"]
    np.testing.assert_allclose(first, np.load(shares)[str(mesh)][:, 0])
    name = "label_input" if at == "faces" else "label"
    assert (tables["faces"][name].tolist(), tables["faces"][name].dtype) == ([7, 9, 7], np.int16)
    assert load_mesh(out).polygon_count == 3
    wind = tables["vertices"]["wind" if (source, form) == ("vtp", "vtp") else "wind_0"]
    assert wind.reshape(5, -1)[:, 0].tolist() == [0, 2, 0, 0, 2]
    if form == "vtp":
        fields = pytest.importorskip("pyvista").read(out).field_data
        assert list(fields["label_names"]) == ["11 ä b", "21 b", "47 c"]
        assert source == "ply" or fields["speed"].tolist() == [30]


def test_colors_out_of_range_are_kept(tmp_path: Path) -> None:
    """They are properties, and no prediction needs them as colors."""
    colors = dict.fromkeys(("red", "green", "blue"), np.full(42, 300.0))
    write_ply(tmp_path / "a.ply", write_ball(tmp_path / "a.off"), attributes=Attributes(vertices=colors))
    checkpoint = write_network(tmp_path / "a.safetensors")
    output("predict", tmp_path / "a.ply", "--checkpoint", checkpoint, "--out", tmp_path / "new.ply")
    assert set(load_attributes(tmp_path / "new.ply").vertices["red_input"]) == {300}


def test_json_keeps_what_it_says_of_the_mesh(tmp_path: Path) -> None:
    checkpoint = write_network(tmp_path / "a.safetensors", label_names=list("abc"), label_numbers=NUMBERS)
    mesh = write_ball(tmp_path / "scan_upper.off")
    labels = {"id_patient": "scan", "jaw": "upper", "labels": [0] * 42, "instances": [1] * 42}
    (tmp_path / "scan_upper.json").write_text(json.dumps(labels))
    output("predict", mesh, "--checkpoint", checkpoint, "--out", tmp_path / "new.json")
    written = json.loads((tmp_path / "new.json").read_text())
    assert written.keys() == {"id_patient", "jaw", "labels"}
    assert (written["jaw"], written["id_patient"]) == ("upper", "scan")
    checkpoint = write_network(tmp_path / "b.safetensors", "faces", label_names=list("abc"), label_numbers=NUMBERS)
    for before, is_form in (
        ({"sub_labels": [0] * 80, "raw_labels": [1]}, lambda content: content.keys() == {"sub_labels"}),
        ([0] * 80, lambda content: len(content) == 80),
    ):
        (tmp_path / "scan_upper.json").write_text(json.dumps(before))
        output("predict", mesh, "--checkpoint", checkpoint, "--out", tmp_path / "new.json")
        assert is_form(json.loads((tmp_path / "new.json").read_text()))


@pytest.mark.parametrize(
    ("at", "form"), [("vertices", "json"), ("faces", "ply"), ("faces", "npy"), ("edges", "csv"), ("edges", "ply")]
)
def test_instances(tmp_path: Path, at: LabelsAt, form: str) -> None:
    """Of two meshes, one has two instances, and the other has a small part."""
    checkpoint = write_network(tmp_path / "a.safetensors", at, label_names=list("abc"), label_numbers=NUMBERS)
    meshes = [write_ball(tmp_path / "meshes" / f"m{seed}.off", seed) for seed in (3, 5)]
    out = tmp_path / "labels"
    predict = ["predict", *meshes, "--checkpoint", checkpoint, "--out", out, "--format", form]
    output(*predict, "--instances", "--least-area", 0.05, "--html", tmp_path / "p.html")
    without = tmp_path / "without"  # the class b
    output(*predict[:-3], without, *predict[-2:], "--instances", "--background", NUMBERS[1], "--least-area", 0.05)
    if form == "npy":
        mesh, predicted = predict_labels(meshes[:1], DiffusionNet.load(checkpoint), "cpu")[0]
        numbers = label_instances(mesh, predicted, at=at, least_area=0.05, background=1).numbers
        np.testing.assert_array_equal(np.load(without / "m3.npy")[:, 1], numbers)
    counts, changed = [], 0
    for mesh, predicted in predict_labels(meshes, DiffusionNet.load(checkpoint), "cpu"):
        numbers, classes = label_instances(mesh, predicted, at=at, least_area=0.05)
        counts.append(len(set(numbers)))
        changed += int((classes != predicted).sum())
        labels, file = np.array(NUMBERS)[classes], out / Path(mesh.name).with_suffix(f".{form}").name
        if form == "json":
            assert json.loads(file.read_text()) == {"labels": labels.tolist(), "instances": numbers.tolist()}
        elif form == "npy":
            np.testing.assert_array_equal(np.load(file), np.stack([labels, numbers], axis=1))
        elif form == "csv":
            rows = [(row["label"], row["name"], row["instance"]) for row in table_of(file)]
            expected = zip(labels, classes, numbers, strict=True)
            assert rows == [(str(label), "abc"[i], str(number)) for label, i, number in expected]
        else:
            table = plyfile.PlyData.read(file)["face" if at == "faces" else "vertex"]
            if at == "edges":
                assert set(table["instance"]) == set(numbers)
            else:
                np.testing.assert_array_equal(table["instance"], numbers)
                np.testing.assert_array_equal(table["label"], labels)
            colors = np.stack([table[name] for name in ("red", "green", "blue")], axis=1)
            np.testing.assert_array_equal(colors, colorize(table["instance"]))
    assert counts == [1, 2]
    assert changed > 0
    if form == "json" or (at, form) == ("faces", "ply"):  # these can still be read as labels
        for mesh in meshes if form == "json" else []:
            shutil.copy(mesh, out)
        data = load_dataset(out, needs_train=False)
        np.testing.assert_array_equal(np.array(data.label_numbers)[data.test[-1].labels], labels)


def test_instances_that_are_refused(tmp_path: Path) -> None:
    mesh = write_ball(tmp_path / "m.off")
    predict = ["predict", mesh, "--checkpoint", write_network(tmp_path / "a.safetensors"), "--out"]
    assert complaint(*predict, tmp_path / "a.txt", "--instances").startswith("--instances needs files with two numbers")
    assert complaint(*predict, tmp_path / "a.ply", "--least-area", 0.1) == "--least-area is for --instances; add it"
    assert complaint(*predict, tmp_path / "a.ply", "--background", 0) == "--background is for --instances; add it"
    named = complaint(*predict, tmp_path / "a.ply", "--instances", "--background", "gum")
    assert named.startswith("--background is gum, which is no class of the network; it has ")
    whole = ["predict", mesh, "--checkpoint", write_network(tmp_path / "b.safetensors", "global_mean")]
    line = complaint(*whole, "--out", tmp_path / "t.csv", "--instances")
    assert line.startswith("--instances is for networks that label vertices, faces or edges")


def test_a_run_stores_the_users_numbers(tmp_path: Path) -> None:
    """Older checkpoints lack the numbers. Names that are numbers stand for them."""
    for i, mesh in enumerate(write_balls(tmp_path / "data", 4)):
        mesh = mesh.rename(mesh.with_name(os.fsdecode(b"m%d\xff.off" % i)))  # a name that is not UTF-8
        height = trimesh.load(mesh, process=False).vertices[:, 2]
        np.savetxt(mesh.with_suffix(".txt"), np.where(height > 0.3, 47, np.where(height > -0.3, 21, 11)), fmt="%d")
    (tmp_path / "data" / "label_names.txt").write_text("gum\nZähne\nmolar\n")
    run = tmp_path / "run"
    where = ["--data", tmp_path / "data", "--cache", tmp_path / "cache", "--out", run]
    output("train", "segmentation", *where, *TINY, "--features", "xyz", "--ignore", "gum")
    stored = load_checkpoint(run / "last.pt")
    assert (stored["label_names"], stored["label_numbers"]) == (["Zähne", "molar"], [21, 47])
    ply = predicted_ply(tmp_path, run / "last.pt")
    assert ply.comments == [r"label 21 Z\xe4hne", "label 47 molar"]
    np.testing.assert_array_equal(np.array([21, 47])[ply["vertex"]["label_index"]], ply["vertex"]["label"])
    del stored["label_numbers"]
    for given, expected in ((["Zähne", "molar"], {0, 1}), (["21", "47"], {21, 47})):
        save_checkpoint(tmp_path / "older.pt", {**stored, "label_names": given})
        assert set(predicted_ply(tmp_path, tmp_path / "older.pt")["vertex"]["label"].tolist()) <= expected
    # Without numbers of the user, there is nothing that an index would add.
    checkpoint = write_network(tmp_path / "own.safetensors", label_names=["a", "b", "c"])
    ply = predicted_ply(tmp_path, checkpoint)
    assert ply.comments == ["label 0 a", "label 1 b", "label 2 c"]
    assert "label_index" not in ply["vertex"].data.dtype.names


def predicted_ply(folder: Path, checkpoint: Path) -> Any:
    mesh = write_ball(folder / "new.off", 9)
    output("predict", mesh, "--checkpoint", checkpoint, "--out", folder / "new.ply")
    return plyfile.PlyData.read(folder / "new.ply")


# ---- folders ----


def test_folders_keep_their_tree(tmp_path: Path) -> None:
    scans, out = tmp_path / "scans", tmp_path / "scans" / "labels"
    checkpoint = write_network(tmp_path / "a.safetensors")
    good = [write_ball(scans / name) for name in ("a/m.off", "b/c/m.off", "b/m.obj", "b/m.ply", "top.off")]
    write_ball(scans / ".hidden" / "m.off")
    write_ball(out / "m.off")  # results of an earlier call are no input
    (scans / "b" / "broken.off").write_text("OFF")
    (scans / "b" / "gone.obj").symlink_to("nowhere")
    (scans / "notes.txt").write_text("mine")
    predict = ["predict", scans, good[0], "--checkpoint", checkpoint, "--out", out, "--format", "npy"]
    for _ in range(2):  # the same command writes the same files
        code, text, err = diffnet(*predict)
        assert (code, len(err.splitlines())) == (1, 2)
        assert "b/broken.off: the file can't be read" in err
        assert "b/gone.obj: no such file" in err
    written = {"a/m.npy", "b/c/m.npy", "b/m.obj.npy", "b/m.ply.npy", "top.npy", "report.csv"}
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == written | {"m.off"}
    assert text.count("wrote") == len(written)
    rows = table_of(out / "report.csv")
    assert [row["file"] for row in rows if row["status"] == "ok"] == [str(mesh) for mesh in sorted(good)]
    failed = {Path(row["file"]).name: row["reason"] for row in rows if row["status"] == "failed"}
    assert failed.keys() == {"broken.off", "gone.obj"}
    assert failed["gone.obj"] == f"{scans / 'b' / 'gone.obj'}: no such file"
    assert all(float(row["seconds"]) >= 0 for row in rows)
    # Files from several folders keep their paths below the folder that they have in common.
    two = tmp_path / "v1.0"  # the name of an existing folder may have a suffix
    two.mkdir()
    output("predict", good[0], good[1], "--checkpoint", checkpoint, "--out", two, "--png", tmp_path / "a.png")
    assert {str(path.relative_to(two)) for path in two.rglob("*.ply")} == {"a/m.ply", "b/c/m.ply"}
    assert (tmp_path / "a.png").is_file()
    # With no usable mesh, each reason is printed, and only the report is written.
    bad, none = [scans / "b" / name for name in ("gone.obj", "broken.off")], tmp_path / "none"
    code, text, err = diffnet("predict", *bad, "--checkpoint", checkpoint, "--out", none, "--html", none / "a.html")
    assert (code, text.count("wrote"), len(err.splitlines())) == (1, 1, 2)
    assert [path.name for path in none.iterdir()] == ["report.csv"]


def test_a_table_of_meshes_in_folders(tmp_path: Path) -> None:
    """Meshes of one name stay apart in tables, and the report is beside the table."""
    checkpoint = write_network(tmp_path / "a.safetensors", "global_mean", label_names=["cat", "dog", "fox"])
    meshes = [write_ball(tmp_path / "in" / name / "m.off") for name in "ab"]
    (tmp_path / "in" / "b" / "n.off").write_text("OFF")
    out = ["--out", tmp_path / "t.csv", "--probabilities", tmp_path / "p.npz"]
    assert diffnet("predict", tmp_path / "in", "--checkpoint", checkpoint, *out)[0] == 1
    assert [row["file"] for row in table_of(tmp_path / "t.csv")] == [str(mesh) for mesh in meshes]
    with np.load(tmp_path / "p.npz") as found:
        assert set(found.files) == {*map(str, meshes), "label_names"}
    report = (tmp_path / "t.report.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in report] == ["status", "ok", "ok", "failed"]
    line = complaint("predict", tmp_path / "in", "--checkpoint", checkpoint, "--out", tmp_path)
    assert line.startswith("--out should be a .csv file")


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    data, labels, report = (tmp_path / name for name in ("data", "data/m.txt", "out/report.csv"))
    predict = ["predict", data, "--checkpoint", write_network(tmp_path / "a.safetensors"), "--out"]
    write_ball(data / "m.off")
    labels.write_text("labels by hand")
    line = complaint(*predict, data, "--format", "txt")
    assert line == f"{labels}: this file is beside the meshes and would be overwritten; choose another folder for --out"
    report.parent.mkdir()
    report.write_text("month,sales\n")
    line = complaint(*predict, report.parent)
    assert line == f"{report}: this file is no report of diffnet, and would be overwritten"
    assert labels.read_text() == "labels by hand"
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["a.safetensors", "m.off", "m.txt", "report.csv"]


def test_a_full_disk_fails_single_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in one file, the others are written. A bug is raised, and the report has the files before."""
    checkpoint = write_network(tmp_path / "a.safetensors")
    write_balls(tmp_path / "in", 3)
    out, error = tmp_path / "out", OSError(28, "No space left on device", "m1.ply")
    forward, calls = DiffusionNet.forward, itertools.count()

    def fail_once(self: DiffusionNet, *arguments: Any) -> torch.Tensor:
        if next(calls) % 3 == 1:
            raise error
        return forward(self, *arguments)

    monkeypatch.setattr(DiffusionNet, "forward", fail_once)
    predict = ["predict", tmp_path / "in", "--checkpoint", checkpoint, "--out", out]
    assert complaint(*predict) == "m1.ply: No space left on device"
    assert sorted(path.name for path in out.iterdir()) == ["m0.ply", "m2.ply", "report.csv"]
    shutil.rmtree(out)
    error = ZeroDivisionError("a bug")  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        diffnet(*predict)
    assert len((out / "report.csv").read_text().splitlines()) == 2


# ---- calls that go on with an earlier one ----


@pytest.mark.parametrize("at", ["vertices", "global_mean"])
def test_a_killed_call_is_resumed(tmp_path: Path, at: str) -> None:
    """A process that is killed loses the mesh in progress. Another call computes what is missing or has changed."""
    checkpoint = write_network(tmp_path / "a.safetensors", at, features="xyz+file:q", **QUALITY)
    meshes = write_balls(tmp_path / "in", 4)
    for mesh in meshes:
        np.save(mesh.with_suffix(".q.npy"), np.arange(42.0))
    out = tmp_path / ("t.csv" if at == "global_mean" else "out")
    report = out.with_suffix(".report.csv") if out.suffix else out / "report.csv"
    predict = ["predict", tmp_path / "in", "--checkpoint", checkpoint, "--cache", tmp_path / "cache", "--jobs", 1]
    predict += ["--device", "cpu", "--out"]
    whole = tmp_path / f"whole{out.suffix}"
    output(*predict, whole)
    assert kill_at(3, *predict, out) == -signal.SIGKILL
    assert [row["file"] for row in table_of(report)] == [str(mesh) for mesh in meshes[:2]]
    with report.open("a") as file:
        file.write(f'{meshes[2]},ok,"half a')  # of a row
    assert computed(*predict, out, "--resume") == ["m2.off", "m3.off"]
    assert files_in(out) == files_in(whole)
    assert [row["file"] for row in table_of(report)] == [str(mesh) for mesh in meshes]
    assert computed(*predict, out, "--resume") == []
    array = meshes[1].with_suffix(".q.npy")
    times = array.stat()
    np.save(array, np.arange(42.0)[::-1])  # of equal size and time
    os.utime(array, ns=(times.st_atime_ns, times.st_mtime_ns))
    meshes[0].touch()
    write_ball(meshes[3], 9)
    assert computed(*predict, out, "--resume") == ["m1.off", "m3.off"]
    if not out.suffix:
        (out / "m0.ply").unlink()
        assert computed(*predict, out, "--resume") == ["m0.off"]
    assert computed(*predict, out) == [mesh.name for mesh in meshes]


def counting(make: Callable[..., Any], part: str, alive: list[int]) -> Callable[..., Any]:
    """The function, which notes before each call how many of the parts of earlier results are in memory."""
    seen: list[weakref.ref[Any]] = []

    def counted(*arguments: Any) -> Any:
        alive.append(sum(each() is not None for each in seen))
        result = make(*arguments)
        seen.append(weakref.ref(getattr(result, part)))
        return result

    return counted


@pytest.mark.parametrize("at", ["vertices", "global_mean"])
def test_meshes_are_not_kept(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_network(tmp_path / "a.safetensors", at)
    write_balls(tmp_path / "in", 4)
    alive: list[int] = []
    predictor = predict_module.predictor
    monkeypatch.setattr(predict_module, "predictor", lambda *given: counting(predictor(*given), "mesh", alive))
    out = tmp_path / ("t.csv" if at == "global_mean" else "out")
    output("predict", tmp_path / "in", "--checkpoint", checkpoint, "--out", out)
    assert alive == [0] * 4


def test_evaluation_keeps_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mesh in write_balls(tmp_path / "in", 4):
        np.savetxt(mesh.with_suffix(".txt"), trimesh.load(mesh, process=False).vertices[:, 2] > 0, fmt="%d")
    checkpoint = write_network(tmp_path / "a.safetensors")
    alive: list[int] = []
    monkeypatch.setattr(PreparedSamples, "__getitem__", counting(PreparedSamples.__getitem__, "operators", alive))
    where = ["--data", tmp_path / "in", "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--jobs", 1]
    output("evaluate", "--checkpoint", checkpoint, *where, "--device", "cpu")
    assert len(alive) == 4
    assert max(alive) <= 1  # the one before, on which the network has just worked


def test_other_settings_are_not_resumed(tmp_path: Path) -> None:
    checkpoint = write_network(tmp_path / "a.safetensors")
    write_ball(tmp_path / "in" / "m.off")
    predict = ["predict", tmp_path / "in", "--checkpoint", checkpoint, "--out", tmp_path / "out"]
    output(*predict, "--resume")  # there is nothing to resume
    report = tmp_path / "out" / "report.csv"
    refusal = f"{report}: these results are of another network or other options; leave out --resume to replace them"
    before = report.read_text()
    assert complaint(*predict, "--resume", "--smooth", 1) == refusal
    assert complaint(*predict, "--resume", "--format", "txt") == refusal
    write_network(checkpoint, label_names=list("abc"))
    assert complaint(*predict, "--resume") == refusal
    assert report.read_text() == before
    assert complaint(*predict, "--resume", "--html", tmp_path / "p.html").startswith("--resume is for a folder")


def test_new_meshes_of_a_network_with_conditions_are_resumed(tmp_path: Path) -> None:
    """Those whose conditions change are predicted again."""
    network = DiffusionNet(3, 3, width=8, blocks=1, condition_channels=1)
    facts: dict[str, Any] = {"conditions": "age", "condition_statistics": {"mean": [0.0], "std": [1.0]}}
    network.save(tmp_path / "a.safetensors", features="xyz", k=8, normalize=True, **facts)
    write_balls(tmp_path / "in", 2)
    table = tmp_path / "in" / "ages.csv"
    table.write_text("file,age\nm0.off,1\nm1.off,2")
    predict = ["predict", tmp_path / "in", "--checkpoint", tmp_path / "a.safetensors", "--condition", table]
    assert computed(*predict, "--out", tmp_path / "out") == ["m0.off", "m1.off"]
    write_balls(tmp_path / "in", 3)
    table.write_text("file,age\nm0.off,1\nm1.off,5\nm2.off,2")
    assert computed(*predict, "--out", tmp_path / "out", "--resume") == ["m1.off", "m2.off"]


def test_json_names_labels_by_their_place(tmp_path: Path) -> None:
    """The label files of the meshes are those of faces."""
    checkpoint = write_network(tmp_path / "a.safetensors")
    source = write_ball(tmp_path / "m.off")
    faces = len(load_mesh(source).faces)
    source.with_suffix(".json").write_text(json.dumps({"jaw": "upper", "sub_labels": [0] * faces}))
    output("predict", source, "--checkpoint", checkpoint, "--out", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert ([*written], len(written["labels"])) == (["jaw", "labels"], len(load_mesh(source).verts))


def test_arrays_that_a_ply_file_cannot_hold(tmp_path: Path) -> None:
    """One mesh fails, with a reason. Columns of vectors keep their values beside arrays of the same name."""
    pyvista = pytest.importorskip("pyvista")
    checkpoint = write_network(tmp_path / "a.safetensors")
    ball = trimesh.creation.icosphere(1)
    for name in "ab":
        mesh = pyvista.PolyData(ball.vertices, faces=np.insert(ball.faces, 0, 3, axis=1))
        mesh["flow"], mesh["flow_0"] = 2 * ball.vertices, ball.vertices[:, 2]
        mesh["ids"] = np.arange(42) + (2**60 if name == "a" else 0)
        (tmp_path / "in").mkdir(exist_ok=True)
        mesh.save(tmp_path / "in" / f"{name}.vtp")
    predict = ["predict", tmp_path / "in", "--checkpoint", checkpoint, "--format", "ply", "--out", tmp_path / "out"]
    code, _, error = diffnet(*predict)
    assert (code, "beyond 2^53, and a PLY file can't hold it" in error) == (1, True)
    assert [row["status"] for row in table_of(tmp_path / "out" / "report.csv")] == ["failed", "ok"]
    kept = load_attributes(tmp_path / "out" / "b.ply").vertices
    np.testing.assert_allclose(np.stack([kept[f"flow_{i}"] for i in range(3)], 1), 2 * ball.vertices)
    np.testing.assert_allclose(kept["flow_0_"], ball.vertices[:, 2])


def test_workers_preprocess_meanwhile(tmp_path: Path) -> None:
    """The results are the same files, and meshes that can't be used are in the report."""
    checkpoint = write_network(tmp_path / "a.safetensors")
    write_balls(tmp_path / "in", 5)[1].write_text("OFF")
    predict = ["predict", tmp_path / "in", "--checkpoint", checkpoint, "--out"]
    code, _, alone = diffnet(*predict, tmp_path / "alone")
    ahead = diffnet(*predict, tmp_path / "ahead", "--cache", tmp_path / "cache", "--jobs", 2)
    assert (code, alone) == (ahead[0], ahead[2]) == (1, alone)
    assert files_in(tmp_path / "alone") == files_in(tmp_path / "ahead")
    reports = (table_of(tmp_path / name / "report.csv") for name in ("alone", "ahead"))
    first, second = ([(row["file"], row["reason"]) for row in rows] for rows in reports)
    assert first == second


@pytest.mark.gpu
def test_a_gpu_preprocesses_large_meshes(tmp_path: Path) -> None:
    """Cores preprocess the small ones. Predictions equal those of a CPU, with a cache and without one."""
    checkpoint = write_network(tmp_path / "a.safetensors", k=16)
    sources = write_balls(tmp_path / "in", 2)
    for i in range(2):
        ball = trimesh.creation.icosphere(subdivisions=5)
        sources.append(tmp_path / "in" / f"large{i}.ply")
        trimesh.Trimesh(ball.vertices * (1 + 0.2 * i, 0.8, 0.7), ball.faces).export(sources[-1])
    found = {}
    for name, *options in (("cpu", "cpu"), ("gpu", "cuda"), ("cached", "cuda", "--cache", tmp_path / "cache")):
        predict = ["predict", *sources, "--checkpoint", checkpoint, "--out", tmp_path / name, "--device", *options]
        with patch.object(one, "compute_on", wraps=one.compute_on) as compute:
            output(*predict, "--probabilities", tmp_path / f"{name}.npz")
        assert compute.call_count == (0 if name == "cpu" else 2)
        with np.load(tmp_path / f"{name}.npz") as arrays:
            found[name] = np.concatenate([arrays[key] for key in arrays.files if arrays[key].dtype.kind == "f"])
    assert len(found["cpu"]) > 20_000
    for name in ("gpu", "cached"):
        np.testing.assert_allclose(found[name], found["cpu"], rtol=0, atol=1e-3)


QUALITY = {"statistics": {"q": {"mean": [0.0], "std": [1.0]}}}


def files_in(out: Path) -> dict[str, bytes]:
    """The content of a table, or of the files in a folder except the report."""
    files = [out] if out.is_file() else out.rglob("*.ply")
    return {file.suffix if file == out else file.name: file.read_bytes() for file in files}


def computed(*arguments: object) -> list[str]:
    """The meshes that a command computes."""
    seen: list[str] = []
    forward = predict_module.network_outputs

    def seeing(network: Any, sample: Any, *rest: Any) -> torch.Tensor:
        seen.extend(Path(name).name for name in sample.names)
        return forward(network, sample, *rest)

    with patch.object(predict_module, "network_outputs", seeing):
        output(*arguments)
    return seen


def kill_at(mesh: int, *arguments: object) -> int | None:
    """The exit code of a command that is killed while it works on a mesh, counted from 1."""
    (code,) = ends_of_copies(_killed, [(mesh, arguments)])
    return code


def _killed(mesh: int, arguments: tuple[object, ...]) -> None:
    forward, calls = predict_module.network_outputs, itertools.count(1)

    def killing(*given: Any) -> Any:
        if next(calls) == mesh:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*given)

    predict_module.network_outputs = killing
    diffnet(*arguments)


# ---- input of other kinds ----


@pytest.mark.parametrize("weight", ["inf", "1e31"])
def test_a_weight_that_is_too_large(tmp_path: Path, weight: str) -> None:
    predict = ["predict", write_ball(tmp_path / "m.off"), "--checkpoint", write_network(tmp_path / "a.safetensors")]
    line = complaint(*predict, "--out", tmp_path / "a.ply", "--smooth", weight)
    assert line == f"--smooth should be at most 1e+30, got {float(weight)}"


def test_names_that_are_not_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are surrogates in Python. Files and the output show them."""
    mesh = write_ball(tmp_path / "m.off").rename(tmp_path / os.fsdecode(b"m\xff.off"))
    checkpoint = write_network(tmp_path / "a.safetensors")
    names = ["--class-names", os.fsdecode(b"arm\xff,leg,head"), "--html", tmp_path / "p.html", "--png"]
    for form, table in (("csv", "csv"), ("ply", "npz")):
        out = ["--out", tmp_path / f"a.{form}", *names, tmp_path / "p.png", "--probabilities", tmp_path / f"p.{table}"]
        output("predict", mesh, "--checkpoint", checkpoint, *out)
    assert (tmp_path / "p.csv").read_text().startswith("file,element,arm\\udcff,leg,head\n")
    assert "m\\udcff.off,0," in (tmp_path / "p.csv").read_text()
    assert plyfile.PlyData.read(tmp_path / "a.ply").comments[0] == r"label 0 arm\udcff"
    with np.load(tmp_path / "p.npz") as found:
        assert str(tmp_path / "m\\udcff.off") in found.files


def test_text_that_spreadsheets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas in tables get an apostrophe, numbers stay, and each table is read back as it was."""
    text = ["=a()", "+x", "-x.off", "@x", "\tx", "\r=x", "'=x", "''-1", "-1_0"]
    plain: list[Any] = ["'x", "x=1", "-1.5", "+2e-3", "-nan", ".5", "", -1.5, 3]
    rows = [text, plain, [Path("=p")]]
    table = csv_text(rows)
    found = list(csv.reader(io.StringIO(table, newline="")))
    assert found == [[f"'{cell}" for cell in text], [str(cell) for cell in plain], ["'=p"]]
    assert list(csv_rows(io.StringIO(table, newline=""))) == [[str(cell) for cell in row] for row in rows]

    monkeypatch.chdir(tmp_path)
    checkpoint = write_network(tmp_path / "a.safetensors", "global_mean", label_names=["=cat", "-dog", "-1"])
    meshes = [write_ball(Path(name), i).name for i, name in enumerate(("=m.off", "@n.off"))]
    predict = ["predict", *meshes, "--checkpoint", checkpoint, "--device", "cpu", "--out", "t.csv"]
    output(*predict)
    assert [row["file"] for row in table_of(tmp_path / "t.report.csv")] == [f"'{name}" for name in meshes]
    assert (tmp_path / "t.csv").read_text().startswith("file,label,'=cat,'-dog,-1\n'=m.off,")
    assert computed(*predict, "--resume") == []
    (tmp_path / "labels.csv").write_text(csv_text([(meshes[0], "=cat", "test"), (meshes[1], "-dog", "test")]))
    data = load_classes(tmp_path / "labels.csv", needs_train=False)
    assert (data.label_names, [Path(item.mesh.name).name for item in data.test]) == (["-dog", "=cat"], meshes)
    (tmp_path / "targets.csv").write_text(csv_text([["=height", "width"], ["-1.5", "2"]]))
    assert read_columns(tmp_path / "targets.csv").names == ["=height", "width"]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    mesh = write_ball(tmp_path / "m.off")
    line = complaint("predict", mesh, "--checkpoint", tmp_path / "a.pt", "--out", tmp_path / "a.ply")
    assert line == f"{tmp_path / 'a.pt'}: this is a pipe, a socket or a device, expected a checkpoint"
