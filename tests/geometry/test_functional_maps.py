"""Functional maps as functions of operators: batches of pairs give what each pair gives alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trimesh
from conftest import random_rotation
from shapes import ellipsoid
from torch import Tensor
from torch.nn.functional import normalize

import diffnet
from diffnet import Operators, collate, ops, precompute, wks

pytestmark = pytest.mark.usefixtures("one_thread")
K = 12


@pytest.fixture(scope="module")
def pairs() -> tuple[Operators, Operators]:
    """Two pairs of ellipsoids with 42 and 162, and with 162 and 42 vertices."""
    levels = (1, 2)
    a = collate([precompute(ellipsoid(i, level), k=K) for i, level in enumerate(levels)])
    return a, collate([precompute(ellipsoid(i, level), k=K) for i, level in enumerate(reversed(levels))])


@pytest.fixture
def features(pairs: tuple[Operators, Operators]) -> list[Tensor]:
    return [normalize(torch.randn(side.num_vertices, 7), dim=1).requires_grad_() for side in pairs]


@pytest.mark.parametrize("k", [None, 5])
def test_batches_of_pairs(pairs: tuple[Operators, Operators], features: list[Tensor], k: int | None) -> None:
    """Maps of features and of points, with their gradients."""
    a, b = pairs

    def maps(x: Tensor, y: Tensor, a: Operators, b: Operators) -> list[Tensor]:
        solved = diffnet.functional_map(x, y, a, b, k=k)
        matches = diffnet.point_map(solved, a, b)
        return [
            solved,
            diffnet.functional_map(x, y, a, b, k=k, regularizer="squared_difference", weight=0.1),
            diffnet.soft_functional_map(x, y, a, b, k=k),
            diffnet.functional_map_from_points(matches, a, b, k=k),
            diffnet.zoomout(solved, a, b, step=3),
        ]

    packed = maps(*features, a, b)
    split = [x.split(list(side.lengths)) for x, side in zip(features, pairs, strict=True)]
    alone = [torch.cat(found) for found in zip(*map(maps, *split, a, b), strict=True)]
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for one, other in zip(packed[:3], alone[:3], strict=True):
        for x, y in zip(*(torch.autograd.grad(m.square().sum(), features) for m in (one, other)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


def test_matches_count_within_a_mesh(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    a, b = pairs
    matches = diffnet.point_map(diffnet.functional_map(*features, a, b), a, b)
    assert [int(m.max()) < n for m, n in zip(b.unpack(matches), a.lengths, strict=True)] == [True, True]


def test_soft_maps_are_those_of_all_pairs_of_vertices(
    pairs: tuple[Operators, Operators], features: list[Tensor]
) -> None:
    a, b = pairs[0][0], pairs[1][0]
    x, y = features[0][: a.num_vertices], features[1][: b.num_vertices]
    expected = b.evecs.mT @ (b.mass[:, None] * (torch.softmax(y @ x.mT / 0.07, 1) @ a.evecs))
    torch.testing.assert_close(diffnet.soft_functional_map(x, y, a, b)[0], expected, rtol=1e-4, atol=1e-5)


def test_autocast_changes_nothing(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    """Neither maps nor losses, nor their gradients."""
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            c, of_points = diffnet.functional_map(*features, *pairs), diffnet.soft_functional_map(*features, *pairs)
            matches = diffnet.functional_map_from_points(diffnet.point_map(c, *pairs), *pairs)
            loss = ops.orthogonality_loss(c) + ops.bijectivity_loss(c, c) + ops.coupling_loss(c, of_points)
        results.append([c, of_points, matches, *torch.autograd.grad(loss, features)])
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


def test_a_turned_and_renumbered_shape_is_matched() -> None:
    """From descriptors alone. ZoomOut finds every vertex, from a map of 10 eigenpairs."""
    mesh = trimesh.creation.icosphere(2)
    verts = mesh.vertices * [1.0, 0.8, 0.6]
    verts = verts * (1 + 0.3 * np.sin(3 * verts.sum(1, keepdims=True)) + 0.1 * verts[:, :1])
    order = np.random.default_rng(0).permutation(len(verts))
    faces = np.argsort(order)[mesh.faces]
    a, b = (precompute(shape, k=40) for shape in ((verts, mesh.faces), (verts[order] @ random_rotation(3), faces)))
    x, y = (wks(side) for side in (a, b))
    c = diffnet.functional_map(x, y, a, b, k=10)
    refined = diffnet.zoomout(c, a, b)
    assert np.array_equal(diffnet.point_map(refined, a, b), order)
    truth = diffnet.functional_map_from_points(torch.from_numpy(order), a, b)
    torch.testing.assert_close(refined, truth)
    torch.testing.assert_close(truth[0].abs(), torch.eye(40), rtol=0, atol=1e-2)


def test_refusals(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    a, b = pairs
    c = diffnet.functional_map(*features, a, b)
    with pytest.raises(ValueError, match="the batches have 2 and 1 meshes"):
        diffnet.functional_map(*features, a, b[0])
    with pytest.raises(ValueError, match="k should be at most 12"):
        diffnet.soft_functional_map(*features, a, b, k=13)
    with pytest.raises(ValueError, match=r"x_b should have 204 rows, shape is \(3, 7\)"):
        diffnet.soft_functional_map(features[0], features[1][:3], a, b)
    with pytest.raises(ValueError, match=r"c should have shape \(2, K_b, K_a\), shape is \(12, 12\)"):
        diffnet.point_map(c[0], a, b)
    with pytest.raises(TypeError, match="operators should be Operators, got Tensor"):
        diffnet.functional_map(features[0], a, features[1], b)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="functional_map needs eigenpairs"):
        diffnet.functional_map(*features, precompute(ellipsoid(0), k=0), b)
    with pytest.raises(IndexError, match="matches should be from 0 to 41"):
        diffnet.functional_map_from_points(torch.full((b.num_vertices,), 42), a, b)
