"""Softmax over the entries of each row, against a dense softmax in float64. See test_spmm.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from float64 import DEVICE, check, random
from sparse_cases import Shape, backends, cases, dense_of, pattern_of, random_mask, random_pattern
from sparse_cases import poisoned as poisoned  # a fixture
from sparse_cases import small_pieces as small_pieces  # a fixture
from torch import Tensor

from diffnet.ops import Backend, Pattern, sparse_softmax
from diffnet.ops.sparse.pattern import csr_arrays

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")


def dense_softmax(pattern: Pattern, scores: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    there = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    there = dense_of(pattern, there.double()) > 0
    full = torch.where(there, scale * dense_of(pattern, scores), -torch.inf)
    weights = torch.exp(full - full.amax(-1, keepdim=True).clamp(min=-1e300)).masked_fill(~there, 0)
    probabilities = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return probabilities[..., pattern.row_indices, pattern.indices]


@cases
@pytest.mark.parametrize("masked", ["no mask", "one mask", "mask per set"])
def test_softmax(shape: Shape, backend: Backend, dtype: torch.dtype, index: torch.dtype, masked: str) -> None:
    pattern = pattern_of(random_mask(shape)[0], index)
    mask = None
    if masked != "no mask":
        mask = random(*((2,) if masked == "mask per set" else ()), pattern.nnz, seed=3) > -0.5
        mask[..., pattern.row_indices == 0] = False  # a row without a visible entry
    moved, scale = pattern.to(DEVICE), -0.7
    check(
        lambda s: sparse_softmax(
            moved, s, scale=scale, mask=None if mask is None else mask.to(DEVICE), backend=backend
        ),
        lambda s: dense_softmax(pattern, s, scale, mask),
        # No larger scores: near probabilities of 0 and 1, gradients are differences that drown in rounding.
        [random(2, pattern.nnz)],
        dtype,
    )


@backends
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_masks_broadcast(shape: tuple[int, int], backend: Backend) -> None:
    pattern = random_pattern()
    scores, mask = random(2, 4, pattern.nnz).float(), random(*shape, pattern.nnz, seed=1) > -0.5
    moved = pattern.to(DEVICE)
    out = sparse_softmax(moved, scores.to(DEVICE), mask=mask.to(DEVICE), backend=backend)
    torch.testing.assert_close(out.cpu().double(), dense_softmax(pattern, scores.double(), 1.0, mask))


@backends
def test_large_scores(backend: Backend) -> None:
    pattern = pattern_of(np.ones((2, 3), dtype=bool)).to(DEVICE)
    scores = torch.tensor([1e30, 1e30, -1e30, -1e38, -1e38, -1e38], device=DEVICE)
    out = sparse_softmax(pattern, scores, backend=backend)
    torch.testing.assert_close(out.cpu(), torch.tensor([0.5, 0.5, 0, 1 / 3, 1 / 3, 1 / 3]))


def test_gradcheck() -> None:
    pattern = random_pattern()
    keep = random(pattern.nnz, seed=3) > -1
    scores = random(2, pattern.nnz).requires_grad_()
    softmax = lambda s: sparse_softmax(pattern, s, scale=0.3, mask=keep)  # noqa: E731
    assert torch.autograd.gradcheck(softmax, (scores,), fast_mode=True)


@backends
def test_well_formed_operators(backend: Backend) -> None:
    """The fake implementation, autograd and aliasing are as torch.compile and torch.export rely on them."""
    triton = backend == "triton"
    pattern = random_pattern("skewed").to(DEVICE)
    scores = random(2, pattern.nnz).float().to(DEVICE)
    mask, arrays = scores > 0, list(csr_arrays(pattern, triton))
    operators = torch.ops.diffnet
    torch.library.opcheck(
        operators.sparse_softmax.default, (arrays, scores.clone().requires_grad_(), mask, 0.5, triton)
    )
    torch.library.opcheck(operators.sparse_softmax_backward.default, (arrays, scores, scores, 0.5, triton))
