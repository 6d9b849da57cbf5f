"""Sparse matrices, and products and softmax on their patterns against dense ones in float64, on plain PyTorch and in
Triton kernels (through its interpreter where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import DEVICE, TOLERANCE, check, random, relative
from torch import Tensor

from diffnet.ops import (
    Backend,
    EllPattern,
    HybridPattern,
    Pattern,
    SparseMatrix,
    block_diagonal,
    block_diagonal_pattern,
    diagonal,
    row_sum,
    sddmm,
    sparse_softmax,
    split_diagonal,
    split_diagonal_pattern,
    spmm,
)
from diffnet.ops.sparse import kernels
from diffnet.ops.sparse import op as products
from diffnet.ops.sparse import pattern as patterns

PIECE = 16  # in these tests, so that rows of several pieces stay small enough for the interpreter
# (backend, dtype, index dtype)
KINDS = [
    ("torch", torch.float64, torch.int64),
    ("torch", torch.float32, torch.int32),
    ("torch", torch.bfloat16, torch.int32),
    ("triton", torch.float32, torch.int32),
    ("triton", torch.bfloat16, torch.int32),
    ("triton", torch.float16, torch.int64),
]
kinds = pytest.mark.parametrize(("backend", "dtype", "index"), KINDS)
# (rows, columns, channels); "skewed" has rows of several pieces, and one that is full.
SHAPES = [(9, 6, 3), (1, 17, 5), (17, 1, 1), (7, 96, 40), (11, 55, 8), (12, 12, 130), "skewed"]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PIECE", PIECE)
    monkeypatch.setattr(kernels, "PIECE", PIECE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels leave unwritten shows as NaN."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*arguments: object, **options: object) -> Tensor:
            out = allocate(*arguments, **options)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        return allocated

    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch, "empty", poison(torch.empty))


def random_mask(shape: tuple[int, int, int] | str) -> tuple[np.ndarray, int]:
    """Where a random matrix has entries, with an empty row and an empty column, and the channels of its factors."""
    rows, columns, channels = (6, 2 * PIECE + 12, 4) if isinstance(shape, str) else shape
    mask = np.random.default_rng(rows).random((rows, columns)) < 0.3
    mask[rows // 2] = False
    mask[:, columns // 3] = False
    if shape == "skewed":
        mask[1] = True
        mask[4, 5 : 5 + PIECE + 1] = True
    if mask.size < 20:
        mask[:] = True
    return mask, channels


def pattern_of(mask: np.ndarray, index: torch.dtype = torch.int32) -> Pattern:
    found = scipy.sparse.csr_matrix(mask)
    return Pattern(torch.tensor(found.indptr, dtype=index), torch.tensor(found.indices, dtype=index), mask.shape[1])


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def dense_of(pattern: Pattern, values: Tensor) -> Tensor:
    """(…, rows, columns), differentiable in the values (…, nnz)."""
    place = pattern.row_indices.long() * pattern.columns + pattern.indices.long()
    flat = values.new_zeros(*values.shape[:-1], pattern.shape[0] * pattern.columns)
    return flat.index_add(-1, place, values).reshape(*values.shape[:-1], *pattern.shape)


@kinds
@shapes
def test_spmm(shape: tuple[int, int, int] | str, backend: str, dtype: torch.dtype, index: torch.dtype) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask, index)
    moved = pattern.to(DEVICE)
    inputs = [random(2, pattern.nnz), random(mask.shape[1], channels, seed=1)]
    check(lambda v, x: spmm(moved, v, x, backend=backend), lambda v, x: dense_of(pattern, v) @ x, inputs, dtype)
    inputs[1] = random(mask.shape[0], channels, seed=1)
    check(
        lambda v, x: spmm(moved, v, x, transpose=True, backend=backend),
        lambda v, x: dense_of(pattern, v).mT @ x,
        inputs,
        dtype,
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(9, 6, 3), "skewed"], ids=str)
@pytest.mark.parametrize(
    ("values", "x"),
    [((), ()), ((3,), ()), ((9,), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((), (3,)), ((2, 1), (3,)), ((1,), (1,))],
)
def test_spmm_over_sets(
    values: tuple[int, ...], x: tuple[int, ...], shape: tuple[int, int, int] | str, backend: str
) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    moved = pattern.to(DEVICE)
    check(
        lambda v, x: spmm(moved, v, x, backend=backend),
        lambda v, x: dense_of(pattern, v) @ x,
        [random(*values, pattern.nnz), random(*x, mask.shape[1], channels, seed=1)],
        torch.float32,
    )


@shapes
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_stored_in_another_order(shape: tuple[int, int, int] | str, backend: Backend) -> None:
    """To the bit what comes of the matrix's own order, and every gradient."""
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    rows, columns = mask.shape
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    stored, entries = pattern.with_row_order(order)
    assert torch.equal(stored.row_indices, pattern.row_indices[entries])
    assert torch.equal(stored.row_lengths, pattern.row_lengths)
    assert torch.equal(stored.indptr.diff(), pattern.indptr.diff()[order])
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
        assert torch.equal(expected, found)
    own, back = stored.with_row_order(None)
    assert own.row_order is None
    for array, same in ((own.indptr, pattern.indptr), (own.indices, pattern.indices), (entries[back], everything)):
        assert torch.equal(array, same)


@pytest.mark.parametrize("shape", [(7, 96, 40), (12, 12, 130), "skewed"], ids=str)
def test_other_forms_have_rows_in_their_own_order(shape: tuple[int, int, int] | str) -> None:
    mask, _ = random_mask(shape)
    matrix = SparseMatrix(pattern_of(mask), random(int(mask.sum())))
    stored = matrix.with_row_order(torch.arange(len(mask)).flip(0))
    assert not torch.equal(stored.values, matrix.values)
    expected = matrix.to_scipy().toarray()
    np.testing.assert_array_equal(stored.to_scipy().toarray(), expected)
    np.testing.assert_array_equal(stored.to_torch().to_dense(), expected)
    np.testing.assert_array_equal(stored.mT.to_scipy().toarray(), expected.T)
    x = random(mask.shape[1], 3, seed=1)
    ell, places = EllPattern.from_pattern(stored.pattern)
    torch.testing.assert_close(ell.matmul(stored.values[places.clamp(min=0)], x), matrix @ x)
    hybrid = HybridPattern.from_pattern(stored.pattern)
    torch.testing.assert_close(hybrid.matmul(stored.values, x), matrix @ x)


def test_row_orders_go_where_patterns_go() -> None:
    square = pattern_of(np.eye(5, dtype=bool) | (np.arange(5) == 2)).prepare()
    order = ints(4, 2, 0, 1, 3)
    pattern = square.with_row_order(order)[0].prepare()
    assert pattern.row_order is not None
    assert pattern.row_order.dtype == torch.int32
    assert pattern.row_order.tolist() == [4, 2, 0, 1, 3]
    assert pattern.transpose[0].row_order is pattern.row_order
    packed = block_diagonal_pattern([square, pattern])
    assert packed.row_order is not None
    assert packed.row_order.tolist() == [0, 1, 2, 3, 4, 9, 7, 5, 6, 8]
    assert torch.equal(packed.transpose[0].row_order, packed.row_order)
    (first, _), (second, _) = split_diagonal_pattern(packed, [5, 5])
    assert first.row_order.tolist() == [0, 1, 2, 3, 4]
    assert second.row_order.tolist() == order.tolist()
    assert packed.to("meta").row_order.device.type == "meta"
    mixed, _ = packed.with_row_order(torch.arange(10).flip(0))
    with pytest.raises(ValueError, match="among rows 0 to 4"):
        split_diagonal_pattern(mixed, [5, 5])
    wide, _ = pattern_of(np.ones((5, 6), dtype=bool)).with_row_order(order)
    assert wide.transpose[0].row_order is None
    with pytest.raises(ValueError, match="column 2 twice in row 3"):
        Pattern(ints(0, 1, 1, 3, 3), ints(0, 2, 2), 3, ints(1, 0, 3, 2))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (ints(0, 1), r"\(3,\), dtype torch.int32.*shape \(2,\)"),
        (ints(0, 1, 1), "row 2 is missing or twice"),
        (ints(0, 1, 3), "row 2 is missing or twice"),
        (ints(-1, 1, 2), "row 0 is missing or twice"),
    ],
)
def test_row_orders_that_are_none(order: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pattern_of(np.ones((3, 3), dtype=bool)).with_row_order(order)


@kinds
@shapes
def test_sddmm(shape: tuple[int, int, int] | str, backend: str, dtype: torch.dtype, index: torch.dtype) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask, index)
    moved = pattern.to(DEVICE)
    rows, columns = pattern.row_indices.long(), pattern.indices.long()
    check(
        lambda a, b: sddmm(moved, a, b, backend=backend),
        lambda a, b: (a @ b.mT)[..., rows, columns],
        [random(3, mask.shape[0], channels), random(mask.shape[1], channels, seed=1)],
        dtype,
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(9, 6, 3), "skewed"], ids=str)
@pytest.mark.parametrize(("a", "b"), [((), ()), ((), (3,)), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 1), (3,))])
def test_sddmm_over_sets(
    a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, int, int] | str, backend: str
) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    moved = pattern.to(DEVICE)
    check(
        lambda a, b: sddmm(moved, a, b, backend=backend),
        lambda a, b: (a @ b.mT)[..., pattern.row_indices, pattern.indices],
        [random(*a, mask.shape[0], channels), random(*b, mask.shape[1], channels, seed=1)],
        torch.float32,
    )


def dense_softmax(pattern: Pattern, scores: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    there = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    there = dense_of(pattern, there.double()) > 0
    full = torch.where(there, scale * dense_of(pattern, scores), -torch.inf)
    weights = torch.exp(full - full.amax(-1, keepdim=True).clamp(min=-1e300)).masked_fill(~there, 0)
    probabilities = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return probabilities[..., pattern.row_indices, pattern.indices]


@kinds
@shapes
@pytest.mark.parametrize("masked", [None, "one", "each"])
def test_softmax(
    shape: tuple[int, int, int] | str, backend: str, dtype: torch.dtype, index: torch.dtype, masked: str | None
) -> None:
    pattern = pattern_of(random_mask(shape)[0], index)
    mask = None
    if masked is not None:
        mask = random(*((2,) if masked == "each" else ()), pattern.nnz, seed=3) > -0.5
        mask[..., pattern.row_indices == 0] = False  # nothing takes part in a whole row
    moved, scale = pattern.to(DEVICE), -0.7
    check(
        lambda s: sparse_softmax(
            moved, s, scale=scale, mask=None if mask is None else mask.to(DEVICE), backend=backend
        ),
        lambda s: dense_softmax(pattern, s, scale, mask),
        # Not larger: a gradient is made of differences of probabilities, which near 0 and 1 drown in rounding.
        [random(2, pattern.nnz)],
        dtype,
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_softmax_of_large_scores(backend: str) -> None:
    pattern = pattern_of(np.ones((2, 3), dtype=bool)).to(DEVICE)
    scores = torch.tensor([1e30, 1e30, -1e30, -1e38, -1e38, -1e38], device=DEVICE)
    out = sparse_softmax(pattern, scores, backend=backend)
    torch.testing.assert_close(out.cpu(), torch.tensor([0.5, 0.5, 0, 1 / 3, 1 / 3, 1 / 3]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_rows_entries_or_channels(backend: str) -> None:
    for rows, columns, channels in ((0, 4, 3), (4, 0, 3), (4, 4, 0), (0, 0, 0)):
        pattern = Pattern(torch.zeros(rows + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), columns)
        pattern = pattern.to(DEVICE)
        x = torch.ones(columns, channels, device=DEVICE)
        values = torch.zeros(2, 0, device=DEVICE)
        assert torch.equal(spmm(pattern, values, x, backend=backend), torch.zeros(2, rows, channels, device=DEVICE))
        assert sddmm(pattern, torch.ones(rows, channels, device=DEVICE), x, backend=backend).shape == (0,)
        assert sparse_softmax(pattern, values, backend=backend).shape == (2, 0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_of_views(backend: str) -> None:
    """Heads that are slices of one tensor, and transposed factors."""
    mask, _ = random_mask((9, 6, 3))
    pattern = pattern_of(mask)
    values, x = random(pattern.nnz, 2).float().T, random(6, 2, 5).float().transpose(0, 1)
    q, k = random(5, 9).float().T, random(6, 10).float()[:, ::2]
    moved = pattern.to(DEVICE)
    out = spmm(moved, values.to(DEVICE), x.to(DEVICE), backend=backend)
    torch.testing.assert_close(out.cpu(), dense_of(pattern, values) @ x)
    out = sddmm(moved, q.to(DEVICE), k.to(DEVICE), backend=backend)
    torch.testing.assert_close(out.cpu(), (q @ k.mT)[pattern.row_indices, pattern.indices])


def test_gradcheck() -> None:
    mask, _ = random_mask((9, 6, 3))
    pattern = pattern_of(mask)
    values, x = random(2, pattern.nnz).requires_grad_(), random(6, 3, seed=1).requires_grad_()
    a = random(2, 9, 3, seed=2).requires_grad_()
    for transpose, dense in ((False, x), (True, a)):
        product = lambda v, d, transpose=transpose: spmm(pattern, v, d, transpose=transpose)  # noqa: E731
        assert torch.autograd.gradcheck(product, (values, dense))
        assert torch.autograd.gradgradcheck(product, (values, dense))
    sampled = lambda a, b: sddmm(pattern, a, b)  # noqa: E731
    assert torch.autograd.gradcheck(sampled, (a, x))
    assert torch.autograd.gradgradcheck(sampled, (a, x))
    keep = random(pattern.nnz, seed=3) > -1
    assert torch.autograd.gradcheck(lambda s: sparse_softmax(pattern, s, scale=0.3, mask=keep), (values,))
    assert torch.autograd.gradcheck(lambda v: row_sum(pattern, v), (values,))
    assert torch.autograd.gradcheck(lambda v: diagonal(pattern, v), (values,))


@pytest.mark.parametrize("triton", [False, True])
def test_operators_are_well_formed(triton: bool) -> None:
    """Fake implementation, autograd and aliasing, as torch.compile and torch.export rely on them."""
    mask, _ = random_mask("skewed")
    pattern = pattern_of(mask).to(DEVICE)
    structure = products._structure(pattern, triton)

    def leaf(*shape: int) -> Tensor:
        return random(*shape).float().to(DEVICE).requires_grad_()

    rows, columns = pattern.shape
    values, x, a = leaf(2, pattern.nnz), leaf(1, columns, 3), leaf(2, rows, 3)
    ops = torch.ops.diffnet
    torch.library.opcheck(ops.spmm.default, (structure, values, x, False, False, triton))
    torch.library.opcheck(ops.spmm.default, (structure, values, a, True, True, triton))
    torch.library.opcheck(ops.sddmm.default, (structure, a, x, triton))
    mask = random(2, pattern.nnz).to(DEVICE) > 0
    arrays = list(patterns.csr_arrays(pattern, triton))
    arguments = (arrays, values, mask, 0.5, triton)
    torch.library.opcheck(ops.sparse_softmax.default, arguments)
    arguments = (arrays, values.detach(), values.detach(), 0.5, triton)
    torch.library.opcheck(ops.sparse_softmax_backward.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ordered", [False, True])
def test_large_and_skewed_on_a_gpu(dtype: torch.dtype, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on the CPU, with rows divided as outside of tests; and twice the same to the bit."""
    for module in (patterns, kernels):
        monkeypatch.setattr(module, "PIECE", 128)
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
        grads = torch.autograd.grad(1e4 * loss, leaves)  # which float16 holds
        results.append([product, scores, weights, mixed, *grads])
    for ours, again, reference in zip(*results, strict=True):
        assert torch.equal(ours, again)
        # Each step rounds what the next is computed from.
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
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


def test_helpers() -> None:
    for shape in SHAPES:
        mask, _ = random_mask(shape)
        pattern = pattern_of(mask)
        values = random(2, pattern.nnz)
        dense = dense_of(pattern, values)
        torch.testing.assert_close(row_sum(pattern, values), dense.sum(-1))
        torch.testing.assert_close(diagonal(pattern, values), torch.diagonal(dense, dim1=-2, dim2=-1))


# Patterns


@pytest.mark.parametrize(
    ("indptr", "indices", "columns", "message"),
    [
        (ints(0, 2, 1), ints(0), 3, "got 2 then 1 at row 1"),
        (ints(1, 2), ints(0, 1), 3, "start at 0, got 1"),
        (ints(0, 2), ints(0, 1, 2), 3, "number of indices, 3, got 2"),
        (ints(0, 2), ints(0, 3), 3, "from 0 to 2, got 3 at entry 1"),
        (ints(0, 2), ints(-4, 2), 3, "from 0 to 2, got -4 at entry 0"),
        (ints(0, 1, 3), ints(2, 1, 0), 3, "1 before 0 in row 1"),
        (ints(0, 1, 3), ints(1, 2, 2), 3, "column 2 twice in row 1"),
        (ints(0, 1), ints(0, dtype=torch.int32), 3, "one dtype"),
        (ints(0, 1).double(), ints(0), 3, "float64"),
        (ints(0, 1), ints(0)[None], 3, r"\(1, 1\)"),
        (ints(0, 0), ints(), -2, "-2"),
        (ints(), ints(), 2, "got none"),
    ],
)
def test_patterns_that_are_none(indptr: Tensor, indices: Tensor, columns: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pattern(indptr, indices, columns)
    assert Pattern(indptr, indices, columns, check=False).columns == columns


def test_operands_that_do_not_fit() -> None:
    pattern = pattern_of(random_mask((9, 6, 3))[0])
    n = pattern.nnz
    for values, x, message in (
        ((n + 1,), (6, 3), rf"\(…, {n}\), shape is \({n + 1},\)"),
        ((n,), (9, 3), r"\(…, 6, C\), shape is \(9, 3\)"),
        ((n,), (6,), r"shape is \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            spmm(pattern, torch.zeros(values), torch.zeros(x))
    with pytest.raises(ValueError, match=r"\(9, 3\) and \(6, 4\)"):
        sddmm(pattern, torch.zeros(9, 3), torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"float32 and torch\.float64"):
        sddmm(pattern, torch.zeros(9, 3), torch.zeros(6, 3).double())
    with pytest.raises(ValueError, match=r"shape is \(4,\)"):
        sparse_softmax(pattern, torch.zeros(4))
    with pytest.raises(ValueError, match=r"bool, got torch\.float32"):
        sparse_softmax(pattern, torch.zeros(n), mask=torch.zeros(n))
    with pytest.raises(ValueError, match=r"shape is \(3,\)"):
        SparseMatrix(pattern, torch.zeros(3))
    with pytest.raises(ValueError, match=r"float16, got torch\.float64"):
        spmm(pattern, torch.zeros(n, device=DEVICE).double(), torch.zeros(6, 3, device=DEVICE), backend="triton")
    with pytest.raises(ValueError, match="'cuda'"):
        spmm(pattern, torch.zeros(n), torch.zeros(6, 3), backend="cuda")  # type: ignore[arg-type]


def test_ways_to_make_a_pattern() -> None:
    mask, _ = random_mask((9, 6, 3))
    pattern = pattern_of(mask)
    again = Pattern.from_row_lengths(pattern.row_lengths, pattern.indices, 6)
    assert torch.equal(again.indptr, pattern.indptr)
    assert again.indptr.dtype == torch.int32
    with pytest.raises(ValueError, match="float"):
        Pattern.from_row_lengths(torch.ones(3), pattern.indices, 6)
    with pytest.raises(ValueError, match="descend"):
        Pattern.from_row_lengths(ints(3, -1, 1), ints(0, 1, 2), 6)
    vector = SparseMatrix(Pattern.vector(ints(1, 4), 6), random(2))
    assert vector.pattern.shape == (1, 6)
    x = random(6, 3)
    torch.testing.assert_close((vector @ x)[0], vector.values @ x[[1, 4]])


def test_conversions() -> None:
    mask, _ = random_mask((9, 6, 3))
    pattern = pattern_of(mask)
    matrix = SparseMatrix(pattern, random(pattern.nnz))
    dense = dense_of(pattern, matrix.values)
    torch.testing.assert_close(matrix.to_torch().to_dense(), dense)
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense)
    for again in (SparseMatrix.from_torch(matrix.to_torch()), SparseMatrix.from_scipy(matrix.to_scipy())):
        assert again.pattern.shape == (9, 6)
        assert torch.equal(again.values, matrix.values)
        assert torch.equal(again.pattern.indices, pattern.indices)
        assert torch.equal(again.pattern.indptr, pattern.indptr)
    transposed = scipy.sparse.csc_matrix(matrix.to_scipy())
    assert torch.equal(SparseMatrix.from_scipy(transposed).values, matrix.values)
    several = SparseMatrix(pattern, random(2, pattern.nnz))
    for convert in (several.to_torch, several.to_scipy):
        with pytest.raises(ValueError, match=rf"\(2, {pattern.nnz}\)"):
            convert()
    with pytest.raises(ValueError, match="strided"):
        SparseMatrix.from_torch(dense)


def test_transpose() -> None:
    mask, _ = random_mask((9, 6, 3))
    matrix = SparseMatrix(pattern_of(mask), random(2, int(mask.sum())))
    pattern, order = matrix.pattern.transpose
    assert pattern.shape == (6, 9)
    Pattern(pattern.indptr, pattern.indices, 9)  # a sound one
    torch.testing.assert_close(dense_of(pattern, matrix.values[:, order]), dense_of(matrix.pattern, matrix.values).mT)
    torch.testing.assert_close(
        dense_of(matrix.mT.pattern, matrix.mT.values), dense_of(pattern, matrix.values[:, order])
    )


def test_long_pieces() -> None:
    """Every entry of a long row is in one piece; rows of PIECE entries aren't long."""
    lengths = [3, PIECE, PIECE + 1, 0, 3 * PIECE, 5]
    indices = torch.cat([torch.arange(n) for n in lengths])
    pattern = Pattern.from_row_lengths(torch.tensor(lengths), indices, 3 * PIECE)
    pieces = pattern.long_pieces.tolist()
    assert [(row, at) for row, at, _, _ in pieces] == [(2, 2)] * 2 + [(4, 4)] * 3
    stored, _ = pattern.with_row_order(torch.arange(6).flip(0))
    assert [(row, at) for row, at, _, _ in stored.long_pieces.tolist()] == [(4, 1)] * 3 + [(2, 3)] * 2
    for row in (2, 4):
        bounds = [(first, end) for r, _, first, end in pieces if r == row]
        assert bounds[0][0] == pattern.indptr[row]
        assert bounds[-1][1] == pattern.indptr[row + 1]
        assert all(a[1] == b[0] for a, b in pairwise(bounds))
        assert all(0 < end - first <= PIECE for first, end in bounds)


def test_rows_by_length() -> None:
    """Only where neighbours differ much, and of a packed pattern within each of its parts."""
    even, uneven, long = (
        Pattern.from_row_lengths(torch.tensor(n), torch.cat([torch.arange(i) for i in n]).int(), max(n))
        for n in ([3, 4, 2, 3] * 8, [1, 1, 9, 1, 1, 1, 1, 1] * 4, [2 * PIECE] + [2] * 15)
    )
    assert len(even.rows_by_length) == 0
    assert len(long.rows_by_length) == 0  # its pieces have programs of their own
    order = uneven.rows_by_length
    assert order.dtype == torch.int32
    assert sorted(order.tolist()) == list(range(32))
    assert uneven.row_lengths[order.long()].tolist() == sorted(uneven.row_lengths.tolist())
    square = [pattern_of(np.eye(5, dtype=bool)).prepare(), pattern_of(np.eye(3, dtype=bool)).prepare()]
    object.__setattr__(square[1], "_by_length", torch.tensor([2, 0, 1], dtype=torch.int32))
    packed = block_diagonal([SparseMatrix(p, torch.ones(p.nnz)) for p in square]).pattern
    assert packed._by_length is not None
    assert packed._by_length.tolist() == [0, 1, 2, 3, 4, 7, 5, 6]
    alike = block_diagonal([SparseMatrix(square[0], torch.ones(5))] * 2).pattern
    assert alike._by_length is not None
    assert len(alike._by_length) == 0


@pytest.mark.parametrize("transpose", [False, True])
def test_products_with_uneven_rows(transpose: bool) -> None:
    """Neighbours of 1 and of 9 entries are taken in another order, which changes no result."""
    lengths = torch.tensor([1, 9, 1, 1, 1, 1, 1, 1, 1] * 4)
    pattern = Pattern.from_row_lengths(lengths, torch.cat([torch.arange(n) for n in lengths]).int(), 36)
    assert len(pattern.rows_by_length) == 36
    values, x = random(2, pattern.nnz).float(), random(36, 5).float()
    dense = dense_of(pattern, values)
    out = spmm(pattern, values, x, transpose=transpose, backend="triton")
    torch.testing.assert_close(out, (dense.mT if transpose else dense) @ x)
    torch.testing.assert_close(sddmm(pattern, x, x, backend="triton"), sddmm(pattern, x, x, backend="torch"))


def test_block_diagonal_and_back() -> None:
    parts = []
    for n in (5, 2 * PIECE, 4):
        mask = np.random.default_rng(n).random((n, n)) < 0.3
        mask[n // 2] = n > PIECE
        parts.append(SparseMatrix(pattern_of(mask), random(2, int(mask.sum()))))
    assert block_diagonal(parts).pattern._transpose is None
    for part in parts:
        part.pattern.prepare()
    packed = block_diagonal(parts)
    torch.testing.assert_close(
        dense_of(packed.pattern, packed.values[0]),
        torch.block_diag(*(dense_of(m.pattern, m.values[0]) for m in parts)),
    )
    # What is put together from the parts must be what would be found in the whole.
    fresh, kept = Pattern(packed.pattern.indptr, packed.pattern.indices, packed.pattern.columns), packed.pattern
    assert kept._transpose is not None
    assert kept._long_pieces is not None
    assert kept._transpose[0]._long_pieces is not None
    assert len(kept.long_pieces) == 2
    pairs = [(a.transpose[0], a.transpose[1], a.long_pieces, a.transpose[0].long_pieces) for a in (kept, fresh)]
    for (a, *ours), (b, *found) in [pairs]:
        assert torch.equal(a.indptr, b.indptr)
        assert torch.equal(a.indices, b.indices)
        for x, y in zip(ours, found, strict=True):
            assert torch.equal(x, y)
    for part, again in zip(parts, split_diagonal(packed, [5, 2 * PIECE, 4]), strict=True):
        torch.testing.assert_close(again.values, part.values)
        torch.testing.assert_close(again.pattern.indptr, part.pattern.indptr)
        torch.testing.assert_close(again.pattern.indices, part.pattern.indices)


def test_moving_a_pattern_moves_what_it_found() -> None:
    pattern = pattern_of(random_mask("skewed")[0]).prepare()
    moved = pattern.to("meta")
    for found in (moved._long_pieces, moved._by_length):
        assert found is not None
        assert found.device.type == "meta"
    assert moved._transpose is not None
    assert moved._transpose[0]._long_pieces is not None
    assert pattern.to("cpu") is pattern
