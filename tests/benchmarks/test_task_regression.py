"""The measurement of regression writes figures that `diffnet train regression` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh

from diffnet.benchmarks.tasks.regression import volume_of, write_figure
from diffnet.data import load_targets
from diffnet.geometry import load_mesh, make_mesh, normalize_positions


def test_volumes_are_those_of_normalized_meshes() -> None:
    ball = trimesh.creation.icosphere(3)
    mesh = make_mesh(7 + 2.5 * ball.vertices, ball.faces)
    assert volume_of(mesh) == pytest.approx(ball.volume, rel=1e-6)


def test_a_figure_and_its_targets_are_read_back(tmp_path: Path) -> None:
    name, volume, targets = write_figure(tmp_path, 4, (300, 400))
    np.save(tmp_path / f"{name}.curvature.npy", targets)
    data = load_targets(tmp_path, "file:curvature", needs_train=False)
    (item,) = data.test
    assert (item.name, data.labels_at, data.label_names) == (name, "vertices", ["curvature"])
    np.testing.assert_array_equal(item.labels[:, 0], targets)
    mesh = load_mesh(tmp_path / f"{name}.ply")
    found = trimesh.Trimesh(normalize_positions(mesh.verts), mesh.faces, process=False)
    assert found.is_watertight
    assert volume == pytest.approx(found.volume, rel=1e-6)
