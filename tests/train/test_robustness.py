"""The changes of meshes behind docs/robustness.md, the command `diffnet robustness`, and the page itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from command import complaint, output
from runs import results_of, untrained

from diffnet import DiffusionNet
from diffnet.benchmarks.tables import robustness_table
from diffnet.data import LabeledMesh
from diffnet.geometry import Mesh, diagnose, load_mesh, make_mesh, mesh_edges
from diffnet.train.checkpoint import save_checkpoint
from diffnet.train.inference import mesh_changes as changes
from diffnet.train.inference.mesh_changes import CHANGES, LOST
from diffnet.train.options import TrainOptions
from diffnet.train.run_checks import DIGITS, contents_of

pytestmark = pytest.mark.usefixtures("one_thread")


def egg(subdivisions: int = 2) -> Mesh:
    """A closed surface with two unequal halves, off the origin, and a last vertex that no face uses."""
    sphere = trimesh.creation.icosphere(subdivisions=subdivisions)
    verts = np.array(sphere.vertices) * [1, 2, 3] + [0.5, 0, 4]
    return make_mesh(np.concatenate([verts, [[0, 0, 9]]]), np.array(sphere.faces), name="egg")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def volume(mesh: Mesh) -> float:
    """The enclosed volume. It is negative if the normals point inward."""
    return float(trimesh.Trimesh(mesh.verts, mesh.faces, process=False).volume)


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_reproducible_and_leaves_the_mesh_alone(name: str) -> None:
    mesh = egg()
    verts, faces = mesh.verts.copy(), mesh.faces.copy()
    first, stand_ins = CHANGES[name](mesh, np.random.default_rng(7))
    second, again = CHANGES[name](mesh, np.random.default_rng(7))
    pairs = ((mesh.verts, verts), (mesh.faces, faces), (first.verts, second.verts), (first.faces, second.faces))
    for one, other in (*pairs, (stand_ins, again)):
        np.testing.assert_array_equal(one, other)
    assert stand_ins.shape == (len(verts),)
    assert stand_ins.min() >= LOST
    assert stand_ins.max() < len(first.verts)
    assert first.name == "egg"
    assert not (first.verts.shape == verts.shape and (first.verts == verts).all() and first.faces.shape == faces.shape)


def test_scaling_rotation_and_mirroring_keep_the_shape(rng: np.random.Generator) -> None:
    mesh = egg()
    pairs = rng.integers(len(mesh.verts), size=(2, 100))

    def distances(x: Mesh) -> np.ndarray:
        return np.linalg.norm(x.verts[pairs[0]] - x.verts[pairs[1]], axis=1)

    names = {100.0: "scaled by 100", 0.01: "scaled by 0.01", 1.0: "rotated", -1.0: "mirrored"}
    moved = {factor: CHANGES[name](mesh, rng) for factor, name in names.items()}
    for factor, (changed, stand_ins) in moved.items():
        np.testing.assert_allclose(distances(changed), abs(factor) * distances(mesh))
        assert volume(changed) == pytest.approx(abs(factor) ** 3 * volume(mesh))
        np.testing.assert_array_equal(stand_ins, np.arange(len(mesh.verts)))
    assert (moved[-1.0][0].verts[:, 0] == -mesh.verts[:, 0]).all()
    assert np.abs(changes.rotated(mesh, rng)[0].verts - moved[1.0][0].verts).max() > 0.1  # proper: volumes are kept


def test_renumbering_keeps_the_geometry(rng: np.random.Generator) -> None:
    mesh = egg()
    changed, stand_ins = changes.renumbered(mesh, rng)
    np.testing.assert_array_equal(changed.verts[stand_ins], mesh.verts)
    assert (stand_ins != np.arange(len(stand_ins))).mean() > 0.9

    def triangles(faces: np.ndarray) -> set[tuple[int, ...]]:
        """The faces, each with its smallest index first."""
        return {tuple(np.roll(face, -face.argmin()).tolist()) for face in faces}

    assert triangles(stand_ins[mesh.faces]) == triangles(changed.faces)
    assert (stand_ins[mesh.faces] != changed.faces).any(axis=1).mean() > 0.9


def test_subdivision(rng: np.random.Generator) -> None:
    mesh = egg()
    changed, stand_ins = changes.subdivided(mesh)
    assert len(changed.faces) == 4 * len(mesh.faces)
    assert len(changed.verts) == len(mesh.verts) + len(mesh_edges(mesh.faces))
    np.testing.assert_array_equal(changed.verts[stand_ins], mesh.verts)
    assert volume(changed) == pytest.approx(volume(mesh))


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_decimation(share: float) -> None:
    mesh = egg(3)
    changed, stand_ins = changes.decimated(mesh, share)
    assert len(changed.faces) == pytest.approx(share * len(mesh.faces), rel=0.02)
    assert volume(changed) == pytest.approx(volume(mesh), rel=0.02)
    distances = np.linalg.norm(changed.verts[:, None] - mesh.verts, axis=2)
    np.testing.assert_array_equal(stand_ins, distances.argmin(axis=0))


def test_point_clouds(rng: np.random.Generator) -> None:
    mesh = egg()
    vertices, same = CHANGES["point cloud of the vertices"](mesh, rng)
    assert vertices.is_point_cloud
    np.testing.assert_array_equal(vertices.verts[same], mesh.verts)
    points, nearest = changes.sampled(mesh, rng)
    assert points.is_point_cloud
    assert points.verts.shape == mesh.verts.shape
    closest, gaps, _ = trimesh.proximity.closest_point_naive(
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False), points.verts
    )
    np.testing.assert_allclose(closest, points.verts, atol=1e-9)
    assert gaps.max() < 1e-9
    distances = np.linalg.norm(points.verts[:, None] - mesh.verts, axis=2)
    np.testing.assert_array_equal(nearest, distances.argmin(axis=0))


def test_noise_is_relative_to_the_edges(rng: np.random.Generator) -> None:
    mesh = egg(3)
    edges = mesh_edges(mesh.faces)
    length = np.linalg.norm(mesh.verts[edges[:, 0]] - mesh.verts[edges[:, 1]], axis=1).mean()
    changed, _ = changes.noisy(mesh, rng, 0.5)
    assert (changed.verts - mesh.verts).std() == pytest.approx(0.5 * length, rel=0.1)
    np.testing.assert_array_equal(changed.faces, mesh.faces)


def test_missing_faces(rng: np.random.Generator) -> None:
    mesh = egg()
    changed, stand_ins = changes.with_missing_faces(mesh, rng, 0.2)
    assert len(changed.faces) == round(0.8 * len(mesh.faces))
    assert {tuple(face) for face in changed.faces.tolist()} < {tuple(face) for face in mesh.faces.tolist()}
    np.testing.assert_array_equal(changed.verts[stand_ins], mesh.verts)


def test_a_part_is_cut_off() -> None:
    mesh = egg(3)
    changed, stand_ins = changes.cut(mesh, 0.3)
    there = stand_ins != LOST
    np.testing.assert_array_equal(changed.verts[stand_ins[there]], mesh.verts[there])
    assert there.mean() == pytest.approx(0.7, abs=0.01)
    assert mesh.verts[~there][:-1, 2].max() <= mesh.verts[there, 2].min()
    assert not there[-1]  # no face uses it
    found = diagnose(changed)
    assert (found.components, found.vertices) == (1, len(np.unique(changed.faces)))


def test_soup() -> None:
    mesh = egg()
    changed, stand_ins = changes.soup(mesh)
    assert changed.faces.tolist() == np.arange(3 * len(mesh.faces)).reshape(-1, 3).tolist()
    np.testing.assert_array_equal(changed.verts[changed.faces], mesh.verts[mesh.faces])
    np.testing.assert_array_equal(changed.verts[stand_ins[:-1]], mesh.verts[:-1])
    assert stand_ins[-1] == LOST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of three small meshes with two classes: below and above the center."""
    data = tmp_path / "data"
    for part in ("train", "test"):
        (data / part).mkdir(parents=True)
    for i, path in enumerate(("train/a", "test/b", "test/c")):
        mesh = egg(1 + i % 2)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(data / f"{path}.off")
        np.savetxt(data / f"{path}.txt", mesh.verts[:, 2] > 4, fmt="%d")
    return data


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes an untrained network of two classes."""

    def write(
        *, at: str = "vertices", names: tuple[str, ...] = ("0", "1"), seen: Sequence[str] = (), **options: Any
    ) -> Path:
        chosen = TrainOptions(**{"features": "hks", "k": 8, "width": 8, "blocks": 1, **options})
        save_checkpoint(tmp_path / "last.pt", untrained(chosen, names, at) | {"train_meshes": list(seen)})
        return tmp_path / "last.pt"

    return write


def test_the_command(folder: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["scaled by 100", "renumbered", "mirrored", "decimated to 50 % of the faces"]
    chosen += ["30 % of the vertices cut off"]
    measured = {name: CHANGES[name] for name in chosen} | {
        "one point": lambda mesh, rng: (replace(mesh, verts=0 * mesh.verts), None)
    }
    monkeypatch.setattr("diffnet.train.inference.robustness.CHANGES", measured)
    out = folder / "out"
    shown = output("robustness", "--checkpoint", checkpoint(), "--data", folder, "--out", out, "--device", "cpu")
    results = results_of(out)
    rows = {row["change"]: row for row in results["rows"]}
    assert list(rows) == [*chosen, "one point"]
    for name in ("scaled by 100", "renumbered"):
        assert rows[name]["kept"] > 0.99
        assert rows[name]["accuracy_before"] == results["accuracy"]
        assert rows[name]["accuracy"] == pytest.approx(results["accuracy"], abs=0.01)
    part = rows["30 % of the vertices cut off"]
    assert 0 <= part["kept"] <= 1
    assert part["accuracy_before"] != results["accuracy"]  # it is about the vertices that are left
    assert "2 of 2 meshes can't be used" in rows["one point"]["error"]
    assert rows["one point"]["kept"] is None
    assert results["test_meshes"] == 2
    assert results["options"]["width"] == 8
    assert all(name in shown for name in rows)
    assert "not measured: 2 of 2 meshes can't be used" in robustness_table(results)


def test_labels_and_ignored_classes_are_those_of_the_training(
    folder: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffnet.train.inference.robustness.CHANGES", {})
    for file in folder.rglob("*.txt"):
        np.save(file.with_name(f"{file.stem}.half.npy"), 1 - np.loadtxt(file).astype(int))
    arguments = ["robustness", "--device", "cpu", "--data", folder, "--out", folder / "out", "--checkpoint"]
    shares = []
    for options in ({}, {"labels": "file:half"}):
        output(*arguments, checkpoint(**options))
        shares.append(results_of(folder / "out")["accuracy"])
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert "no class" not in output(*arguments, checkpoint(names=("0",), ignore=("1",)))
    assert results_of(folder / "out")["accuracy"] == 1
    (hashes,) = contents_of([LabeledMesh("b", load_mesh(folder / "test" / "b.off"), np.zeros(0))])
    line = complaint(*arguments, checkpoint(seen=[hashes[0][:DIGITS]]))
    assert "the network was trained on b, which would be tested. Give --files and --layout as in its training" in line
    small = ["--k", 8, "--width", 8, "--blocks", 1, "--epochs", 1, "--jobs", 1, "--cache", folder / "cache"]
    output("train", "segmentation", "--data", folder, "--out", folder / "run", "--features", "file:half", *small)
    assert complaint(*arguments, folder / "run").startswith("the network takes own arrays, which changed meshes")


def test_networks_that_do_not_fit(folder: Path, checkpoint: Callable[..., Path]) -> None:
    arguments = ["robustness", "--device", "cpu", "--data", folder, "--out", folder / "out", "--checkpoint"]
    network = checkpoint(names=("a", "b", "c"))
    assert "trained on another data set: it has 3 classes" in complaint(*arguments, network)
    DiffusionNet(16, 2, width=8, blocks=1).save(folder / "own.safetensors", features="hks", k=8, normalize=True)
    assert "should be a checkpoint of diffnet train, got" in complaint(*arguments, folder / "own.safetensors")
    assert "should label vertices, this one labels faces" in complaint(*arguments, checkpoint(at="faces"))
