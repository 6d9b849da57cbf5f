"""The programs in examples/ run, learn something, and stay short."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from command import output
from copies import ends_of_copies, forget
from rooms import ROOT
from two_ranks import environment, free_port

from diffnet import DiffusionNet, viz
from diffnet.train import predict_labels

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
EXPORTED = ROOT / "examples" / "exported_network.py"
LINES = 40


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random numbers repeat, and the programs write their caches to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that calls `main` of a program and returns the line that it prints."""

    def run(name: str, *args: Any, **options: Any) -> str:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](*args, **options)
        printed = capsys.readouterr().out
        assert printed.count("\n") == 1, printed
        return printed.rstrip()

    return run


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers at the places of N in a pattern that the whole text should match."""
    match = re.fullmatch(re.escape(pattern).replace("N", r"(-?[\d.]+(?:e[+-]\d+)?)"), text)
    assert match, text
    return [float(number) for number in match.groups()]


def program_lines(path: Path) -> int:
    """The lines of a program that are neither blank nor part of a docstring."""
    text = path.read_text()
    documented = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = [n.body[0] for n in documented if ast.get_docstring(n) is not None]
    inside = {i for node in docstrings for i in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sum(bool(code.strip()) and i not in inside for i, code in enumerate(text.splitlines(), 1))


def test_short() -> None:
    assert PROGRAMS
    assert {p.stem: n for p in PROGRAMS if (n := program_lines(p)) > LINES} == {}


def test_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"\[`(\w+)\.py`\]\(\1\.py\)", page) == re.findall(r"\[`(\w+)\.py`\]", page)
    assert sorted(re.findall(r"\[`(\w+)\.py`\]", page)) == [p.stem for p in PROGRAMS]


@pytest.mark.parametrize(("features", "epochs"), [("xyz", 40), ("hks", 10)])
def test_human_segmentation(line: Any, tmp_path: Path, features: str, epochs: int) -> None:
    """On a folder with labels at the faces: the tips of ellipsoids of several lengths."""
    folder = tmp_path / "ellipsoids"
    folder.mkdir()
    for i in range(5):
        mesh = trimesh.creation.icosphere(2).apply_transform(np.diag([1.0, 1.0, 2 + i / 4, 1.0]))
        mesh.export(folder / f"{i}.obj")
        np.savetxt(folder / f"{i}.txt", abs(mesh.triangles_center[:, 2]) > 1, fmt="%d")
    pattern = "test accuracy N at N faces"
    accuracy, faces = numbers(pattern, line("human_segmentation", str(folder), features, epochs=epochs, k=16, width=64))
    assert accuracy > 0.75  # the more frequent label has at most 0.67
    assert faces == 320


@pytest.mark.slow
def test_human_segmentation_of_bodies(line: Any) -> None:
    accuracy, faces = numbers("test accuracy N at N faces", line("human_segmentation"))
    assert accuracy > 0.8
    assert faces > 10_000


# The arguments of a program, what it prints, and what holds for the numbers.
RESULTS: dict[str, tuple[dict[str, int], str, Callable[..., bool]]] = {
    "classification": ({}, "test accuracy N of 3 shapes", lambda accuracy: accuracy == 1),
    "siamese": ({"steps": 15, "k": 16}, "mean cosine N of equal kinds, N of others", lambda a, b: a > 0.5 > b),
    "own_normals": (
        {},
        "mean cosine to the own normals N, training loss N",
        lambda cosine, loss: cosine == 1 and loss < np.log(2),  # to three decimals
    ),
    "own_network": ({"steps": 10, "k": 16}, "training accuracy N", lambda accuracy: accuracy > 1 / 4),
    "pytorch_geometric": ({"epochs": 5}, "accuracy N in the last batch", lambda accuracy: accuracy == 1),
    "original_network": ({}, "outputs up to N differ by N", lambda largest, error: error < 1e-5 * largest),
    "sparse_matrices": (
        {},
        "squared error N of the mean of the neighbors, N with attention",
        lambda mean, attention: attention < 0.8 * mean,
    ),
    "sparse_transformer": ({}, "accuracy N, without learning N", lambda a, without: a > without + 0.1),
    "functional_maps": (
        {"steps": 8},
        "mean geodesic error N between N vertices",
        lambda error, vertices: error < 0.1 and vertices == 642,  # random matches have 0.8
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_numbers(line: Any, name: str) -> None:
    arguments, pattern, holds = RESULTS[name]
    found = numbers(pattern, line(name, **arguments))
    assert holds(*found), found


def test_fitted_surface(line: Any) -> None:
    pattern = "distance of the points N, area N; the box has N"
    first, last = (numbers(pattern, line("fitted_surface", steps=steps)) for steps in (1, 25))
    assert last[0] < first[0] / 2
    assert abs(last[1] - last[2]) < abs(first[1] - first[2])


def test_lower_drag(line: Any) -> None:
    """The sphere has the drag π, up to its triangles."""
    pattern = "drag N of the sphere, N of the new surface, predicted N"
    before, after, predicted = numbers(pattern, line("lower_drag", steps=40, changes=12))
    assert 0.9 * np.pi < before < np.pi
    assert after < 0.6 * before
    assert abs(predicted - after) < before / 4


def test_own_laplacian(line: Any) -> None:
    printed = line("own_laplacian").removesuffix("(2048, 4)")
    (difference,) = numbers("eigenvalues differ by N of the largest; outputs at faces ", printed)
    assert difference < 1e-5


def test_save_and_predict(line: Any, tmp_path: Path) -> None:
    printed = line("save_and_predict", str(tmp_path)).removesuffix(f", see {tmp_path / 'labels.ply'}")
    (accuracy,) = numbers("accuracy N", printed)
    assert accuracy > 0.9
    assert DiffusionNet.load(tmp_path / "model.safetensors").metadata["label_names"] == ["middle", "tip"]
    assert len(trimesh.load(tmp_path / "labels.ply").vertices) == 642


def run_exported_network() -> None:
    forget("diffnet")
    sys.modules["diffnet"] = None  # type: ignore[assignment]  # importing it raises ImportError
    sys.argv = ["", "net.pt2", "mesh.npz"]
    runpy.run_path(str(EXPORTED), run_name="__main__")


def test_exported_network(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process that can't import diffnet."""
    trimesh.creation.icosphere(2).export(tmp_path / "mesh.ply")
    checkpoint = tmp_path / "net.safetensors"
    DiffusionNet(3, 2, width=8, blocks=1).save(checkpoint, features="xyz", k=8, normalize=True, label_names=["a", "b"])
    output("export", "--checkpoint", checkpoint, "--out", tmp_path / "net.pt2")
    output("precompute", tmp_path / "mesh.ply", "--npz", tmp_path / "mesh.npz", "--checkpoint", checkpoint)
    assert ends_of_copies(run_exported_network, [()]) == [0]
    assert sum(numbers("a N, b N", capfd.readouterr().out.strip())) == 162


@pytest.mark.slow
def test_exported_network_without_arguments(tmp_path: Path) -> None:
    """The network of body parts finds each part in a built-in body."""
    ran = subprocess.run([sys.executable, EXPORTED], env=environment(), capture_output=True, text=True, check=True)
    parts = DiffusionNet.from_pretrained("body-parts").metadata["label_names"]
    assert min(numbers(", ".join(f"{name} N" for name in parts), ran.stdout.strip())) > 50


def test_viewing(line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viz, "picture", partial(viz.picture, size=(250, 250)))
    assert line("viewing", str(tmp_path)) == f"wrote signs.png, view.html, wave.ply, wave.png to {tmp_path}"
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_large_data(line: Any) -> None:
    pattern = "test accuracy N after N epochs of N batches"
    accuracy, epochs, batches = numbers(pattern, line("large_data", epochs=4, k=8, max_vertices=1200, workers=0))
    assert accuracy > 0.5
    assert (epochs, batches > 10) == (4, True)


def test_with_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning prints, too."""
    runpy.run_path(str(ROOT / "examples" / "with_lightning.py"))["main"](epochs=3, meshes=4, k=8)
    (accuracy,) = numbers("test accuracy N", capsys.readouterr().out.splitlines()[-1])
    assert accuracy > 1 / 8


def test_prediction_server(tmp_path: Path, sphere: trimesh.Trimesh) -> None:
    file = tmp_path / "model.safetensors"
    DiffusionNet(3, 2, width=8, blocks=1).save(file, features="xyz", k=8, normalize=True, label_names=["a", "b"])
    serve = runpy.run_path(str(ROOT / "examples" / "prediction_server.py"))["server"]
    with serve(tmp_path, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def answer(path: str, content: bytes, size: int | None = None) -> tuple[int, dict[str, Any]]:
            connection = HTTPConnection("localhost", server.server_port, timeout=60)
            connection.request("POST", path, content, {"Content-Length": str(len(content) if size is None else size)})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

        status, found = answer("/scan.off", sphere.export(file_type="off").encode())
        assert (status, found["label_names"]) == (200, ["a", "b"])
        sphere.export(tmp_path / "scan.off")
        assert found["labels"] == predict_labels([tmp_path / "scan.off"], DiffusionNet.load(file), "cpu")[0][1].tolist()
        for arguments, expected, message in (
            (("/scan.off", b"no mesh"), 400, "mesh.off"),
            (("/scan.abc", b"no mesh"), 400, ".abc"),
            (("/scan.off", b"no mesh", 10**9), 413, "got 1000000000"),
        ):
            status, found = answer(*arguments)
            assert status == expected
            assert message in found["error"]
        server.shutdown()


@pytest.mark.parametrize("name", ["many_gpus", "many_gpus_step"])
def test_many_gpus(line: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One process. The programs are run in two by hand, because that takes long."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for variable, value in place.items():
        monkeypatch.setenv(variable, str(value))
    what = "the last share of rank 0" if name == "many_gpus" else "the last batch"
    first, last = (numbers(f"loss N of {what}", line(name, epochs=n, meshes=4, k=8))[0] for n in (1, 12))
    assert last < first


@pytest.mark.slow
def test_own_dataset_as_a_script(tmp_path: Path) -> None:
    """In a process of its own, because worker processes import the script."""
    printed = subprocess.check_output([sys.executable, ROOT / "examples" / "own_dataset.py"], cwd=tmp_path, text=True)
    accuracy, *_ = numbers("test accuracy N after N epochs of N batches", printed.rstrip())
    assert accuracy > 0.8
