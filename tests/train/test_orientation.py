"""The orientation of training meshes: what a run rotates, and targets that turn with the mesh."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import diffnet
from jaws import jaw, write_bodies
from shapes import ellipsoid

from diffnet.data import LabeledMesh, LabeledMeshes, figures, load_targets
from diffnet.data.feature_names import vector_columns
from diffnet.geometry import Mesh, make_mesh, random_rotations
from diffnet.geometry.errors import OptionError
from diffnet.geometry.positions.rotation import shared_axes
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import mesh_axes, rotations_of, warn_of_rotations
from diffnet.train.tasks.regression import TASK as REGRESSION

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

UPRIGHT = [make_mesh(one.verts, one.faces) for one in (jaw(seed, lower=seed % 2 == 1) for seed in range(9))]


def turned(meshes: list[Mesh], axis: int | None) -> list[Mesh]:
    turns = random_rotations(len(meshes), torch.Generator().manual_seed(0), axis=axis).double().numpy()
    return [make_mesh(mesh.verts @ turn, mesh.faces) for mesh, turn in zip(meshes, turns, strict=True)]


def stand_alike(meshes: list[Mesh]) -> bool:
    return bool(shared_axes(torch.stack([mesh_axes(mesh) for mesh in meshes])).any())


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


def test_training_figures_stand_alike_and_test_figures_do_not() -> None:
    data = figures(8, 5)
    assert stand_alike([item.mesh for item in data.train])
    assert not stand_alike([item.mesh for item in data.test])


@pytest.mark.parametrize(
    ("given", "said", "warned"),
    [
        ({"features": "xyz+normals"}, "xyz and normals rotated at random about any axis, so that", True),
        ({"features": "normals", "rotate": True}, "normals rotated at random about any axis, so that", False),
        ({"features": "xyz", "rotate_about": "z"}, "xyz rotated at random about the z axis, so that", False),
        ({"features": "xyz", "rotate": False}, "", False),
        ({"features": "hks"}, "", False),
        ({"features": "xyz", "task": "correspondence", "align": True}, "xyz in the axes of each", False),
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


def test_features_that_show_no_directions_get_a_warning(tmp_path: Path) -> None:
    write_bodies(tmp_path, 3)
    options = TrainOptions(task="regression", rotate=False)
    with pytest.warns(UserWarning, match=r"log-hks don't depend on its orientation. Add --features xyz\+normals"):
        REGRESSION.check(load_targets(tmp_path, "file:wind"), options)


def test_columns_with_sides() -> None:
    item = LabeledMesh("", ellipsoid(0), np.zeros((1, 2)))
    data = LabeledMeshes([item], [item], ["left area", "right area"], "meshes")
    with pytest.raises(OptionError, match="the columns left area and right area look like two sides, but --mirror"):
        REGRESSION.check(data, TrainOptions(task="regression", mirror=True))
    REGRESSION.check(data, TrainOptions(task="regression", mirror=True, scalar_targets=True))
    REGRESSION.check(data, TrainOptions(task="regression"))


@pytest.mark.parametrize(("more", "status"), [([], 1), (["--no-rotate"], 0), (["--scalar-targets"], 0)])
def test_the_command_line(more: list[str], status: int, tmp_path: Path) -> None:
    write_bodies(tmp_path / "data", 3)
    run = ["train", "regression", "--data", tmp_path / "data", "--targets", "file:wind", "--features", "xyz"]
    run += ["--k", 4, "--width", 4, "--blocks", 1, "--epochs", 1, "--jobs", 1, "--device", "cpu", *more]
    run += ["--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    ended, out, err = diffnet(*run)
    assert ended == status, err
    assert err.startswith("diffnet: the columns wind_0, wind_1, wind_2 look like a vector") == (status == 1)
    assert ("xyz rotated at random" in out) == (more == ["--scalar-targets"])
    assert (tmp_path / "run").exists() == (status == 0)
