"""Sparse products and softmax against dense float64, on plain PyTorch and on Triton kernels."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from float64 import DEVICE, TOLERANCE, check, random, relative
from refusals import refused
from sparse_cases import (
    PIECE,
    Shape,
    backends,
    cases,
    check_softmax_of_nan,
    dense_of,
    dense_softmax,
    name_of,
    pattern_of,
    random_mask,
    random_pattern,
    shape_id,
    small_pieces as small_pieces,  # a fixture
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffnet.ops import Backend, Pattern, diagonal, row_sum, sddmm, sparse_softmax, spmm
from diffnet.ops.sparse import pattern as pattern_module, softmax_kernels, spmm_kernels

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")


@cases
@pytest.mark.parametrize("transpose", [False, True], ids=["own", "transposed"])
def test_spmm(shape: Shape, backend: Backend, dtype: torch.dtype, index: torch.dtype, transpose: bool) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask, index)
    moved = pattern.to(DEVICE)

    def expected(values: Tensor, x: Tensor) -> Tensor:
        matrix = dense_of(pattern, values)
        return (matrix.mT if transpose else matrix) @ x

    check(
        lambda v, x: spmm(moved, v, x, transpose=transpose, backend=backend),
        expected,
        [random(2, pattern.nnz), random(mask.shape[0 if transpose else 1], channels, seed=1)],
        dtype,
    )


OVER_SETS = [
    *((spmm, "skewed", (3,), ()), (spmm, "skewed", (2,), (2,)), (spmm, (9, 6, 3), (9,), ())),
    *((spmm, (9, 6, 3), (2, 3), (2, 3)), (spmm, (9, 6, 3), (), (3,)), (spmm, (9, 6, 3), (2, 1), (3,))),
    *((sddmm, "skewed", (), ()), (sddmm, "skewed", (), (3,)), (sddmm, (9, 6, 3), (2,), ())),
    *((sddmm, (9, 6, 3), (3,), (3,)), (sddmm, (9, 6, 3), (2, 3), (2, 3)), (sddmm, (9, 6, 3), (2, 1), (3,))),
]


@backends
@pytest.mark.parametrize(("product", "shape", "a", "b"), OVER_SETS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_over_sets(product: Any, shape: Shape, a: tuple[int, ...], b: tuple[int, ...], backend: Backend) -> None:
    """a, b: the sets of the values or the first dense factor, and of the other factor."""
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    moved = pattern.to(DEVICE)

    def expected(first: Tensor, x: Tensor) -> Tensor:
        if product is spmm:
            return dense_of(pattern, first) @ x
        return (first @ x.mT)[..., pattern.row_indices, pattern.column_indices]

    first = random(*a, pattern.nnz) if product is spmm else random(*a, len(mask), channels)
    inputs = [first, random(*b, mask.shape[1], channels, seed=1)]
    check(lambda first, x: product(moved, first, x, backend=backend), expected, inputs, torch.float32)


@backends
@pytest.mark.parametrize("batch", [(0,), (0, 2)], ids=str)
def test_zero_sets_have_empty_results_and_gradients(batch: tuple[int, ...], backend: Backend) -> None:
    pattern = pattern_of(random_mask((9, 6, 3))[0]).to(DEVICE)
    values = torch.zeros(*batch, pattern.nnz, device=DEVICE, requires_grad=True)
    x, a = (torch.ones(n, 3, device=DEVICE, requires_grad=True) for n in (6, 9))
    out = spmm(pattern, values, x, backend=backend)
    assert out.shape == (*batch, 9, 3)
    grads = torch.autograd.grad(out.sum(), [values, x])
    assert grads[0].shape == values.shape
    assert torch.equal(grads[1], torch.zeros_like(x))
    many = torch.ones(*batch, 6, 3, device=DEVICE, requires_grad=True)
    out = sddmm(pattern, a, many, backend=backend)
    assert out.shape == (*batch, pattern.nnz)
    grads = torch.autograd.grad(out.sum(), [a, many])
    assert torch.equal(grads[0], torch.zeros_like(a))
    assert grads[1].shape == many.shape


@backends
@pytest.mark.parametrize(
    "shape",
    [
        (9, 6, 3),
        "skewed",
        pytest.param((7, 96, 40), marks=pytest.mark.gpu),
        pytest.param((12, 12, 130), marks=pytest.mark.gpu),
        pytest.param((17, 1, 1), marks=pytest.mark.gpu),
    ],
    ids=shape_id,
)
def test_stored_row_order_changes_nothing(shape: Shape, backend: Backend) -> None:
    """Results are equal to the bit. Those of the definition are close: its order of sums depends on the storage."""
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    rows, columns = mask.shape
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    stored, entries = pattern.with_row_order(order)
    assert torch.equal(stored.row_indices, pattern.row_indices[entries])
    assert torch.equal(stored.row_lengths, pattern.row_lengths)
    assert torch.equal(stored.stored_indptr.diff(), pattern.indptr.diff()[order])
    everything = torch.arange(pattern.nnz)
    leaves = [random(2, pattern.nnz), random(columns, channels, seed=1), random(2, rows, channels, seed=2)]
    results = []
    for p, given, back in ((pattern, everything, everything), (stored, entries, torch.argsort(entries))):
        values, x, a = (t.float().to(DEVICE).requires_grad_() for t in leaves)
        p = p.prepare().to(DEVICE)
        out = spmm(p, values[:, given], x, backend=backend)
        turned = spmm(p, values[:, given], a, transpose=True, backend=backend)
        sampled = sddmm(p, a, x, backend=backend)[:, back]
        weights = sparse_softmax(p, values[:, given], backend=backend)[:, back]
        sums = diagonal(p, values[:, given]), row_sum(p, values[:, given], backend=backend)
        made = [out, turned, sampled, weights, *sums]
        loss = sum(t.square().sum() for t in made)
        results.append([*made, *torch.autograd.grad(loss, [values, x, a])])
    for expected, found in zip(*results, strict=True):
        if backend == "torch":
            torch.testing.assert_close(expected, found, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(expected, found)
    own, back = stored.with_row_order(None)
    assert own.row_order is None
    for array, same in ((own.indptr, pattern.indptr), (own.indices, pattern.indices), (entries[back], everything)):
        assert torch.equal(array, same)


@pytest.mark.parametrize("transpose", [False, True], ids=["own", "transposed"])
def test_uneven_rows(transpose: bool) -> None:
    """Rows of 1 entry beside rows of 9 are taken in another order, which changes no result."""
    lengths = torch.tensor([1, 9, 1, 1, 1, 1, 1, 1, 1] * 2)
    pattern = Pattern.from_row_lengths(lengths, torch.cat([torch.arange(n) for n in lengths]).int(), 18)
    assert len(pattern.rows_by_length) == 18
    moved = pattern.to(DEVICE)
    values, x = random(2, pattern.nnz).float(), random(18, 5).float()
    dense = dense_of(pattern, values)
    out = spmm(moved, values.to(DEVICE), x.to(DEVICE), transpose=transpose, backend="triton")
    torch.testing.assert_close(out.cpu(), (dense.mT if transpose else dense) @ x)
    found = sddmm(moved, x.to(DEVICE), x.to(DEVICE), backend="triton")
    torch.testing.assert_close(found.cpu(), sddmm(pattern, x, x, backend="torch"))


@backends
def test_training_after_inference(backend: Backend) -> None:
    """What a pattern finds in inference mode serves the backward pass, too."""
    pattern = pattern_of(random_mask((9, 6, 3))[0]).to(DEVICE)
    values, x = (torch.ones(*shape, device=DEVICE) for shape in ((pattern.nnz,), (6, 3)))
    with torch.inference_mode():
        expected = spmm(pattern, values, x, backend=backend)
    out = spmm(pattern, values.requires_grad_(), x, backend=backend)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert torch.equal(grad, torch.full_like(grad, 3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("ordered", [False, True], ids=["own order", "other order"])
def test_large_and_skewed(dtype: torch.dtype, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results agree with float64 on the CPU, and are equal to the bit in a second run."""
    for module in (pattern_module, spmm_kernels, softmax_kernels):
        monkeypatch.setattr(module, "PIECE", 128)  # as outside of tests
    rows, columns = 20_000, 30_000
    lengths = torch.randint(0, 12, (rows,), generator=torch.Generator().manual_seed(0))
    lengths[7], lengths[100] = 10_000, 129
    first = torch.randint(0, columns - 10_000, (rows,), generator=torch.Generator().manual_seed(1))
    offsets = torch.cat([torch.arange(int(n)) for n in lengths])
    pattern = Pattern.from_row_lengths(lengths, torch.repeat_interleave(first, lengths) + offsets, columns)
    if ordered:
        pattern, _ = pattern.with_row_order(torch.randperm(rows, generator=torch.Generator().manual_seed(2)))
    values, x, a = random(2, pattern.nnz), random(columns, 130, seed=1), random(2, rows, 130, seed=2)
    given = [t.to(dtype).cuda().requires_grad_() for t in (values, x, a)]
    exact = [t.to(dtype).double().requires_grad_() for t in (values, x, a)]
    results = []
    for leaves, where, backend in ((given, "cuda", "triton"), (given, "cuda", "triton"), (exact, "cpu", "torch")):
        moved = pattern.to(where)
        product = spmm(moved, leaves[0], leaves[1], backend=backend)
        scores = sddmm(moved, leaves[2], leaves[1], backend=backend)
        weights = sparse_softmax(moved, scores, scale=0.1, backend=backend)
        mixed = spmm(moved, weights, leaves[2], transpose=True, backend=backend)
        loss = product.float().square().mean() + mixed.float().square().mean()
        grads = torch.autograd.grad(1e4 * loss, leaves)  # float16 can hold gradients of this size
        results.append([product, scores, weights, mixed, *grads])
    for ours, again, reference in zip(*results, strict=True):
        assert torch.equal(ours, again)
        # Each step rounds the input of the next.
        assert relative(ours.detach().cpu(), reference.detach()) <= 4 * TOLERANCE[dtype]


@pytest.mark.gpu
def test_products_can_be_captured() -> None:
    mask, channels = random_mask("skewed")
    pattern = pattern_of(mask).prepare().to("cuda")
    values = random(2, pattern.nnz).float().cuda().requires_grad_()
    x = random(mask.shape[1], channels, seed=1).float().cuda().requires_grad_()

    def step() -> list[Tensor]:
        scores = sddmm(pattern, spmm(pattern, values, x), x)
        out = spmm(pattern, sparse_softmax(pattern, scores), x)
        return [out, *torch.autograd.grad(out.square().sum(), [values, x])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


def test_long_row_with_the_real_piece_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 130 entries is divided at 128, as outside of tests."""
    for module in (pattern_module, spmm_kernels, softmax_kernels):
        monkeypatch.setattr(module, "PIECE", 128)
    assert PIECE < 128
    pattern = Pattern.from_row_lengths(torch.tensor([2, 130]), torch.cat([torch.arange(2), torch.arange(130)]), 130)
    assert len(pattern.long_pieces) == 2
    values, x = random(pattern.nnz).float(), random(130, 3, seed=1).float()
    moved = pattern.to(DEVICE)
    out = spmm(moved, values.to(DEVICE), x.to(DEVICE), backend="triton")
    torch.testing.assert_close(out.cpu(), dense_of(pattern, values) @ x)
    a = x[:2].contiguous()
    found = sddmm(moved, a.to(DEVICE), x.to(DEVICE), backend="triton")
    torch.testing.assert_close(found.cpu(), (a @ x.mT)[pattern.row_indices, pattern.column_indices])
    weights = sparse_softmax(moved, values.to(DEVICE), backend="triton").cpu()
    torch.testing.assert_close(weights[2:], torch.softmax(values[2:], 0))


def test_a_product_without_gradients_sorts_no_transpose() -> None:
    pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    values, x = torch.randn(3), torch.randn(3, 2)
    found = spmm(pattern, values, x)
    # The transpose is private, since reading the public name would sort it.
    assert pattern.prepare(backward=False)._transpose is None
    assert torch.equal(spmm(pattern, values, x.requires_grad_()), found)
    assert pattern._transpose is not None


@cases
def test_sddmm(shape: Shape, backend: Backend, dtype: torch.dtype, index: torch.dtype) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask, index)
    moved = pattern.to(DEVICE)
    rows, columns = pattern.row_indices.long(), pattern.column_indices.long()
    check(
        lambda a, b: sddmm(moved, a, b, backend=backend),
        lambda a, b: (a @ b.mT)[..., rows, columns],
        [random(3, mask.shape[0], channels), random(mask.shape[1], channels, seed=1)],
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mkl", [True, False], ids=["mkl", "no mkl"])
def test_on_the_cpu_without_gathering_all_rows(mkl: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch samples entries if it has MKL. Otherwise rows are gathered in chunks, so memory stays small, too."""
    if mkl and not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch has no MKL")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.layout == torch.strided:
                largest = max(largest, out.numel())
            return out

    rows, channels, entries = 300, 64, 300 * 50
    indices = torch.arange(50, dtype=torch.int32).repeat(rows)
    pattern = Pattern.from_row_lengths(torch.full((rows,), 50), indices, 60)
    ordered, order = pattern.with_row_order(torch.randperm(rows))
    a, b = random(2, rows, channels).to(dtype), random(60, channels, seed=1).to(dtype)
    exact = (a.double() @ b.double().mT)[:, pattern.row_indices, pattern.column_indices]
    with Sizes():
        out = sddmm(pattern, a, b)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    torch.testing.assert_close(sddmm(ordered, a, b), out[:, order])
    assert largest < entries * channels


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
    torch.testing.assert_close(*results)


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
        refused(error, message, sparse_softmax, pattern, scores, backend=backend, **options)
    scores, numbers = random(n).float().to(DEVICE), ((np.float32(0.5), 0.5), (True, 1.0))
    for number, same in numbers:
        found = sparse_softmax(pattern, scores, scale=number, backend=backend)  # type: ignore[arg-type]
        torch.testing.assert_close(found, sparse_softmax(pattern, scores, scale=same, backend=backend))


@backends
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_nan_fills_its_row(value: float, masked: bool, backend: Backend) -> None:
    """In short and in long rows."""
    pattern = random_pattern("skewed")
    keep = random(pattern.nnz, seed=1) > -0.8 if masked else torch.ones(pattern.nnz, dtype=torch.bool)
    moved, mask = pattern.to(DEVICE), keep.to(DEVICE) if masked else None
    softmax = partial(sparse_softmax, moved, mask=mask, backend=backend)
    check_softmax_of_nan(softmax, pattern.row_indices, keep, (0, 1), value, backend == "triton")  # row 1 is long


def test_batches_too_large_for_a_launch_are_refused() -> None:
    pattern = Pattern(torch.ones(4161, dtype=torch.int64).cumsum(0).clamp(max=2) - 1, torch.tensor([0]), 1).to(DEVICE)
    scores = torch.zeros(1, device=DEVICE).expand(2**25, 1)  # takes no memory
    with pytest.raises(ValueError, match=f"sparse_softmax of these sizes takes {65 * 2**25} programs"):
        sparse_softmax(pattern, scores, backend="triton")
