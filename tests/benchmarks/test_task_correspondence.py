"""The measurements of correspondence: the peers of a step compute the same, and rotated sets keep their truth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from diffnet.benchmarks import Options
from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.loops.pair_step import pair_step
from diffnet.benchmarks.tasks import correspondence
from diffnet.data import MeshPairs, PairShape, load_pairs
from diffnet.geometry import closest_points, make_mesh

pytestmark = pytest.mark.usefixtures("one_thread")


def test_peers_of_a_step_have_the_same_loss() -> None:
    (case,) = pair_step(Options(torch.device("cpu"), vertices=(60,), widths=(8,), k=6, dtypes=("fp32",)))
    losses = []
    for name in ("diffnet", "diffnet-eager", "published"):
        torch.manual_seed(0)  # a peer makes its network in its first call
        run = case.peers[name]
        losses.append([float(run().detach()) for _ in range(3)])  # type: ignore[arg-type]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-2)


def small_set() -> MeshPairs:
    """Two stretched balls with points of a template in their faces, for training and for testing."""
    ball = trimesh.creation.icosphere(1)
    shapes = []
    for i in range(4):
        mesh = make_mesh(ball.vertices * [1, 1 + 0.1 * i, 1.5], ball.faces)
        shapes.append(PairShape(f"m{i}", mesh, closest_points(mesh, mesh.verts)))
    return MeshPairs(shapes[:2], shapes[2:], [(0, 1)], [(0, 1)], template_faces=shapes[0].mesh.faces)


def test_figures_are_written_upright_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_set()
    monkeypatch.setattr(correspondence, "figure_pairs", lambda *arguments, **options: data)
    upright, turned = (load_pairs(folder) for folder in correspondence.write_figures(tmp_path, 2, 2))
    for one, other in zip(upright.test, turned.test, strict=True):
        assert np.abs(one.mesh.verts - other.mesh.verts).max() > 0.1
        np.testing.assert_allclose(
            np.linalg.norm(one.mesh.verts - one.mesh.verts[0], axis=1),
            np.linalg.norm(other.mesh.verts - other.mesh.verts[0], axis=1),
            atol=1e-6,
        )
    places = []
    for data in (upright, turned):
        mesh, truth = data.test[1].mesh, data.truth(*data.test)
        places.append(truth.points.interpolate(mesh.faces, mesh.verts))
    np.testing.assert_allclose(np.linalg.norm(places[0], axis=1), np.linalg.norm(places[1], axis=1), atol=1e-3)


def test_the_table_has_a_line_for_each_row_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correspondence, "figure_pairs", lambda *arguments, **options: small_set())
    asked = []

    def run(command: list[str], check: bool) -> None:
        assert check
        asked.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        content = {
            "mean_error_x100": 1.5,
            "floor": 0.006,
            "unflipped_mean_error": 0.01,
            "flipped_pairs": 2,
            "auc": 0.9,
            "test_pairs": 1,
            "train_pairs": 1,
            "preprocessing_seconds": 1.0,
            "training_seconds": 2.0,
            "options": {"epochs": 3},
        }
        (out / "results.json").write_text(json.dumps(content))

    monkeypatch.setattr("subprocess.run", run)
    correspondence.main(["--out", str(tmp_path), "--seeds", "0", "1", "--epochs", "3"])
    rows = read_csv(tmp_path / "correspondence.csv")
    assert [(row["row"], row["seed"]) for row in rows] == [
        (name, seed) for name in correspondence.ROWS for seed in "01"
    ]
    assert all(row["floor_x100"] == "0.6" and row["zoomout_x100"] == "1.5" and row["epochs"] == "3" for row in rows)
    turned = [any(word.endswith("turned") for word in command) for command in asked]
    assert turned == [False] * 8 + [True] * 4
    for trained, evaluated in zip(asked[0::2], asked[1::2], strict=True):
        assert trained[3:5] == ["train", "correspondence"]
        assert trained[-2:] == ["--epochs", "3"]
        assert evaluated[3] == "evaluate"
        assert evaluated[-1] == "--zoomout"
