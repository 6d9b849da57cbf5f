"""Decimated meshes, and the nearest points of a surface."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh
from shapes import soup

from diffnet.geometry import (
    MeshError,
    cache,
    closest_points,
    decimate,
    element_points,
    element_weights,
    load_mesh,
    make_mesh,
)

BALL = load_mesh(trimesh.creation.icosphere(3))


def test_the_surface_stays() -> None:
    small = decimate(BALL, 200)
    assert len(small.faces) == 200
    solid = trimesh.Trimesh(small.verts, small.faces, process=False)
    assert solid.is_watertight
    assert solid.volume == pytest.approx(4 / 3 * np.pi, rel=0.05)
    assert decimate(BALL, len(BALL.faces)) is BALL
    cloud = load_mesh(BALL.verts)
    assert decimate(cloud, 4) is cloud
    with pytest.raises(ValueError, match="max_faces should be at least 4, got 3"):
        decimate(BALL, 3)


def test_a_triangle_soup_stays_connected() -> None:
    small = decimate(make_mesh(*soup((BALL.verts, BALL.faces))), 200)
    assert len(small.faces) <= 200
    assert trimesh.Trimesh(small.verts, small.faces, process=False).is_watertight


def test_the_cache_knows_the_number_of_faces(tmp_path: Path) -> None:
    first = decimate(BALL, 200, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast_simplification.simplify", None)  # a call would fail
        again = decimate(BALL, 200, tmp_path)
        with pytest.raises(TypeError):
            decimate(BALL, 100, tmp_path)
    np.testing.assert_array_equal(first.verts, again.verts)
    np.testing.assert_array_equal(first.faces, again.faces)
    (entry,) = tmp_path.rglob("*.decimated.safetensors")
    cache.write_entry(entry, {"verts": first.verts, "faces": first.faces + 1000})
    with pytest.warns(UserWarning, match="is computed again"):
        np.testing.assert_array_equal(decimate(BALL, 200, tmp_path).faces, first.faces)


def test_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.zeros((0, 3)), np.zeros((0, 3), np.int32)
    monkeypatch.setattr("fast_simplification.simplify", lambda *arguments, **options: nothing)
    with pytest.raises(MeshError, match="decimation to 100 faces leaves none; allow more"):
        decimate(BALL, 100)


def test_points_of_the_mesh_are_their_own_nearest() -> None:
    for at in ("vertices", "faces", "edges"):
        points = element_points(BALL, at)
        elements, weights = element_weights(BALL, closest_points(BALL, points), at)
        own = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
        np.testing.assert_array_equal(own, np.arange(len(points)))
        np.testing.assert_allclose(weights.sum(axis=1), 1)


def test_triangles_without_area_and_of_other_sizes() -> None:
    line = make_mesh([[0, 0, 0], [4, 0, 0], [2, 0, 0], [2, 0, 0]], [[0, 1, 2], [3, 3, 3]])
    found = closest_points(line, [[3, 1, 0], [-1, 0, 0]])
    nearest = np.einsum("nc,ncx->nx", found.weights, line.verts[line.faces[found.faces]])
    np.testing.assert_allclose(nearest, [[3, 0, 0], [0, 0, 0]], atol=1e-12)
    # A large face below many small ones, whose centers are nearer to the point.
    tiny = BALL.verts * 0.01 + [0, 0, 1]
    both = make_mesh(
        np.concatenate([tiny, [[-9, -9, 0.9], [9, -9, 0.9], [0, 9, 0.9]]]),
        np.concatenate([BALL.faces, [[len(tiny), len(tiny) + 1, len(tiny) + 2]]]),
    )
    assert closest_points(both, [[1, 0, 0.95]]).faces.tolist() == [len(BALL.faces)]


def test_bad_arguments() -> None:
    unknown = closest_points(BALL, BALL.verts[:2])
    unknown.faces[1] = -1
    with pytest.raises(ValueError, match=r"1 of the 2 points are unknown \(face -1\)"):
        element_weights(BALL, unknown, "vertices")
