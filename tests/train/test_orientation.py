"""The orientation of meshes and of own vectors: what a run rotates, targets that turn, and tilted meshes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, output
from jaws import jaw, write_bodies
from runs import TINY, table_of
from shapes import ellipsoid

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, load_targets
from diffnet.data.feature_names import vector_columns
from diffnet.geometry import Mesh, make_mesh, random_rotations
from diffnet.geometry.elements.elements import element_areas
from diffnet.geometry.errors import OptionError
from diffnet.train import predict_labels
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import is_tilted, mesh_axes, rotations_of, shared_axes, upright_axes, warn_of_rotations
from diffnet.train.tasks.regression import TASK as REGRESSION

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

UPRIGHT = [make_mesh(one.verts, one.faces) for one in (jaw(seed, lower=seed % 2 == 1) for seed in range(9))]
EYE, LYING = np.eye(3), np.eye(3)[[1, 2, 0]]
TILTED = "a principal axis is more than 60° from that of the training meshes. The network expects"


def turned(meshes: list[Mesh], axis: int | None) -> list[Mesh]:
    turns = random_rotations(len(meshes), torch.Generator().manual_seed(0), axis=axis).double().numpy()
    return [make_mesh(mesh.verts @ turn, mesh.faces) for mesh, turn in zip(meshes, turns, strict=True)]


def stand_alike(meshes: list[Mesh]) -> bool:
    return bool(shared_axes(torch.stack([mesh_axes(mesh) for mesh in meshes])).any())


def test_axes_turn_with_the_mesh() -> None:
    mesh = ellipsoid(0, 2)
    mesh = make_mesh(np.exp(mesh.verts * [1, 3, 2]), mesh.faces)
    mass = torch.from_numpy(element_areas(mesh, "vertices"))

    def inside(mesh: Mesh) -> torch.Tensor:
        """The vertices around the center, in the axes of the mesh."""
        verts = torch.from_numpy(mesh.verts)
        return (verts - mass @ verts / mass.sum()) @ mesh_axes(mesh).mT

    places = inside(mesh)
    spread = places.mT @ (mass[:, None] * places)
    assert (spread - spread.diagonal().diag()).abs().max() < 1e-9 * spread.max()
    assert spread[0, 0] > spread[1, 1] > spread[2, 2]
    assert mass @ (places[:, 0] * places.square().sum(1)) > 0
    assert mass @ places[:, 2] ** 3 > 0
    for turn in random_rotations(20, torch.Generator().manual_seed(0), torch.float64).numpy():
        other = make_mesh(mesh.verts @ turn + 5, mesh.faces)
        assert torch.linalg.det(mesh_axes(other)) == pytest.approx(1)
        torch.testing.assert_close(inside(other), places)


@pytest.mark.parametrize(
    ("meshes", "expected"),
    [
        (UPRIGHT, True),
        (UPRIGHT[:5], True),
        (turned(UPRIGHT, 2), True),  # they face any direction, but their z is the same
        (turned(UPRIGHT, None), False),
        (UPRIGHT[:3], False),  # too few to tell
    ],
)
def test_shapes_that_stand_alike(meshes: list[Mesh], expected: bool) -> None:
    assert stand_alike(meshes) is expected


@pytest.mark.parametrize(
    ("given", "said", "warned"),
    [
        ({"features": "xyz+normals"}, "xyz and normals rotated at random about any axis, so that", True),
        ({"features": "normals", "rotate": True}, "normals rotated at random about any axis, so that", False),
        ({"features": "xyz", "rotate_about": "z"}, "xyz rotated at random about the z axis, so that", False),
        ({"features": "xyz", "rotate": False}, "", False),
        ({"features": "hks"}, "", False),
    ],
)
def test_what_a_run_says(given: dict[str, Any], said: str, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        items = [LabeledMesh(mesh.name, mesh, np.zeros(len(mesh.verts), np.int64)) for mesh in UPRIGHT]
        warn_of_rotations(items, TrainOptions(**given))
    text = rotations_of(TrainOptions(**given))
    assert text.startswith(said)
    assert bool(text) == bool(said)
    assert ["the training meshes stand alike" in str(each.message) for each in caught] == [True] * warned


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["u_x", "u_y", "u_z", "p"], [["u_x", "u_y", "u_z"]]),
        (["x", "y", "z"], [["x", "y", "z"]]),
        (["F.X", "F.Y", "F.Z"], [["F.X", "F.Y", "F.Z"]]),
        (["u_0", "u_1", "u_2"], [["u_0", "u_1", "u_2"]]),
        (["U3", "U1", "v", "U2"], [["U3", "U1", "U2"]]),
        ([f"stress_{i}" for i in range(6)], []),
        (["u_0", "u_1"], []),
        (["ux", "vy", "wz"], []),
        (["volume", "area", "height"], []),
        (["t_10", "t_11", "t_12"], []),
    ],
)
def test_which_columns_look_like_a_vector(names: list[str], expected: list[list[str]]) -> None:
    assert vector_columns(names) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": "xyz"}, "random rotations in training leave .* alike, add --no-rotate. .* add --scalar-targets"),
        ({"features": "xyz", "rotate_about": "z"}, "random rotations in training leave their values as they are"),
        ({}, r"\+diffused-curvature\+log-hks don't .* add --features xyz\+normals\+log-hks --no-rotate. If they"),
        ({"features": "xyz", "rotate": False, "mirror": True}, "but --mirror leaves their values as they are"),
        ({"features": "hks", "mirror": True}, "but --mirror leaves their values as they are; leave it out"),
        ({"features": "xyz", "rotate": False}, None),
        ({"features": "xyz", "scalar_targets": True}, None),
        ({"scalar_targets": True, "mirror": True}, None),
    ],
)
def test_vectors_that_would_not_turn_with_the_mesh(given: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    write_bodies(tmp_path, 3)
    data, options = load_targets(tmp_path, "file:wind"), TrainOptions(task="regression", **given)
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            REGRESSION.check(data, options)
    else:
        with pytest.raises(OptionError, match=f"^the columns wind_0, wind_1, wind_2 look like a vector, .*{message}"):
            REGRESSION.check(data, options)
    with pytest.warns(UserWarning, match=r"log-hks don't depend on its orientation. Add --features xyz\+normals"):
        REGRESSION.check(data, TrainOptions(task="regression", rotate=False))


def test_columns_with_sides() -> None:
    item = LabeledMesh("", ellipsoid(0), np.zeros((1, 2)))
    data = LabeledMeshes([item], [item], ["left area", "right area"], "meshes")
    with pytest.raises(OptionError, match="the columns left area and right area look like two sides, but --mirror"):
        REGRESSION.check(data, TrainOptions(task="regression", mirror=True))
    REGRESSION.check(data, TrainOptions(task="regression", mirror=True, scalar_targets=True))
    REGRESSION.check(data, TrainOptions(task="regression"))


def test_the_command_refuses_them_before_it_trains(tmp_path: Path) -> None:
    write_bodies(tmp_path / "data", 3)
    run = ["train", "regression", "--data", tmp_path / "data", "--targets", "file:wind", "--features", "xyz", *TINY]
    run += ["--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    assert complaint(*run).startswith("the columns wind_0, wind_1, wind_2 look like a vector")
    assert not (tmp_path / "run").exists()
    assert "xyz rotated at random" in output(*run, "--scalar-targets")


def write_set(root: Path, turn: np.ndarray = EYE) -> Path:
    """14 bodies that stand upright, or turned ones, with a wind and labels of the upper half. Two are for tests."""
    write_bodies(root, 14)
    for i in range(14):
        mesh, wind = root / f"body{i}.ply", root / f"body{i}.wind.npy"
        solid = trimesh.load(mesh, process=False)
        part = root / ("train" if i < 12 else "test")
        part.mkdir(exist_ok=True)
        (part / f"body{i}.txt").write_text("".join(f"{int(z > 0.2)}\n" for z in solid.vertices[:, 2]))
        np.save(part / wind.name, np.load(wind) @ turn)
        trimesh.Trimesh(solid.vertices @ turn, solid.faces, process=False).export(part / mesh.name)
        mesh.unlink()
        wind.unlink()
    return root


@pytest.fixture(scope="module")
def upright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on upright bodies without rotations, and bodies that lie."""
    room = tmp_path_factory.mktemp("upright")
    write_set(room / "standing")
    write_set(room / "lying", LYING)
    train = ["train", "segmentation", "--data", room / "standing", "--features", "xyz", "--no-rotate", *TINY]
    for further in ([], ["--resume"]):
        output(*train, "--out", room / "run", "--cache", room / "cache", *further)
    return room


@contextmanager
def heard() -> Iterator[list[str]]:
    """The texts of the warnings about orientations."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if TILTED in str(each.message)]


def test_meshes_in_another_orientation_are_named(upright: Path, tmp_path: Path) -> None:
    """Once for all, in `predict`, `evaluate` and training, and by the Python functions. Upright meshes are not."""
    common = ["--checkpoint", upright / "run" / "last.pt", "--device", "cpu"]
    for place in ("standing", "lying"):
        test = upright / place / "test"
        evaluate = ["evaluate", *common, "--data", upright / place, "--out", tmp_path / f"e {place}", "--jobs", 1]
        with heard() as texts:
            output("predict", test, *common, "--out", tmp_path / f"p {place}")
            output(*evaluate, "--cache", tmp_path / "cache")
            predict_labels(sorted(test.glob("*.ply")), DiffusionNet.load(upright / "run" / "last.pt"), "cpu")
        both = f"{test / 'body12.ply'}, {test / 'body13.ply'}: {TILTED}"
        assert [both in text for text in texts] == ([] if place == "standing" else [True, False, True])
        assert place == "standing" or texts[1].startswith(f"body12, body13: {TILTED}")
    (upright / "lying" / "train").rename(upright / "lying" / "none")
    (upright / "standing" / "train").rename(upright / "lying" / "train")
    train = ["train", "segmentation", "--data", upright / "lying", "--features", "xyz", *TINY]
    with heard() as texts:
        output(*train, "--no-rotate", "--out", tmp_path / "run", "--cache", tmp_path / "cache")
        output(*train, "--rotate", "--out", tmp_path / "turned", "--cache", tmp_path / "cache")
    assert len(texts) == 1


def upright_of(meshes: list[Mesh], **options: Any) -> tuple[float, ...]:
    items = [LabeledMesh("", mesh, np.zeros(len(mesh.verts), np.int64)) for mesh in meshes]
    return upright_axes(items, TrainOptions(features=options.pop("features", "xyz"), **options))


def test_which_orientation_is_expected() -> None:
    """Axes of jaws have no reliable signs. Rotations about an axis leave this axis, and others leave none.

    Earlier versions stored the first axis alone.
    """
    jaws = [make_mesh(one.verts, one.faces) for one in map(jaw, range(12))]
    quarter = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])
    turned, tipped = (make_mesh(jaws[0].verts @ turn, jaws[0].faces) for turn in (quarter, LYING))
    plain = upright_of(jaws, rotate=False)
    assert [is_tilted(mesh, plain) for mesh in (*jaws, turned, tipped)] == [False] * 12 + [True] * 2
    assert [is_tilted(mesh, plain[:3]) for mesh in (*jaws, turned, tipped)] == [False] * 12 + [True] * 2
    assert not is_tilted(tipped, ())
    about = upright_of(jaws, rotate_about="z")
    assert [is_tilted(mesh, about) for mesh in (*jaws, turned, tipped)] == [False] * 13 + [True]
    for given in ({}, {"features": "hks"}):
        assert upright_of(jaws, **given) == ()
    assert upright_of(jaws[:3], rotate=False) == ()  # too few to tell


def test_a_network_on_own_vectors_labels_turned_meshes_alike(upright: Path, tmp_path: Path) -> None:
    train = ["train", "segmentation", "--data", upright / "lying", *TINY, "--cache", tmp_path / "cache"]
    said = output(*train, "--features", "vector:wind+wks", "--out", tmp_path / "run", "--epochs", 2)
    assert "vector:wind rotated at random about any axis" in said
    refused = complaint(*train, "--features", "xyz+file:wind", "--out", tmp_path / "none")
    assert refused.startswith("file:wind has three columns, and meshes are turned or mirrored.")
    checkpoint = tmp_path / "run" / "last.pt"
    test = upright / "lying" / "test"
    output("predict", test, "--checkpoint", checkpoint, "--out", tmp_path / "p", "--device", "cpu")
    assert (tmp_path / "p" / "body12.ply").is_file()


@pytest.mark.parametrize("given", ["", "--batch-meshes 3", "--batch-meshes 3 --accumulate 2", "--loss dice"])
def test_the_logged_loss_is_the_mean_over_what_has_labels(tmp_path: Path, given: str) -> None:
    """A mesh without labels does not change the loss of the two others."""
    found = []
    for name in ("with", "without"):
        root = write_set(tmp_path / name)
        for i in range(2, 12):
            for file in (root / "train").glob(f"body{i}.*"):
                file.unlink()
        if name == "with":
            (root / "train" / "body5.txt").write_text("-1\n" * 162)
            (root / "test" / "body12.ply").rename(root / "train" / "body5.ply")
            (root / "test" / "body12.txt").unlink()
        # Nothing is learned, so both see the network at its start.
        train = ["train", "segmentation", "--data", root, *TINY, "--features", "wks", "--lr", 1e-30, *given.split()]
        output(*train, "--dropout", 0, "--out", tmp_path / f"run {name}", "--cache", tmp_path / "cache")
        found += [float(row["train_loss"]) for row in table_of(tmp_path / f"run {name}" / "metrics.csv")]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert 0.1 < found[0] < 1
