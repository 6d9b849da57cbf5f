"""The command line: its output, exit codes and files."""

import contextlib
import gzip
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, diffnet, output
from conftest import ROOT
from copies import ends_of_copies
from PIL import Image
from runs import results_of, write_balls
from two_ranks import environment, wait_for

from diffnet import DiffnetError, DiffusionNet, MeshError, __version__, geometry, normalize_positions
from diffnet.data import BODIES, DataError, LabeledMeshes, load_dataset, shapes
from diffnet.geometry import load_mesh, processes
from diffnet.geometry.errors import ConvergenceError, OptionError, WorkerError
from diffnet.geometry.folder_lock import locked
from diffnet.train import cli
from diffnet.train.checkpoint import CheckpointError, load_checkpoint
from diffnet.train.commands import options
from diffnet.train.commands.training import find_data
from diffnet.train.epoch import TrainingError
from diffnet.train.inference.predict import predict_labels
from diffnet.train.run_folder import Row, as_csv
from diffnet.viz.palette import label_colors

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

SMALL = ["--k", 8, "--width", 16, "--blocks", 1, "--jobs", 1, "--device", "cpu"]
SMALL += ["--features", "xyz", "--no-rotate", "--dropout", 0, "--lr", 0.02, "--schedule", "step"]  # easy for the balls


def start(
    *arguments: object, options: Sequence[str] = (), stderr: int | TextIO = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a command in a process and a process group of its own, with options of the interpreter."""
    return subprocess.Popen(
        [sys.executable, *options, "-m", "diffnet", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(),
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set (data/), a trained network (run/) and a cache (cache/)."""
    room = tmp_path_factory.mktemp("room")
    data = write_balls(room / "data")
    (data / "label_names.txt").write_text("low\nhigh\n")
    where = ["--data", data, "--out", room / "run", "--cache", room / "cache"]
    out = output("train", "segmentation", *where, "--epochs", 12, *SMALL)
    assert "meshes: 4 to train on, 1 to test on\n" in out
    assert f"\ncache: {room / 'cache'}\n" in out
    assert "classes: 2 at the vertices, without the test part: low " in out
    assert re.search(r"epoch   12  loss \d\.\d{4}  accuracy: train [\d.]+ %, test [\d.]+ %", out)
    assert "test accuracy" in out
    return room


@pytest.fixture
def train(room: Path, tmp_path: Path) -> list[object]:
    """The beginning of a command that trains in the folder run on the data of the room, with its cache."""
    where = ["--data", room / "data", "--out", tmp_path / "run", "--cache", room / "cache"]
    return ["train", "segmentation", *where]


def test_a_run_without_an_eigenbasis(room: Path, tmp_path: Path) -> None:
    """The cache entries hold no eigenpairs."""
    where = ["--data", room / "data", "--out", tmp_path / "run", "--cache", tmp_path / "cache"]
    options = [*SMALL, "--diffusion", "implicit", "--k", 0, "--attention-heads", 2, "--epochs", 2]
    output("train", "segmentation", *where, *options)
    mesh, out = room / "data" / "m0.obj", tmp_path / "m0.ply"
    output("predict", mesh, "--checkpoint", tmp_path / "run" / "last.pt", "--out", out)
    assert out.is_file()


def test_a_run_with_the_originals_operators(room: Path, tmp_path: Path) -> None:
    """Prediction reads operators and scale from the checkpoint, and `precompute` fills the same cache entries."""
    cache, mesh, checkpoint = tmp_path / "cache", room / "data" / "m0.obj", tmp_path / "run" / "last.pt"
    chosen = ["--operators", "original", "--normalize", "area"]
    where = ["--data", room / "data", "--out", tmp_path / "run", "--cache", cache]
    output("train", "segmentation", *where, *SMALL, *chosen, "--epochs", 1)
    entries = set(cache.rglob("*.operators.*"))
    assert len(entries) == 5
    output("precompute", room / "data", "--cache", cache, "--k", 8, "--jobs", 1, *chosen)
    predict = ["predict", mesh, "--checkpoint", checkpoint, "--out", tmp_path / "m0.ply", "--cache", cache]
    output(*predict)
    assert set(cache.rglob("*.operators.*")) == entries
    metadata = DiffusionNet.load(checkpoint).metadata
    assert [metadata[name] for name in ("operators", "normalize", "laplacian")] == ["original", "area", "cotan"]
    output("precompute", mesh, "--cache", cache, "--k", 8, "--jobs", 1, *chosen[:2])
    assert len(set(cache.rglob("*.operators.*"))) == 6
    line = complaint("train", "segmentation", *where, *SMALL, *chosen, "--laplacian", "robust")
    assert "the original's operators have the cotangent Laplacian" in line


def test_prediction_with_a_checkpoint_of_the_original(room: Path, tmp_path: Path) -> None:
    small = np.load(ROOT / "tests" / "golden" / "small.npz")
    weights = {key.removeprefix("weight_"): torch.tensor(small[key]) for key in small if key.startswith("weight_")}
    checkpoint, mesh = tmp_path / "small.pth", tmp_path / "small.obj"
    torch.save(weights, checkpoint)
    trimesh.Trimesh(3 * small["verts"], small["faces"], process=False).export(mesh)
    named = ["--labels-at", "faces", "--class-names", "a, b,c,d,e"]
    files = ["--out", tmp_path / "small.ply", "--probabilities", tmp_path / "p.npz"]
    out = output("predict", mesh, "--checkpoint", checkpoint, *files, *named)
    assert "which is taken to be xyz at radius 1, with 128 eigenpairs and the original's operators" in out
    found = np.load(tmp_path / "p.npz")
    assert found["label_names"].tolist() == list("abcde")
    assert found[str(mesh)].shape == (320, 5)
    line = complaint("predict", mesh, "--checkpoint", checkpoint, *files, "--class-names", "a,b")
    assert "--class-names should have a name for each of the 5 classes, got a, b" in line
    line = complaint("evaluate", "--checkpoint", checkpoint, "--data", room / "data", "--out", tmp_path / "scores")
    assert "a checkpoint of the original implementation; write DiffusionNet.from_original_checkpoint(path)" in line
    line = complaint("predict", mesh, "--checkpoint", room / "run" / "best.pt", *files, "--labels-at", "faces")
    assert "leave out --labels-at" in line


# ---- help and usage ----


OF_TRAINING = (
    "--data --out --layout --features --epochs --width --blocks --dropout --lr --schedule --decay-every --batch-meshes "
    "--batch-vertices --rotate --no-rotate --rotate-about --scale-range --jitter --mirror --cut --decimate --variants "
    "--validation --eval-every --k --laplacian --precision --device --seed --cache --jobs --resume --capture --backend"
)


def test_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(variable, "200")
    for command, mentioned in (
        ("", "train predict precompute info"),
        ("train", "segmentation"),
        ("train segmentation", OF_TRAINING),
        ("predict", "PATH --checkpoint --format --out --html --png --device --cache"),
        ("precompute", "PATH --cache --k --laplacian --jobs"),
        ("info", "MESH"),
    ):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", output(*command.split(), "--help"))
        for word in mentioned.split():
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", plain), word
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output("train", "segmentation", "--help"))
    panels = dict(re.findall(r"╭─ ([^─]+) ─+╮\n(.*?)╰", plain, re.DOTALL))
    assert list(panels) == [
        *("Options", "Labels", "Features and operators", "Network", "Training", "Augmentation", "Run")
    ]
    for panel, option in (("Options", "--data"), ("Network", "--width"), ("Training", "--lr"), ("Run", "--resume")):
        assert re.search(rf"^│ .*{option} ", panels[panel], re.MULTILINE)
    assert "Network" not in diffnet("precompute", "--help")[1]


def test_usage_errors(tmp_path: Path) -> None:
    train = ["train", "segmentation", "--data", tmp_path, "--out", tmp_path / "o"]
    for wrong in ("--layout=zip", "--features=xyz+shot", "--epochs=0", "--precision=fp8", "--validation=1", "--other"):
        code, _, err = diffnet(*train, wrong)
        assert (code, "Traceback" in err) == (2, False)
        assert wrong.split("=")[0] in err


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("/x", "/x/diffnet"), ("", "/home/me/.cache/diffnet"), (None, "/home/me/.cache/diffnet")):
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert str(options.default_cache()) == expected
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what happens for a user without a home
    assert options.default_cache().is_absolute()


def test_version() -> None:
    assert diffnet("--version") == (0, f"diffnet {__version__}\n", "")


QUICK = """
import sys
from diffnet.__main__ import main

def run(*arguments):
    sys.argv = ["diffnet", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments

for command in ("", "train", "train segmentation", "predict", "demo", "view", "robustness"):
    run(*command.split(), "--help")
heavy = ["torch", "triton", "scipy", "trimesh", "matplotlib", "tensorboard", "skimage", "PIL"]
print("loaded for help:", [name for name in heavy if name in sys.modules])
run("info", "ball.off")
print("loaded for info:", "torch" in sys.modules)
import diffnet.geometry
diffnet.geometry.load_mesh = lambda path: path.nothing
run("info", "ball.off")
"""


def test_help_and_info_load_little_and_a_bug_shows_its_traceback(tmp_path: Path) -> None:
    trimesh.creation.icosphere(1).export(tmp_path / "ball.off")
    command = [sys.executable, "-c", QUICK]
    ran = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout.count("Usage:") == 7
    assert "loaded for help: []" in ran.stdout
    assert "no faults found" in ran.stdout
    assert "loaded for info: False" in ran.stdout
    assert ran.returncode == 1
    assert re.search("Traceback.*AttributeError", ran.stderr, re.DOTALL)


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("running", "before", "expected"),
    [
        ("1/99", {}, {"GOMP_SPINCOUNT": "30000"}),
        ("999/999", {}, {"OMP_WAIT_POLICY": "passive"}),
        (None, {}, {"GOMP_SPINCOUNT": "30000"}),  # a system that doesn't tell
        ("999/999", {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ("999/999", {"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_how_threads_wait(
    running: str | None,
    before: dict[str, str],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command chooses it by what else runs, unless the user has."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in WAITING} | before)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(cli, "is_command", lambda: True)
    monkeypatch.setattr(processes, "LOAD", tmp_path / "loadavg")
    if running:
        (tmp_path / "loadavg").write_text(f"0.00 0.00 0.00 {running} 7\n")
    diffnet("--version")
    assert {name: value for name, value in os.environ.items() if name in WAITING} == expected


def test_warnings_are_lines_of_the_command(tmp_path: Path) -> None:
    """They name the command, and no line of code."""
    folder = write_balls(tmp_path / "data", 2)
    for labels in folder.glob("*.txt"):
        labels.write_text("0\n2\n" * 21)
    (folder / "label_names.txt").write_text("arm\nleg\n")
    places = ["--data", folder, "--out", tmp_path / "run", "--cache", tmp_path / "cache"]
    process = start("train", "segmentation", *places, "--epochs", 1, *SMALL)
    out, errors = process.communicate()
    lines = errors.splitlines()
    assert process.returncode == 0
    assert "names: 0 is arm, 2 is leg\n" in out  # by their order, not by their numbers
    assert [line.partition(" the labels of 2 of 2 meshes ")[0] for line in lines] == [f"diffnet: warning: {folder}:"]


# ---- bad input ----


def test_bad_input_to_training(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(data: Path, out: Path, *more: object) -> str:
        where = ["--data", data, "--out", out, "--cache", tmp_path / "c", "--epochs", 1]
        return complaint("train", "segmentation", *where, *SMALL, *more)

    good, out = room / "data", tmp_path / "out"
    line = train(tmp_path / "nowhere", out)
    assert "nowhere: no such file or folder; bodies is the built-in set of segmentation" in line
    assert "figures: no such file or folder; bodies is the built-in set" in train(Path("figures"), out)
    (tmp_path / "empty").mkdir()
    assert "no data set found" in train(tmp_path / "empty", out)
    if not torch.cuda.is_available():
        assert "no GPU" in train(good, out, "--device", "cuda")
    assert "'nonsense'" in train(good, out, "--device", "nonsense")
    for given, message in (
        (["--features", "hks", "--rotate"], "--rotate needs features with xyz, normals or vector:NAME"),
        (["--seed", -1], "--seed should be at least 0"),
        (["--lr", "nan"], "--lr should be above 0"),
        (["--class-weights", "1,x"], "--class-weights should be balanced"),
        (["--class-weights", "1,2,3"], "--class-weights has 3 weights for 2 classes"),
        (["--ignore", "tail"], "--ignore can't be used: there is no class 'tail'"),
        (["--validation", 0.9], "--validation should leave a mesh to train on, got 0.9 of 4"),
    ):
        assert train(good, out, *given).startswith(message)
        shutil.rmtree(out, ignore_errors=True)
    assert "no run in this folder to resume" in train(good, out, "--resume")
    assert not out.exists()
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    assert f"{tmp_path / 'link'}: this link points to nowhere, which is missing" in train(good, tmp_path / "link")
    assert f"{file}: a folder is needed here, and this is a file" in train(good, file)
    assert file.read_text() == "mine"
    assert str(file) in train(good, out, "--cache", file)
    before = {p: p.stat().st_mtime_ns for p in (room / "run").rglob("*")}
    assert re.search("already.*--resume", train(good, room / "run"))
    slow = Mock(side_effect=AssertionError("it takes long for large meshes"))
    monkeypatch.setattr("diffnet.train.preprocessing.preprocess", slow)
    for name, value, former in (("width", 9, 16), ("k", 9, 8), ("validation", 0.5, 0.0)):
        line = train(good, room / "run", "--resume", f"--{name}", value)
        assert f"--{name} is {value}, and the run in {room / 'run'} was started with {former}; a resumed run" in line
    assert {p: p.stat().st_mtime_ns for p in (room / "run").rglob("*")} == before


def test_a_second_run_and_a_wrong_device_stop_before_training(room: Path, tmp_path: Path, train: list[object]) -> None:
    assert "'cpu:7' is not available" in complaint(*train, "--device", "cpu:7", "--cache", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
    with locked(room / "run"):
        line = complaint(*train, "--out", room / "run", "--resume", "--device", "cpu", "--cache", tmp_path / "cache")
    assert f"another run writes to this folder (process {os.getpid()} on " in line
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file(train: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    assert complaint(*train, *SMALL) == f"{tmp_path / 'run' / 'last.pt'}: No space left on device"
    assert list((tmp_path / "run").iterdir()) == []


def test_a_resumed_run_keeps_its_options(train: list[object], tmp_path: Path) -> None:
    out, train = tmp_path / "run", [*train, "--jobs", 1, "--device", "cpu"]
    output(*train, *SMALL, "--outputs-at", "faces", "--seed", 3, "--epochs", 1)
    started = load_checkpoint(out / "last.pt")["options"]
    text = output(*train, "--resume", "--epochs", 2)
    assert f"resuming {out}: options that are not given are those of this run" in text
    assert "classes: 2 at the faces" in text
    resumed = load_checkpoint(out / "last.pt")
    assert resumed["options"] == {**started, "epochs": 2}
    assert len(resumed["history"]) == 2
    assert "was started with 3" in complaint(*train, "--resume", "--seed", 4)
    assert "--schedule is cosine" in complaint(*train, "--resume", "--schedule", "cosine", "--epochs", 3)
    assert "was started without it" in complaint(*train, "--resume", "--batch-vertices", 100)
    assert "other labels" in complaint(*train, "--resume", "--outputs-at", "vertices")
    assert "--width is 128" in complaint(*train, "--resume", "--recipe", "original")
    line = complaint("train", "classification", *train[2:], "--resume")
    assert "this run is one of `diffnet train segmentation`, not of classification" in line
    assert load_checkpoint(out / "last.pt")["options"]["epochs"] == 2


def test_a_bad_mesh_of_a_data_set_is_named(tmp_path: Path) -> None:
    data = write_balls(tmp_path / "data", 3)
    for stem in ("m1", "m2"):
        (data / f"{stem}.obj").write_text("v 0 0 0\nv 0 0 0\nv 0 0 0\nf 1 2 3\n")
        (data / f"{stem}.txt").write_text("0\n0\n1\n")
    train = ["train", "segmentation", "--data", data, "--out", tmp_path / "out", "--cache", tmp_path / "c", *SMALL]
    assert f"2 of 3 meshes can't be used: {data / 'm1.obj'}, {data / 'm2.obj'}: " in complaint(*train)
    assert list((tmp_path / "out").iterdir()) == []  # it is named before training
    (data / "m1.obj").write_text("v 0 zero 0\nf 1 2 3\n")
    assert "m1.obj" in complaint(*train)
    (data / "m1.txt").write_text("0\n0\nred\n")
    assert re.search("m1.txt, line 3.* label_names.txt", complaint(*train))


def test_a_triangle_soup(room: Path, tmp_path: Path) -> None:
    """Every face has its own vertices. Predictions at them are those of the connected mesh."""
    ball = load_mesh(room / "data" / "m0.obj")
    corners = ball.faces.reshape(-1)
    rows = [f"v {x} {y} {z}" for x, y, z in ball.verts[corners]]
    rows += [f"f {i} {i + 1} {i + 2}" for i in range(1, len(corners), 3)]
    soup, best = tmp_path / "soup.obj", room / "run" / "best.pt"
    soup.write_text("\n".join(rows) + "\n")
    assert re.search(r"coincident vertices +198, 198 of them joined by default *\n", output("info", soup))
    output("predict", soup, "--checkpoint", best, "--out", tmp_path / "soup.ply")
    assert len(load_mesh(tmp_path / "soup.ply").verts) == 240
    network = DiffusionNet.load(best)
    (_, whole), (_, split) = predict_labels([ball, soup], network, torch.device("cpu"))
    assert (split == whole[corners]).mean() > 0.99
    network.metadata["join"] = "never"
    with pytest.warns(UserWarning, match=r"soup.obj: every eigenvalue is 0.* join=\"always\""):
        predict_labels([soup], network, torch.device("cpu"))

    train = ["train", "segmentation", "--cache", tmp_path / "cache", *SMALL, "--epochs", 1, "--join", "always"]
    data = tmp_path / "data"
    data.mkdir()
    for i in range(3):
        (data / f"{i}.obj").write_text(soup.read_text())
        np.savetxt(data / f"{i}.txt", (ball.verts[corners, 2] > 0).astype(int), fmt="%d")
    output(*train, "--data", data, "--out", tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "last.pt")["options"]["join"] == "always"
    entries = set((tmp_path / "cache").rglob("*.operators.*"))
    assert len(entries) == 1
    for rule, more in (("always", 0), ("auto", 1)):
        output("precompute", soup, "--cache", tmp_path / "cache", "--k", 8, "--jobs", 1, "--join", rule)
        assert len(set((tmp_path / "cache").rglob("*.operators.*"))) == 1 + more


def test_bad_input_to_prediction(room: Path, tmp_path: Path) -> None:
    mesh, ply, new = room / "data" / "m0.obj", tmp_path / "a.ply", tmp_path / "new"

    def predict(*arguments: object, out: Path = ply, checkpoint: Path = room / "run" / "best.pt") -> str:
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        line = complaint("predict", *arguments, "--checkpoint", checkpoint, "--out", out)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        return line

    garbage = tmp_path / "garbage.pt"
    garbage.write_bytes(b"not a checkpoint")
    assert "missing.pt: no such checkpoint" in predict(mesh, checkpoint=tmp_path / "missing.pt")
    assert "garbage.pt: not a checkpoint" in predict(mesh, checkpoint=garbage)
    assert "missing.off: no such file" in predict(tmp_path / "missing.off")
    assert "a folder" in predict(mesh, room / "data" / "m1.obj")
    for name in ("a.obj", "a.seg"):
        line = predict(mesh, out=tmp_path / name)
        formats = ".ply, .txt, .npy, .csv, .json, .vtp, .annot or .label.gii"
        assert f"--out should be a {formats} file for outputs at vertices" in line
    line, names = predict(mesh, "--format", "seg", out=new), "ply, txt, npy, csv, json, vtp, annot or label.gii"
    assert f"--format should be {names} for outputs at vertices, got seg" in line
    assert "the extension of" in predict(mesh, "--format", "ply")
    (tmp_path / "empty").mkdir()
    assert "no meshes" in predict(tmp_path / "empty", out=new)
    assert "'nonsense'" in predict(mesh, "--device", "nonsense")
    assert "two results" in predict(mesh, "--html", tmp_path / "x", "--png", tmp_path / "x")
    for option, expected in {"--png": ".png", "--html": ".html", "--probabilities": ".npz or .csv"}.items():
        assert (
            predict(mesh, option, tmp_path / "a.x") == f"{option} should be a {expected} file, got {tmp_path / 'a.x'}"
        )
    file = tmp_path / "file"
    file.write_text("mine")
    assert predict(mesh, out=file / "a.ply") == f"{file}: a folder is needed here, and this is a file"
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    for out in (link, link / "a.ply"):
        assert predict(mesh, out=out) == f"{link}: this link points to nowhere, which is missing"


def test_inputs_are_not_overwritten(room: Path, tmp_path: Path) -> None:
    mesh, checkpoint = tmp_path / "mine.ply", tmp_path / "best.pt"
    trimesh.load(room / "data" / "m0.obj", process=False).export(mesh)
    shutil.copy(room / "run" / "best.pt", checkpoint)
    (tmp_path / "link.ply").symlink_to(mesh)
    before = mesh.read_bytes(), checkpoint.read_bytes()
    other = ["--out", tmp_path / "a.ply"]
    for given in (
        *(["--out", path] for path in (tmp_path, mesh, tmp_path / "link.ply")),
        *([*other, option, mesh] for option in ("--html", "--png")),
        [*other, "--png", checkpoint],
    ):
        assert "would be overwritten" in complaint("predict", mesh, "--checkpoint", checkpoint, *given)
        assert (mesh.read_bytes(), checkpoint.read_bytes()) == before


def info_that_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[int, str, str]:
    """`diffnet info`, whose diagnosis raises an error."""
    monkeypatch.setattr(geometry, "load_mesh", lambda path: None)
    monkeypatch.setattr(geometry, "diagnose", Mock(side_effect=error))
    return diffnet("info", "a.off")


def test_bugs_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (TypeError, KeyError, ValueError, RuntimeError):
        with pytest.raises(bug, match="oh"):
            info_that_raises(monkeypatch, bug("oh"))


def test_errors_that_a_user_can_fix_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that catches ValueError or RuntimeError still works."""
    bases = {
        ValueError: (OptionError, MeshError, DataError, CheckpointError),
        RuntimeError: (TrainingError, ConvergenceError, WorkerError),
    }
    for base, kinds in bases.items():
        assert all(issubclass(kind, DiffnetError) and issubclass(kind, base) for kind in kinds)
    missing = FileNotFoundError(2, "No such file or directory", "/nowhere")
    errors = [kind("bad\n  value") for kind in (DiffnetError, *bases[ValueError], *bases[RuntimeError])]
    lines = ["bad value"] * len(errors) + ["/nowhere: No such file or directory", "disk full"]
    for error, line in zip([*errors, missing, OSError("disk full")], lines, strict=True):
        assert info_that_raises(monkeypatch, error) == (1, "", f"diffnet: {line}\n")


def test_out_of_memory_names_options_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried 8 GiB"), MemoryError(), on_cpu):
        status, _, err = info_that_raises(monkeypatch, error)
        assert status == 1
        assert err.startswith("diffnet: out of memory")
        assert "--batch-vertices" in err
        assert err.count("\n") == 1


# ---- prediction ----


def read_ply(path: Path) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """The vertices, faces, colors and labels of a file that `predict` wrote."""
    loaded = trimesh.load(path, process=False)
    raw = loaded.metadata["_ply_raw"]
    at = "face" if "label" in raw.get("face", {}).get("properties", {}) else "vertex"
    table = raw[at]["data"]
    colors = np.stack([np.asarray(table[c]).reshape(-1) for c in ("red", "green", "blue")], axis=1)
    return np.asarray(loaded.vertices), getattr(loaded, "faces", None), colors, np.asarray(table["label"]).reshape(-1)


def test_a_mesh_is_predicted(room: Path, tmp_path: Path) -> None:
    mesh = tmp_path / "in" / "far away.off"
    mesh.parent.mkdir()
    ball = trimesh.creation.icosphere(2)
    ball.vertices = 50 + 3 * ball.vertices
    ball.export(mesh)
    paths = [tmp_path / "new" / name for name in ("a[b].ply", "a.html", "a.png")]
    arguments = ["predict", mesh, "--checkpoint", room / "run" / "last.pt"]
    out = output(*arguments, "--out", paths[0], "--html", paths[1], "--png", paths[2])
    assert out == "".join(f"wrote {path}\n" for path in paths)

    verts, faces, colors, labels = read_ply(paths[0])
    np.testing.assert_allclose(verts, load_mesh(mesh).verts)
    np.testing.assert_array_equal(faces, ball.faces)
    assert (labels == (verts[:, 2] > 50)).mean() > 0.9  # the network has learned the halves
    np.testing.assert_array_equal(colors, label_colors(2)[labels])
    page = paths[1].read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!data:|#)\w", page)
    assert all(name in page for name in ("low", "high", "far away"))
    assert np.asarray(Image.open(paths[2]).convert("RGB")).std() > 5

    # An empty cache and a filled cache give the same result.
    for lap in range(2):
        again = tmp_path / f"again {lap}.ply"
        output(*arguments, "--out", again, "--cache", tmp_path / "cache")
        assert again.read_bytes() == paths[0].read_bytes()
    assert len(list((tmp_path / "cache").rglob("*.operators.*"))) == 1


NAMES = ["spruce", "larch", "yew", "juniper"]


def test_a_network_of_an_own_loop_predicts(room: Path, tmp_path: Path) -> None:
    """It is saved with what its input is. Labels are those of the same steps in Python."""
    mesh, path = load_mesh(room / "data" / "m0.obj"), tmp_path / "own.safetensors"
    arguments = ["predict", room / "data" / "m0.obj", "--checkpoint", path, "--out", tmp_path / "m0.ply"]
    torch.manual_seed(0)
    network = DiffusionNet(3, 4, width=8, blocks=1, outputs_at="faces", last_activation=torch.tanh).eval()
    network.save(path, k=8)
    line = complaint(*arguments)
    assert f"{path}: the metadata of the network, which takes 3 channels, lack features, normalize; write" in line
    for normalize in (True, False):
        network.save(path, features="xyz", k=8, normalize=normalize, laplacian="cotan", label_names=NAMES)
        page = tmp_path / f"{normalize}.html"
        output(*arguments, "--html", page)
        verts = normalize_positions(mesh.verts) if normalize else mesh.verts
        operators = geometry.precompute((verts, mesh.faces), k=8, laplacian="cotan")
        with torch.no_grad():
            expected = network(torch.from_numpy(verts).float(), operators).argmax(1)
        np.testing.assert_array_equal(read_ply(tmp_path / "m0.ply")[3], expected)
        assert all(name in page.read_text() for name in NAMES)
    DiffusionNet.load(path, outputs_at="global_mean").save(path)
    assert "--out should be a .csv file" in complaint(*arguments)
    DiffusionNet.load(room / "run" / "last.pt").save(path)  # a run of the command line, as one small file
    output(*arguments)
    np.testing.assert_array_equal(read_ply(tmp_path / "m0.ply")[3], expected_labels(room, "m0.obj"))


def expected_labels(room: Path, name: str) -> np.ndarray:
    network = DiffusionNet.load(room / "run" / "last.pt")
    return predict_labels([room / "data" / name], network, torch.device("cpu"))[0][1]


def test_a_point_cloud_is_predicted(room: Path, tmp_path: Path) -> None:
    cloud = tmp_path / "cloud.ply"
    trimesh.PointCloud(trimesh.creation.icosphere(2).vertices).export(cloud)
    out = tmp_path / "out.ply"
    files = ["--out", out, "--html", tmp_path / "a.html", "--png", tmp_path / "a.png"]
    output("predict", cloud, "--checkpoint", room / "run" / "best.pt", *files)
    verts, _, _, labels = read_ply(out)
    assert len(verts) == len(labels) == 162
    assert (labels == (verts[:, 2] > 0)).mean() > 0.9
    DiffusionNet.load(room / "run" / "best.pt", outputs_at="edges").save(tmp_path / "edges.safetensors")
    line = complaint("predict", cloud, "--checkpoint", tmp_path / "edges.safetensors", "--out", out)
    assert "the network labels edges, and a point cloud has none" in line


# ---- precompute and info ----


def test_precompute(tmp_path: Path) -> None:
    data = write_balls(tmp_path / "data" / "deep", 3)
    (data / "bad.off").write_text("OFF\n1 1 0\n0 0 0\n3 0 1 2\n")
    (data / ".hidden.off").write_text("not for us")
    ball = tmp_path / "BALL.STL"
    trimesh.creation.icosphere(1).export(ball, file_type="stl")
    cache = tmp_path / "cache"
    meshes = [tmp_path / "data", ball, tmp_path / "missing.ply"]
    arguments = ["precompute", *meshes, "--cache", cache, "--k", 8, "--jobs", 1]
    written = {}
    for _ in range(2):
        code, out, err = diffnet(*arguments)
        assert code == 1
        assert f"4 of 6 meshes are in {cache}" in out.replace("\n", " ")
        assert len(err.splitlines()) == 2
        assert all(line.startswith("diffnet: ") for line in err.splitlines())
        assert "bad.off" in err
        assert "missing.ply: no such file" in err
        found = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
        assert sum(".operators." in path.name for path in found) == 4
        assert not written or found == written
        written = found
    # Training finds every entry in the cache.
    (data / "bad.off").unlink()
    for features in ("hks", "xyz"):
        train = ["train", "segmentation", "--data", data, "--out", tmp_path / features, "--cache", cache, "--epochs", 1]
        output(*train, *SMALL, "--features", features)
    found = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    of_training = {path for path in found if any(kind in path.name for kind in (".sample.", ".facts.", ".index."))}
    assert {path: changed for path, changed in found.items() if path not in of_training} == written
    written = found
    # Prediction finds the same entries.
    output("predict", ball, "--checkpoint", tmp_path / "hks" / "last.pt", "--out", tmp_path / "a.ply", "--cache", cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == written
    assert (tmp_path / "a.ply").exists()


def test_precompute_finds_every_format(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(1)
    for name in ("a.off", "b.obj", "c.PLY", "d.stl", "e.glb"):
        data = (
            trimesh.Scene(ball).export(file_type="glb") if name == "e.glb" else ball.export(file_type=name[2:].lower())
        )
        data = data.encode() if isinstance(data, str) else data
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    (tmp_path / "notes.txt.gz").write_bytes(b"")
    out = output("precompute", tmp_path, "--cache", tmp_path / "cache", "--k", 4, "--jobs", 1)
    assert "10 of 10 meshes" in out
    assert re.search(r"vertices +42", output("info", tmp_path / "e.glb.gz"))


def test_precompute_with_nothing_to_do(tmp_path: Path) -> None:
    assert str(tmp_path) in complaint("precompute", tmp_path, "--cache", tmp_path / "cache")
    file = tmp_path / "file"
    file.write_text("")
    ball = tmp_path / "ball.off"
    trimesh.creation.icosphere(1).export(ball)
    assert str(file) in complaint("precompute", ball, "--cache", file, "--jobs", 1)
    out = output("precompute", ball, ball, "--cache", tmp_path / "c", "--k", 8, "--jobs", 1)
    assert "1 of 1" in out


def test_info(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(2)
    ball.export(tmp_path / "ball.ply")
    out = output("info", tmp_path / "ball.ply")
    for row in ("triangle mesh", r"vertices +162", r"faces +320", r"edges +480, 0", r"Euler characteristic +2\b"):
        assert re.search(row, out), row
    assert "no faults found" in out

    faces = np.concatenate([ball.faces, ball.faces[:1], [[0, 1, 1]]])
    verts = np.concatenate([ball.vertices, [[9, 9, 9]]])
    rows = [f"v {x} {y} {z}" for x, y, z in verts] + [f"f {a} {b} {c}" for a, b, c in faces + 1]
    (tmp_path / "broken.obj").write_text("\n".join(rows) + "\n")
    out = output("info", tmp_path / "broken.obj")
    for fault in ("duplicate faces", "faces with a repeated corner", "vertices that no face uses"):
        assert f"{fault}: 1\n" in out
    assert "three or more" in out
    assert "no faults found" not in out

    trimesh.PointCloud(ball.vertices).export(tmp_path / "cloud.ply")
    out = output("info", tmp_path / "cloud.ply")
    assert "point cloud" in out
    assert "faces" not in out

    for name in ("garbage.off", "garbage.obj", "garbage.ply", "garbage.stl", "garbage.txt"):
        (tmp_path / name).write_bytes(b"\x00\xffgarbage\n\n\x01")
        assert name in complaint("info", tmp_path / name)
    assert complaint("info", tmp_path / "missing.off") == f"{tmp_path / 'missing.off'}: no such file"


# ---- built-in sets ----


def test_the_built_in_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    shared = ["--data", "bodies", "--cache", tmp_path / "c", "--jobs", 1, "--device", "cpu"]
    text = output("train", "segmentation", "--out", out, *shared, *SMALL, "--epochs", 1, "--outputs-at", "vertices")
    assert "meshes: 24 to train on, 8 to test on" in text
    assert "classes: 8 at the vertices" in text
    assert load_checkpoint(out / "last.pt")["label_names"][0] == "head"
    text = output("evaluate", "--checkpoint", out / "last.pt", *shared, "--out", "scores")
    assert "8 meshes to score" in text
    first, second = (results_of(folder) for folder in (out, tmp_path / "scores"))
    assert first["test_accuracy"] == pytest.approx(second["test_accuracy"], abs=0.002)
    line = complaint("evaluate", "--checkpoint", out / "last.pt", "--data", "shapes", "--out", "b")
    assert "shapes: no such file or folder; bodies is the built-in set of segmentation" in line
    output("precompute", "bodies", "--task", "segmentation", "--write-shards", "shards", "--k", 8, "--cache", "c")
    assert len(load_dataset("shards").train) == 24
    # A folder of the same name isn't taken for the set, nor the set for the folder.
    shutil.copytree(BODIES, "bodies")
    line = complaint("evaluate", "--checkpoint", out / "last.pt", *shared, "--out", "b")
    assert "bodies is the built-in set of segmentation, and also a folder here; for the folder, give ./bodies" in line
    assert find_data("./bodies", "segmentation") == "./bodies"


def test_the_generated_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation takes the seed of the training. A network that doesn't record it is scored on the set of seed 0."""
    seeds: list[int] = []

    def few(*, train: int = 1, seed: int) -> LabeledMeshes:
        seeds.append(seed)
        return shapes(classes=2, train=train, test=1, seed=seed)

    monkeypatch.setattr("diffnet.train.tasks.classification.shapes", few)
    run, unknown = tmp_path / "run" / "last.pt", tmp_path / "no_seed.safetensors"
    shared = ["--data", "shapes", "--cache", tmp_path / "c", "--jobs", 1, "--device", "cpu"]
    output("train", "classification", "--out", run.parent, *shared, *SMALL, "--epochs", 1, "--seed", 3)
    network = DiffusionNet.load(run)
    del network.metadata["seed"]
    network.save(unknown)
    assert "does not record" not in output("evaluate", "--checkpoint", run, *shared, "--out", tmp_path / "a")
    text = diffnet("evaluate", "--checkpoint", unknown, *shared, "--out", tmp_path / "b")[1]
    assert "does not record the seed of its training" in text
    assert seeds == [3, 3, 0]


def test_the_seed_decides_the_split(tmp_path: Path) -> None:
    data = write_balls(tmp_path / "data")
    tested = {seed: load_dataset(data, seed=seed).test[0].name for seed in range(9)}
    seed = next(seed for seed in tested if tested[seed] != tested[0])
    out = tmp_path / "run"
    train = ["train", "segmentation", "--data", data, "--out", out, "--cache", tmp_path / "c", "--epochs", 1]
    output(*train, *SMALL, "--seed", seed)
    page = (out / "predictions.html").read_text()
    assert [name for name in (f"m{i}" for i in range(5)) if f"<h3>{name} " in page] == [tested[seed]]


# ---- Ctrl-C ----

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def test_ctrl_c_stops_a_run(train: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(history: list[Row], score: str) -> str:
        if len(history) == 2:
            signal.raise_signal(signal.SIGINT)
        return as_csv(history, score)

    monkeypatch.setattr("diffnet.train.loop.as_csv", interrupt)
    out = tmp_path / "run"
    code, text, err = diffnet(*train, *SMALL)
    assert (code, err) == (130, "")
    assert f"Stopped. {out / 'last.pt'} holds the last complete epoch; --resume continues from it." in text
    assert len(load_checkpoint(out / "last.pt")["history"]) == 2
    assert not (out / "run.lock").exists()


@posix
def test_sigterm_stops_a_run_that_can_be_resumed(room: Path, train: list[object], tmp_path: Path) -> None:
    out, train = tmp_path / "run", [*train, *SMALL]
    with (tmp_path / "err").open("w") as stderr:
        process = start(*train, "--epochs", 1_000_000, options=["-Ximporttime"], stderr=stderr)
    try:
        wait_for((out / "metrics.csv").exists)
        os.killpg(process.pid, signal.SIGTERM)
        text, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    lines = (tmp_path / "err").read_text().splitlines()
    assert process.returncode == 143
    assert "--resume" in text
    assert str(out / "last.pt") in text
    assert all(line.startswith("import time:") for line in lines)
    # PyTorch's compiler and SymPy take seconds to import. Matplotlib is for the report at the end.
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert imported & {"torch", "torch._dynamo", "sympy", "matplotlib", "skimage"} == {"torch"}
    done = len(load_checkpoint(out / "last.pt")["history"])
    assert done >= 1
    assert not (out / "run.lock").exists()
    assert [p.name for p in out.iterdir() if p.suffix == ".tmp"] == []
    leftover = out / f".last.pt.{process.pid}.tmp"  # as after `kill -9`
    leftover.touch()
    mesh = room / "data" / "m0.obj"
    output("predict", mesh, "--checkpoint", out / "last.pt", "--out", tmp_path / "a.ply")
    # The same command resumes the run. Here it has fewer epochs.
    output(*train, "--epochs", done + 2, "--resume")
    assert not leftover.exists()
    assert len((out / "metrics.csv").read_text().splitlines()) == done + 3
    assert results_of(out)["judged_epoch"] == done + 2


def workers(group: int) -> list[int]:
    """The worker processes of a process group and the process that forks them, from /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == group and b"forkserver" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@posix
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["starting", "working"])
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_preprocessing(tmp_path: Path, moment: str, ending: signal.Signals, code: int) -> None:
    """A signal during the imports, and during the computation, leaves no traceback and no process."""
    for i in range(3):
        ball = trimesh.creation.icosphere(6)  # large enough to be unfinished at the interrupt
        ball.vertices *= np.random.default_rng(i).uniform(0.6, 1.4, 3)
        ball.export(tmp_path / f"{i}.off")
    trimesh.creation.icosphere(1).export(tmp_path / "00.off")
    cache = tmp_path / "cache"
    process = start("precompute", tmp_path, "--cache", cache, "--jobs", 2)
    try:
        wait_for(lambda: len(workers(process.pid)) == (1 if moment == "starting" else 3))
        if moment == "working":
            wait_for(lambda: list(cache.rglob("*.operators.*")))
        # A terminal signals all processes. Workers ignore the signal, because the parent stops them.
        before = workers(process.pid)
        for worker in before:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.3)
        assert set(before) <= set(workers(process.pid))
        os.killpg(process.pid, ending)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code
        assert err.strip() == ""
        deadline = time.monotonic() + 10
        while group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_lives(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def precompute_with(script: Path) -> None:
    sys.argv = ["diffnet", "precompute", "0.off", "1.off", "--cache", "cache", "--k", "4", "--jobs", "2"]
    runpy.run_path(str(script), run_name="__main__")


def test_workers_import_the_command_line_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Worker processes import the script that starts them. PyTorch would take each of them seconds to import."""
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        trimesh.creation.icosphere(1, radius=1 + i).export(tmp_path / f"{i}.off")
    script = tmp_path / "diffnet"
    script.write_text(
        "import sys\n"
        "from diffnet.__main__ import main\n"
        "open('imported', 'a').write(f\"{__name__} {'torch' in sys.modules}\\n\")\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert ends_of_copies(precompute_with, [(script,)]) == [0]
    assert "2 of 2 meshes" in capfd.readouterr().out
    first, *workers = (tmp_path / "imported").read_text().splitlines()
    assert first.startswith("__main__ ")
    assert set(workers) == {"__mp_main__ False"}
