"""Areas, borders and boundaries of vertices, edges and faces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.geometry import (
    MeshError,
    border_lengths,
    element_areas,
    element_points,
    load_mesh,
    make_mesh,
    mesh_edges,
    smooth_boundaries,
)

PLACES = ("vertices", "faces", "edges")
BALL = load_mesh(trimesh.creation.icosphere(3))


@pytest.mark.parametrize("at", PLACES)
def test_areas_and_points(at: str) -> None:
    areas = element_areas(BALL, at)
    assert areas.sum() == pytest.approx(trimesh.creation.icosphere(3).area)
    assert element_points(BALL, at).shape == (len(areas), 3)
    np.testing.assert_allclose(areas @ element_points(BALL, at), 0, atol=1e-12)


def test_borders_of_a_square() -> None:
    square = make_mesh([[0, 0, 0], [3, 0, 0], [3, 3, 0], [0, 3, 0], [9, 9, 9]], [[0, 1, 2], [0, 2, 3]])
    np.testing.assert_allclose(border_lengths(square, "faces").toarray(), [[0, 18**0.5], [18**0.5, 0]])
    borders = border_lengths(square, "vertices").toarray()
    np.testing.assert_array_equal(borders, borders.T)
    # Vertices 0 and 2 are neighbors in both faces, 0 and 1 in the first alone, and 1 and 3 in none.
    assert borders[0, 2] == pytest.approx(2 * np.hypot(0.5, 0.5))
    assert borders[0, 1] == pytest.approx(np.hypot(0.5, 1))
    assert borders[1, 3] == 0
    assert not borders[4].any()
    edges = mesh_edges(square.faces).tolist()
    borders = border_lengths(square, "edges").toarray()
    # The sides 0-1 and 1-2 meet at vertex 1, and the center of the face is (2, 1).
    assert borders[edges.index([0, 1]), edges.index([1, 2])] == pytest.approx(np.hypot(1, 1))
    assert borders[edges.index([0, 1]), edges.index([0, 3])] == 0


@pytest.mark.parametrize("at", PLACES)
def test_noisy_labels_become_smooth(at: str) -> None:
    rng = np.random.default_rng(0)
    height = element_points(BALL, at)[:, 2]
    truth = (height > 0.1).astype(np.int64) + (height > 0.6)
    logits = np.eye(3)[truth] * 1.5 + rng.normal(size=(len(truth), 3))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    likely = smooth_boundaries(BALL, shares, at=at, weight=0)
    np.testing.assert_array_equal(likely, shares.argmax(axis=1))
    assert (likely == truth).mean() < 0.8

    def boundary(labels: np.ndarray) -> float:
        borders = border_lengths(BALL, at).tocoo()
        return borders.data[labels[borders.row] != labels[borders.col]].sum()

    lengths = [boundary(smooth_boundaries(BALL, shares, at=at, weight=weight)) for weight in (0, 0.5, 1, 2)]
    assert lengths == sorted(lengths, reverse=True)
    smooth = smooth_boundaries(BALL, shares, at=at, weight=2)
    assert (smooth == truth).mean() > 0.95
    np.testing.assert_array_equal(smooth, smooth_boundaries(BALL, shares, at=at, weight=2))
    tiny = make_mesh(BALL.verts * 1e-3, BALL.faces)
    np.testing.assert_array_equal(smooth, smooth_boundaries(tiny, shares, at=at, weight=2))


def test_sure_labels_and_lone_vertices_stay() -> None:
    mesh = make_mesh(np.concatenate([BALL.verts, [[5, 5, 5]]]), BALL.faces)
    shares = np.eye(2)[(mesh.verts[:, 2] > 0).astype(int)]
    shares[-1] = [0.4, 0.6]
    np.testing.assert_array_equal(smooth_boundaries(mesh, shares, weight=0.5), shares.argmax(axis=1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"probabilities": np.ones((3, 2))},
            ValueError,
            r"shape \(642, C\), one row for each of vertices, shape is \(3, 2\)",
        ),
        ({"probabilities": -np.ones((642, 2))}, ValueError, "finite and at least 0"),
        ({"weight": np.nan}, ValueError, r"weight should be from 0 to 1e\+30, got nan"),
        ({"weight": 1e31}, ValueError, r"weight should be from 0 to 1e\+30, got 1e\+31"),
        ({"mesh": load_mesh(BALL.verts)}, MeshError, "a point cloud has no boundaries"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        smooth_boundaries(**{"mesh": BALL, "probabilities": np.ones((642, 2)), **change})
