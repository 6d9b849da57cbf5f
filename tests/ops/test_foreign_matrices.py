"""Sparse operations on matrices of PyTorch and SciPy, and patterns of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import random
from torch import Tensor

from diffnet.geometry import nearest_pattern
from diffnet.ops import Pattern, SparseMatrix, sddmm, sparse_softmax, spmm

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


def dense(rows: int = 7, columns: int = 5) -> Tensor:
    values = random(rows, columns)
    values = torch.where(random(rows, columns, seed=1) > 0, values, 0)
    values[2] = 0
    return values


CONVERSIONS: dict[str, Callable[[Tensor], Any]] = {
    "torch-csr": lambda m: m.to_sparse_csr(),
    "torch-coo": lambda m: m.to_sparse(),
    "torch-coo-uncoalesced": lambda m: torch.sparse_coo_tensor(
        torch.cat([m.nonzero().T.flip(1)] * 2, 1), torch.cat([m[m != 0].flip(0) / 2] * 2), m.shape
    ),
    "scipy-csr": lambda m: scipy.sparse.csr_array(m.numpy()),
    "scipy-coo": lambda m: scipy.sparse.coo_matrix(m.numpy()),
    "SparseMatrix": lambda m: SparseMatrix.from_torch(m.to_sparse()),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_operations_take_the_matrix(convert: Callable[[Tensor], Any]) -> None:
    m = dense()
    matrix, here = convert(m), m != 0
    x, y = random(5, 3), random(7, 3)
    torch.testing.assert_close(spmm(matrix, x), m @ x)
    torch.testing.assert_close(spmm(matrix, y, transpose=True), m.T @ y)
    torch.testing.assert_close(spmm(matrix, torch.ones(int(here.sum())).double(), x), here.double() @ x)
    torch.testing.assert_close(sddmm(matrix, y, x), (y @ x.T)[here])
    expected = torch.softmax(m.masked_fill(~here, -torch.inf), 1)
    torch.testing.assert_close(sparse_softmax(matrix), expected[here])
    scores = random(int(here.sum()))
    assert torch.equal(sparse_softmax(matrix, scores), sparse_softmax(Pattern.from_mask(here), scores))


@pytest.mark.parametrize("layout", ["csr", "coo", "uncoalesced"])
def test_gradients_reach_the_tensor(layout: str) -> None:
    m = dense()
    leaf = {
        "csr": lambda: m.to_sparse_csr(),
        "coo": lambda: m.to_sparse(),
        "uncoalesced": lambda: CONVERSIONS["torch-coo-uncoalesced"](m),
    }[layout]()
    leaf = leaf.detach().requires_grad_()
    x, weights = random(5, 3).requires_grad_(), random(7, 3, seed=2)
    (spmm(leaf, x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, m.T @ weights)
    torch.testing.assert_close(leaf.grad.to_dense(), (weights @ x.detach().T) * (m != 0))


def test_coo_becomes_a_matrix() -> None:
    m = dense()
    for given in (m.to_sparse(), CONVERSIONS["torch-coo-uncoalesced"](m)):
        torch.testing.assert_close(SparseMatrix.from_torch(given).to_torch().to_dense(), m)
    empty = SparseMatrix.from_torch(torch.zeros(0, 4).to_sparse())
    assert empty.shape == (0, 4)


def test_messages() -> None:
    pattern, x = Pattern.from_mask(dense() != 0), random(5, 3)
    with pytest.raises(TypeError, match=r"a Pattern holds no values; write spmm\(pattern, values, x\)"):
        spmm(pattern, x)
    with pytest.raises(TypeError, match=r"a Pattern holds no values; write sparse_softmax\(pattern, scores\)"):
        sparse_softmax(pattern)
    for call in (lambda: spmm(np.eye(5), x), lambda: sddmm("a", x, x), lambda: sparse_softmax(3)):
        with pytest.raises(TypeError, match=r"pattern should be a Pattern or a sparse matrix .* got (ndarray|str|int)"):
            call()
    with pytest.raises(ValueError, match=r"a 2-D torch.sparse_csr or torch.sparse_coo tensor expected, got 2-D of"):
        spmm(dense(), x)
    with pytest.raises(ValueError, match="without dense dimensions expected, got 1"):
        SparseMatrix.from_torch(random(3, 4).to_sparse(1))
    with pytest.raises(ValueError, match=r"mask should be bool of shape \(rows, columns\), got torch.float64"):
        Pattern.from_mask(dense())
    with pytest.raises(ValueError, match=r"density should be from 0 to 1, got 1\.5"):
        Pattern.random(3, 3, 1.5)
    with pytest.raises(ValueError, match=r"points should have shape \(N, D\), shape is \(3,\)"):
        nearest_pattern(torch.zeros(3), 2)


def checked(pattern: Pattern) -> Tensor:
    """The mask of a pattern, whose arrays are checked."""
    Pattern(pattern.indptr, pattern.indices, pattern.columns)
    return SparseMatrix(pattern, torch.ones(pattern.nnz)).to_torch().to_dense() > 0


@pytest.mark.parametrize(("length", "before", "after"), [(7, 2, 0), (7, 0, 3), (5, 9, 9), (1, 1, 1), (0, 2, 2)])
def test_windows(length: int, before: int, after: int) -> None:
    i = torch.arange(length)
    distance = i - i[:, None]
    expected = (distance >= -before) & (distance <= after)
    assert torch.equal(checked(Pattern.window(length, before, after)), expected)


@pytest.mark.parametrize(
    ("rows", "columns", "density"), [(50, 40, 0.1), (3, 7, 1), (3, 7, 0), (0, 4, 0.5), (4, 0, 0.5)]
)
def test_random_patterns(rows: int, columns: int, density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = Pattern.random(rows, columns, density, generator)
    mask = checked(pattern)
    assert (mask.sum(1) == round(density * columns)).all()
    if density == 0.1:
        assert not torch.equal(pattern.indices, Pattern.random(rows, columns, density, generator).indices)
        assert mask.any(0).all()  # all columns are drawn


def test_masks_and_nearest_points() -> None:
    mask = dense() != 0
    assert torch.equal(checked(Pattern.from_mask(mask)), mask)
    points = random(20, 4)
    distances = torch.cdist(points, points)
    expected = distances <= distances.kthvalue(5, dim=1, keepdim=True).values
    assert torch.equal(checked(nearest_pattern(points, 5)), expected)
    assert checked(nearest_pattern(points[:3], 5)).all()
