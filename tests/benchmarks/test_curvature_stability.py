"""The comparison of features of curvature on several meshes of one surface."""

import numpy as np
import trimesh

from diffnet.benchmarks.tasks.curvature_stability import FEATURES, compare
from diffnet.geometry import make_mesh


def test_rows_of_a_surface() -> None:
    ball = trimesh.creation.icosphere(4)
    rows = list(compare(make_mesh(ball.vertices * [1, 1.3, 1.7], ball.faces, name="ball"), (1500, 600)))
    assert {(row["surface"], row["mesh"]) for row in rows} == {("ball", "600"), ("ball", "noise")}
    found = {
        feature: np.mean([row["r2"] for row in rows if (row["feature"], row["mesh"]) == (feature, "600")])
        for feature in FEATURES
    }
    assert found["diffused-curvature"] > max(0.9, found["curvature"])
