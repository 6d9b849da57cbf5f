"""Sparse operations under torch.compile: one graph, with patterns given and patterns made inside."""

from __future__ import annotations

import pytest
import torch
from float64 import DEVICE, random
from sparse_cases import ints, random_pattern
from torch import Tensor

from diffnet.ops import Backend, Pattern, SparseMatrix, sddmm, sparse_softmax, spmm

pytestmark = pytest.mark.usefixtures("one_thread")


def test_compiles_to_one_graph() -> None:
    """Checks and promoted dtypes don't break the graph."""
    torch._dynamo.reset()
    backend: Backend = "triton"
    pattern = random_pattern().prepare().to(DEVICE)
    adjacency = torch.ones(pattern.nnz, dtype=torch.bool, device=DEVICE)

    def loss(pattern: Pattern, values: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        scores = sddmm(pattern, spmm(pattern, values, x, backend=backend), x, backend=backend)
        weights = sparse_softmax(pattern, scores, scale=scale, bias=bias, mask=adjacency, backend=backend)
        out = spmm(pattern, weights, x, backend=backend) + spmm(pattern, adjacency, x, backend=backend)
        return out.square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [random(2, pattern.nnz), random(6, 3, seed=1), random(2, seed=2), random(pattern.nnz, seed=3)]
        leaves = [t.float().to(DEVICE).requires_grad_() for t in leaves]
        out = function(pattern, *leaves)
        results.append([out, *torch.autograd.grad(out, leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pattern_of_strided_arrays_is_made_inside() -> None:
    torch._dynamo.reset()
    edges = torch.stack([ints(0, 0, 1), ints(0, 2, 1)], dim=1)

    def product(edges: Tensor, values: Tensor) -> Tensor:
        pattern = Pattern(ints(0, 2, 3), edges[:, 1], 3, check=False)
        assert pattern.indices.is_contiguous()
        return values * pattern.indices

    values = random(3)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(edges, values), product(edges, values))


def test_matrices_of_sparse_tensors() -> None:
    """One is converted inside, where the graph breaks, and one before. Gradients reach the sparse tensor."""
    torch._dynamo.reset()
    plain, x = random(3, 3).to_sparse_csr(), random(3, 2, seed=2)
    before = SparseMatrix.from_torch(plain)
    assert before.values.data_ptr() == plain.values().data_ptr()

    def product(matrix: Tensor, before: SparseMatrix, x: Tensor) -> Tensor:
        return SparseMatrix.from_torch(matrix) @ (before @ x)

    results = []
    for function in (torch.compile(product, backend="eager"), product):
        matrix = random(4, 3, seed=1).to_sparse_csr().requires_grad_()
        out = function(matrix, before, x)
        results.append([out, *torch.autograd.grad(out.square().sum(), matrix)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
