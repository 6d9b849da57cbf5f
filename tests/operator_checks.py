"""Comparisons and properties of operators that several tests share."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import numpy as np
import scipy.sparse
import torch
import trimesh
from shapes import TETRAHEDRON, arrays

from diffnet.geometry import Operators, precompute
from diffnet.ops import Pattern, SparseMatrix


def matrix(sparse: SparseMatrix, component: int | None = None) -> scipy.sparse.csr_matrix:
    """A float64 copy for SciPy. `component` selects one of several sets of values."""
    values = sparse.values if component is None else sparse.values[component]
    entries = values.double().numpy(), sparse.pattern.indices.numpy(), sparse.pattern.indptr.numpy()
    return scipy.sparse.csr_matrix(entries, shape=sparse.pattern.shape)


def assert_same(found: Operators, expected: Operators) -> None:
    """All fields are equal, and so are the numbers of vertices and faces."""
    for field in fields(Operators):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        assert type(a) is type(b), field.name
        if isinstance(a, SparseMatrix):
            assert torch.equal(a.values, b.values), field.name
            a, b = a.pattern, b.pattern
        if isinstance(a, Pattern):
            assert torch.equal(a.stored_indptr, b.stored_indptr), field.name
            assert torch.equal(a.stored_indices, b.stored_indices), field.name
            assert a.columns == b.columns, field.name
            a, b = a.row_order, b.row_order
            assert (a is None) == (b is None), field.name
        if a is not None:
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name
    assert found.lengths == expected.lengths
    assert found.face_lengths == expected.face_lengths


def gradient(operators: Operators, f: np.ndarray) -> np.ndarray:
    """Gradients (V, 3) of a function (V,) in space."""
    g = [matrix(operators.gradient, i) @ f for i in range(2)]
    frames = operators.frames.double().numpy()
    return g[0][:, None] * frames[:, 0] + g[1][:, None] * frames[:, 1]


def relative(a: Any, b: Any) -> float:
    """‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


def gram(operators: Operators) -> np.ndarray:
    """ΦᵀMΦ."""
    evecs = operators.evecs.double().numpy()
    return evecs.T @ (operators.mass.double().numpy()[:, None] * evecs)


def assert_sound(operators: Operators, k: int) -> None:
    """The properties that operators of every mesh have."""
    vertices = operators.num_vertices
    laplacian = matrix(operators.laplacian)
    for value in (
        operators.mass,
        operators.evals,
        operators.evecs,
        operators.laplacian.values,
        operators.gradient.values,
        operators.frames,
    ):
        assert value.dtype == torch.float32
        assert value.isfinite().all()
    assert (operators.mass >= 0).all()
    assert operators.mass.sum() > 0
    assert operators.evals.shape == (1, k)
    assert operators.evecs.shape == (vertices, k)
    assert (operators.evals >= 0).all()
    assert (operators.evals.diff() >= 0).all()
    assert operators.laplacian.pattern.shape == operators.gradient.pattern.shape == (vertices, vertices)
    largest = abs(laplacian).max()
    assert abs(laplacian - laplacian.T).max() <= 1e-6 * largest
    assert np.abs(laplacian.sum(1)).max() <= 1e-4 * largest
    frames = operators.frames.double().numpy()
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (vertices, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(np.linalg.det(frames), 1, atol=1e-5)
    # The pairs that exist are orthonormal; the vectors of missing pairs are 0. Joined vertices count once.
    first = torch.arange(vertices) if operators.joined is None else operators.joined
    found = min(k, len(first[operators.mass > 0].unique()))
    np.testing.assert_allclose(gram(operators), np.diag(np.arange(k) < found), atol=1e-4)
    assert (operators.evecs[operators.mass == 0] == 0).all()


@functools.cache
def tiny_operators() -> list[Operators]:
    """Operators with k = 10 of three meshes (42, 4 and 8 vertices) and a point cloud (30 points)."""
    meshes = [
        arrays(trimesh.creation.icosphere(1)),
        TETRAHEDRON,
        arrays(trimesh.creation.box()),
        (np.random.default_rng(0).random((30, 3)), None),
    ]
    return [precompute(mesh, k=10) for mesh in meshes]
