"""Softmax over the entries of each row, against a dense softmax in float64. See test_spmm.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from float64 import DEVICE, check, random
from sparse_cases import Shape, backends, cases, dense_softmax, pattern_of, random_mask, random_pattern
from sparse_cases import small_pieces as small_pieces  # a fixture
from torch import Tensor

from diffnet.ops import Backend, Pattern, sparse_softmax

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")


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


SCALES_AND_BIASES: list[tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = [
    ((), None), ((2, 1), None), ((2, 4), (2, 4)), (None, ()), ((1,), (4,)),
]  # fmt: skip


@backends
@pytest.mark.parametrize(("scale", "bias"), SCALES_AND_BIASES, ids=str)
def test_tensor_scales_and_biases(
    scale: tuple[int, ...] | None, bias: tuple[int, ...] | None, backend: Backend
) -> None:
    """Values, and gradients for scores, scale and bias. `bias` is the shape of its sets."""
    pattern = random_pattern("skewed")
    mask = random(pattern.nnz, seed=3) > -0.5
    inputs = [random(2, 4, pattern.nnz)]
    inputs += [] if scale is None else [random(8, seed=1)[: math.prod(scale)].reshape(scale)]
    inputs += [] if bias is None else [random(*bias, pattern.nnz, seed=2)]
    moved = pattern.to(DEVICE)

    def ours(scores: Tensor, *rest: Tensor) -> Tensor:
        given = -0.7 if scale is None else rest[0]
        added = None if bias is None else rest[-1]
        return sparse_softmax(moved, scores, scale=given, bias=added, mask=mask.to(DEVICE), backend=backend)

    def dense(scores: Tensor, *rest: Tensor) -> Tensor:
        scaled = scores * (-0.7 if scale is None else rest[0][..., None])
        return dense_softmax(pattern, scaled if bias is None else scaled + rest[-1], 1.0, mask)

    check(ours, dense, inputs, torch.float64 if backend == "torch" else torch.float32)


@backends
def test_scales_and_biases_of_other_dtypes(backend: Backend) -> None:
    """The result has the dtype of the scores, and every gradient that of its tensor."""
    pattern = random_pattern().to(DEVICE)
    dtype = torch.float16
    leaves = [random(2, pattern.nnz).to(dtype), random(2, seed=1).float(), random(pattern.nnz, seed=2)]
    leaves = [t.to(DEVICE).requires_grad_() for t in leaves]
    out = sparse_softmax(pattern, leaves[0], scale=leaves[1], bias=leaves[2], backend=backend)
    assert out.dtype == dtype
    expected = dense_softmax(pattern.to("cpu"), (leaves[0] * leaves[1][:, None] + leaves[2]).double().cpu(), 1.0, None)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-3, atol=2e-3)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float64]


@backends
def test_a_bias_of_minus_infinity_leaves_out(backend: Backend) -> None:
    pattern = random_pattern()
    scores, keep = random(2, pattern.nnz).float(), random(pattern.nnz, seed=1) > -0.5
    keep[pattern.row_indices == 0] = False
    bias = torch.zeros(pattern.nnz).masked_fill(~keep, -torch.inf)
    moved = pattern.to(DEVICE)
    results = []
    for options in ({"bias": bias.to(DEVICE)}, {"mask": keep.to(DEVICE)}):
        leaf = scores.to(DEVICE).requires_grad_()
        out = sparse_softmax(moved, leaf, backend=backend, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@backends
def test_wrong_scales_and_biases_are_refused(backend: Backend) -> None:
    pattern = random_pattern().to(DEVICE)
    scores = torch.zeros(2, 4, pattern.nnz, device=DEVICE)
    n = pattern.nnz
    one = torch.ones(1, device=DEVICE)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"scale": one.expand(3)}, ValueError, r"scale should broadcast to \(2, 4\), shape is \(3,\)"),
        ({"scale": one.expand(n)}, ValueError, rf"scale should broadcast to \(2, 4\), shape is \({n},\)"),
        ({"scale": one.long()}, TypeError, r"scale should be floating point, got torch\.int64"),
        ({"scale": one.to("meta")}, ValueError, "scale should be on"),
        ({"scale": "1"}, TypeError, "scale should be a number or a tensor, got str"),
        ({"scale": None, "bias": one.expand(n)}, TypeError, "scale should be a number or a tensor, got NoneType"),
        ({"bias": 0.5}, TypeError, "bias should be a tensor, got float"),
        ({"bias": one.bool().expand(n)}, TypeError, r"bias should be floating point, got torch\.bool"),
        ({"bias": one.expand(n + 1)}, ValueError, rf"bias should have shape \(…, {n}\), shape is \({n + 1},\)"),
        ({"bias": one.expand(3, n)}, ValueError, rf"bias should broadcast to \(2, 4, {n}\), shape is \(3, {n}\)"),
        ({"bias": one.expand(1, 2, 4, n)}, ValueError, "bias should broadcast"),
        ({"bias": one.to("meta").expand(n)}, ValueError, "bias should be on"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            sparse_softmax(pattern, scores, backend=backend, **options)
    half = sparse_softmax(pattern, random(n).float().to(DEVICE), scale=np.float32(0.5), backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(half, sparse_softmax(pattern, random(n).float().to(DEVICE), scale=0.5, backend=backend))


@backends
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_nan_fills_its_row(value: float, masked: bool, backend: Backend) -> None:
    """Visible entries are NaN and hidden ones 0, in short and in long rows. Other rows are as without the value."""
    pattern = random_pattern("skewed")
    rows, scores = pattern.row_indices, random(2, pattern.nnz).float()
    keep = random(pattern.nnz, seed=1) > -0.8 if masked else torch.ones(pattern.nnz, dtype=torch.bool)
    broken = torch.zeros(pattern.nnz, dtype=torch.bool)
    spoiled = scores.clone()
    for row in (0, 1):  # row 1 is long
        entry = (keep & (rows == row)).nonzero()[-1, 0]
        spoiled[0, entry] = value
        broken |= rows == row
    spoiled[:, ~keep] = torch.nan  # hidden, so without any effect
    moved, mask = pattern.to(DEVICE), keep.to(DEVICE) if masked else None
    results = []
    for given in (spoiled, scores):
        leaf = given.to(DEVICE).requires_grad_()
        out = sparse_softmax(moved, leaf, mask=mask, backend=backend)
        (grad,) = torch.autograd.grad(out, leaf, random(2, pattern.nnz, seed=2).float().to(DEVICE))
        results.append([out.detach().cpu(), grad.cpu()])
    (out, grad), (expected, expected_grad) = results
    assert out[0, broken & keep].isnan().all()
    assert (out[0, broken & ~keep] == 0).all()
    assert grad[0, broken].isnan().all()
    expected[0, broken], expected_grad[0, broken] = out[0, broken], grad[0, broken]
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


def test_batches_too_large_for_a_launch_are_refused() -> None:
    pattern = Pattern(torch.ones(4161, dtype=torch.int64).cumsum(0).clamp(max=2) - 1, torch.tensor([0]), 1).to(DEVICE)
    scores = torch.zeros(1, device=DEVICE).expand(2**25, 1)  # takes no memory
    with pytest.raises(ValueError, match=f"sparse_softmax of these sizes takes {65 * 2**25} programs"):
        sparse_softmax(pattern, scores, backend="triton")


def test_gradcheck() -> None:
    pattern = random_pattern()
    keep = random(pattern.nnz, seed=3) > -1
    scores = random(2, pattern.nnz).requires_grad_()
    softmax = lambda s: sparse_softmax(pattern, s, scale=0.3, mask=keep)  # noqa: E731
    assert torch.autograd.gradcheck(softmax, (scores,), fast_mode=True)
    more = random(2, seed=1).requires_grad_(), random(pattern.nnz, seed=2).requires_grad_()
    with_both = lambda s, scale, bias: sparse_softmax(pattern, s, scale=scale, bias=bias, mask=keep)  # noqa: E731
    assert torch.autograd.gradcheck(with_both, (scores, *more), fast_mode=True)
