"""Flows past bodies: the panel method, rotated cases, and the training of all networks."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial import cKDTree

from diffnet import precompute_all
from diffnet.benchmarks.flow import __main__ as program, cases, training
from diffnet.benchmarks.flow.bodies import GAPS, random_body, sphere
from diffnet.benchmarks.flow.panels import area_vectors, surface_velocity
from diffnet.benchmarks.harness.results import read_csv
from diffnet.data import load_targets
from diffnet.geometry import make_mesh

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of four small cases, made in this process."""
    folder = tmp_path_factory.mktemp("flow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "ProcessPoolExecutor", lambda jobs, context: ThreadPoolExecutor(jobs))
        small = "--train 3 --test 2 --vertices 40 60 --jobs 1"
        program.main(["make", "--out", str(folder), *small.split()])
    return folder


def test_flow_past_a_sphere() -> None:
    """The exact pressure coefficient is 1 − 9/4 sin²θ, with the angle θ to the stream, and there is no force."""
    verts, faces = sphere(600)
    stream = np.array([3.0, 0.0, 4.0])
    velocity = surface_velocity(verts, faces, stream)
    centers = verts[faces].mean(1)
    cosines = centers @ stream / 5 / np.linalg.norm(centers, axis=1)
    coefficient = 1 - (velocity**2).sum(1) / 25
    assert np.sqrt(np.mean((coefficient - (1 - 9 / 4 * (1 - cosines**2))) ** 2)) < 0.015
    areas = area_vectors(verts, faces)
    assert np.abs(coefficient @ areas).max() < 0.01
    recovery = 4 / 9 * (1 - cases.BASE)  # sin²θ downstream, where the pressure is that of the base
    exact = 1 - 9 / 8 - cases.BASE * recovery - (1 - recovery) + 9 / 8 * (1 - recovery**2)
    pressure = cases.surface_pressure(velocity, areas, stream)
    drag, lift = cases.forces(pressure, areas, np.degrees(np.arctan2(4, 3)))
    assert drag / (cases.DENSITY / 2 * 25 * np.pi) == pytest.approx(exact, rel=0.05)
    assert abs(lift) < 0.01 * drag


def test_components_are_closed_and_near_each_other() -> None:
    verts, faces = random_body(np.random.default_rng(0), (100, 120))
    mesh = trimesh.Trimesh(verts, faces, process=False)
    parts = mesh.split()
    assert 2 <= len(parts) <= 4
    assert all(part.is_watertight and part.volume > 0 for part in parts)
    for part in parts:
        distance = min(cKDTree(part.vertices).query(other.vertices)[0].min() for other in parts if other is not part)
        assert GAPS[0] - 0.02 < distance < GAPS[1] + 0.02


def test_a_rotated_case_has_the_flow_of_the_rotated_body(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "precompute_all", partial(precompute_all, jobs=1))
    case = training.load_cases(data, 8, torch.device("cpu"))[0][0]
    rotation = training.rotate_about_stream(case, 1.0)
    speed, (angle, drag, _) = float(read_csv(data / cases.TABLE)[0]["speed"]), case.table.tolist()
    mesh = make_mesh(rotation.features[:, :3], case.operators.faces)
    areas = area_vectors(mesh.verts, mesh.faces)
    velocity = surface_velocity(mesh.verts, mesh.faces, cases.stream_of(speed, angle))
    np.testing.assert_allclose(rotation.areas, areas, atol=1e-6)
    np.testing.assert_allclose(training.SPEED * rotation.velocity, cases.at_vertices(mesh, velocity), atol=0.01)
    np.testing.assert_allclose(rotation.operators.normals, rotation.features[:, 3:], atol=1e-6)
    force, _ = cases.forces((training.PRESSURE * rotation.pressure[:, 0].double()).numpy(), areas, angle)
    assert force == pytest.approx(drag, rel=1e-4)


def test_networks_learn_for_the_same_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second of the clock. The first pass, which is one step here, doesn't count."""
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(training, "precompute_all", partial(precompute_all, jobs=1))
    small = "--k 8 --size 8 1 --peer-size 8 1 --tokens 2 --turns 1 --rate 0.01 --peer-rate 0.01 --device cpu --seeds 3"
    train = ["train", "--data", str(data), "--out", str(tmp_path), *small.split()]
    program.main([*train, "--seconds", "15"])
    rows = read_csv(tmp_path / "flow.csv")
    assert [(row["network"], row["seed"]) for row in rows] == [(n, "3") for n in ("diffnet", "plain", "transolver")]
    assert {row["steps"] for row in rows} == {"15"}
    assert all(float(row["train_loss"]) < 1.5 for row in rows)  # that of zeros is 2
    assert all(float(row[f"{field}_relative_l2"]) > 0 for row in rows for field in ("pressure", "velocity"))
    program.main([*train, "--seconds", "1", "--networks", "plain"])
    again = read_csv(tmp_path / "flow.csv")
    assert [row["network"] for row in again] == ["diffnet", "transolver", "plain"]
    assert again[:2] == [rows[0], rows[2]]


def test_the_set_is_one_for_regression(data: Path) -> None:
    """The columns of its table are conditions and targets, and its files have fields."""
    fields = load_targets(data / cases.TABLE, "file:pressure", conditions="speed,angle")
    assert (fields.labels_at, len(fields.train), len(fields.test)) == ("faces", 3, 2)
    numbers = load_targets(data / cases.TABLE, "drag,lift", conditions="speed,angle")
    assert numbers.label_names == ["drag", "lift"]
