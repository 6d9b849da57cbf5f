"""Nested dissection, and the Cholesky factors built on it, against dense solves."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
import trimesh
from torch import Tensor

from diffnet.geometry import laplacian_and_mass, load_mesh
from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.gpu.nested_dissection import LEAF, nested_dissection

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def grid(width: int, height: int) -> np.ndarray:
    """The edges of a grid of vertices."""
    at = np.arange(width * height).reshape(height, width)
    across, along = (at[:, :-1], at[:, 1:]), (at[:-1], at[1:])
    return np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in (across, along)])


def star(leaves: int) -> np.ndarray:
    return np.stack([np.zeros(leaves, int), np.arange(1, leaves + 1)], axis=1)


def complete(count: int) -> np.ndarray:
    return np.stack(np.triu_indices(count, 1), axis=1)


def surface(subdivisions: int) -> np.ndarray:
    return trimesh.creation.icosphere(subdivisions).edges_unique


GRAPHS = {
    "one vertex": np.zeros((0, 2), int),
    "two": np.array([[0, 1]]),
    "a leaf": grid(LEAF, 1),
    "a path": grid(200, 1),
    "a grid": grid(25, 14),
    "a star": star(100),
    "complete": complete(50),
    "a sphere": surface(2),
}


def put_together(names: list[str], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tails, heads and the graph of each vertex. A vertex of no graph follows each graph."""
    edges, graph, count = [], [], 0
    for i, name in enumerate(names):
        size = int(GRAPHS[name].max(initial=0)) + 1
        edges.append(GRAPHS[name] + count)
        graph += [i] * size + [-1]
        count += size + 1
    both = np.concatenate([np.concatenate(edges), np.concatenate(edges)[:, ::-1]])
    tails, heads = torch.from_numpy(both.T.copy()).to(device)
    return tails, heads, torch.tensor(graph, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [[name] for name in GRAPHS] + [[*GRAPHS]], ids=[*GRAPHS, "all together"])
def test_separators_separate(names: list[str], device: str) -> None:
    tails, heads, graph = put_together(names, device)
    level, region = nested_dissection(tails, heads, graph)
    assert torch.equal(level < 0, graph < 0)
    inside = graph >= 0
    assert torch.equal((region >> level.clamp(min=0))[inside], graph[inside])
    # An edge joins vertices of one region, or a vertex of a region and one of a separator above it.
    deeper = level[tails] >= level[heads]
    upper = region[tails[deeper]] >> (level[tails[deeper]] - level[heads[deeper]])
    assert torch.equal(upper, region[heads[deeper]])


def test_cuts_are_short_and_balanced() -> None:
    tails, heads, graph = put_together(["a grid"], "cpu")
    level, region = nested_dissection(tails, heads, graph)
    assert (level == 0).sum() <= 2 * 14  # along the shorter side or diagonal
    halves = torch.bincount(region[level > 0] >> (level[level > 0] - 1))
    assert halves.max() <= 25 * 14 / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [[name] for name in GRAPHS] + [[*GRAPHS]], ids=[*GRAPHS, "all together"])
def test_against_a_dense_solve(names: list[str], device: str) -> None:
    tails, heads, graph = put_together(names, device)
    n = len(graph)
    rng = np.random.default_rng(0)
    dense = torch.zeros(n, n, dtype=torch.float64, device=device)
    dense[tails, heads] = -torch.from_numpy(rng.uniform(0.5, 2, len(tails))).to(device)
    dense = dense + dense.mT
    diagonal = -dense.sum(1) + 0.01
    dense += torch.diag(diagonal)
    factor = MultifrontalCholesky(tails, heads, dense[tails, heads], diagonal, graph)
    assert factor.failed == set()
    for count in (1, 8):
        right = torch.from_numpy(rng.standard_normal((n, count))).to(device)
        expected = torch.linalg.solve(dense, right)
        expected[graph < 0] = 0
        solution = factor.solve(right).clone()
        torch.testing.assert_close(solution, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(factor.solve(right), solution)


def test_indefinite_blocks_are_named() -> None:
    tails, heads, graph = put_together(["a grid", "a sphere", "two", "a path"], "cpu")
    diagonal = torch.full((len(graph),), 8.0, dtype=torch.float64)
    diagonal[(graph == 1).nonzero()[100]] = -1
    diagonal[graph == 2] = 0.5
    factor = MultifrontalCholesky(tails, heads, -torch.ones(len(tails), dtype=torch.float64), diagonal, graph)
    assert factor.failed == {1, 2}
    right = torch.ones(len(graph), 2, dtype=torch.float64)
    solution = factor.solve(right)
    back = diagonal[:, None] * solution - torch.zeros_like(solution).index_add(0, tails, solution[heads])
    for good in (0, 3):
        torch.testing.assert_close(back[graph == good], right[graph == good])


def test_vertices_without_a_graph() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty, graph = torch.zeros(0, dtype=torch.float64), torch.full((3,), -1)
    factor = MultifrontalCholesky(none, none, empty, torch.ones(3, dtype=torch.float64), graph)
    assert torch.equal(factor.solve(torch.ones(3, 2, dtype=torch.float64)), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("device", DEVICES)
def test_a_badly_conditioned_surface(device: str) -> None:
    """The cotangents of a squeezed sphere span many orders of magnitude."""
    sphere = trimesh.creation.icosphere(3)
    sphere.vertices *= [1, 1, 1e-3]
    laplacian, mass = laplacian_and_mass(load_mesh(sphere), "cotan")
    scale = scipy.sparse.diags(mass**-0.5)
    matrix = (scale @ laplacian @ scale + scipy.sparse.eye(len(mass))).tocoo()
    rows, columns = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (matrix.row, matrix.col))
    values = torch.from_numpy(matrix.data).to(device)
    off = rows != columns
    graph = torch.zeros(len(mass), dtype=torch.int64, device=device)
    diagonal = torch.from_numpy(matrix.diagonal()).to(device)
    factor = MultifrontalCholesky(rows[off], columns[off], values[off], diagonal, graph)
    expected = np.random.default_rng(0).standard_normal((len(mass), 4))
    right = matrix @ expected
    solution = factor.solve(torch.from_numpy(right).to(device)).cpu().numpy()
    condition = np.linalg.cond(matrix.toarray())
    assert condition > 1e6
    assert np.linalg.norm(solution - expected) < 1e-15 * condition * np.linalg.norm(expected)
