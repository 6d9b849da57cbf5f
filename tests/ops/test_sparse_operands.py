"""Operands of sparse operations: shapes, dtypes, devices and strides. Both backends accept and refuse the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from float64 import DEVICE, random
from refusals import refused
from sparse_cases import (
    backends,
    dense_of,
    ints,
    name_of,
    padded,
    random_pattern,
    small_pieces as small_pieces,  # a fixture
    strided,
)
from torch import Tensor

from diffnet.ops import (
    Backend,
    EllPattern,
    HybridPattern,
    Pattern,
    diagonal,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
)

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")

INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
PATTERN = random_pattern()  # (9, 6)
NNZ = PATTERN.nnz


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def test_wrong_backends_and_dtypes_are_refused() -> None:
    pattern = PATTERN.to(DEVICE)
    with pytest.raises(ValueError, match=r"float16, got torch\.float64"):
        spmm(pattern, zeros(NNZ, dtype=torch.float64), zeros(6, 3), backend="triton")
    for dtype in (torch.float32, torch.int64):
        refused(ValueError, "'cuda'", spmm, pattern, zeros(NNZ, dtype=dtype), zeros(6, 3, dtype=dtype), backend="cuda")


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=name_of)
def test_batches_that_do_not_broadcast_are_refused(dtype: torch.dtype, backend: Backend) -> None:
    """Alike for both backends, for integers, under transforms and in all forms of a pattern."""
    ell = EllPattern.from_pattern(PATTERN)[0]
    v, x, a = (zeros(*shape, dtype=dtype) for shape in ((2, NNZ), (3, 6, 4), (2, 9, 4)))
    calls = [
        (partial(spmm, PATTERN.to(DEVICE)), v, x),
        (partial(sddmm, PATTERN.to(DEVICE)), a, x),
        (HybridPattern.from_pattern(PATTERN.to(DEVICE)).matmul, v, x),
        (EllPattern(ell.indices.to(DEVICE), 6).matmul, zeros(2, *ell.indices.shape, dtype=dtype), x),
    ]
    for call, left, right in calls:
        message = r"should broadcast, they are \(2,\) and \(3,\)"
        refused(ValueError, message, call, left, right, backend=backend)
        if backend == "torch":
            refused(ValueError, message, torch.func.vmap(call, in_dims=(None, 0)), left, right[None])


@backends
@pytest.mark.parametrize("transpose", [False, True], ids=["own", "transposed"])
def test_large_integers_are_exact(transpose: bool, backend: Backend) -> None:
    """Also those above 2**24 and 2**53, which float32 and float64 round."""
    values = torch.arange(2 * NNZ).reshape(2, NNZ) + 2**55 + 1
    x = torch.arange(27 if transpose else 18).reshape(-1, 3) - 7
    matrix = torch.zeros(2, 9, 6, dtype=torch.int64)
    matrix[:, PATTERN.row_indices.long(), PATTERN.column_indices.long()] = values
    out = spmm(PATTERN.to(DEVICE), values.to(DEVICE), x.to(DEVICE), transpose=transpose, backend=backend)
    assert out.dtype == torch.int64
    assert torch.equal(out.cpu(), (matrix.mT if transpose else matrix) @ x)
    a = torch.arange(27).reshape(9, 3) + 2**55 + 1
    b = torch.arange(18).reshape(6, 3) - 7
    found = sddmm(PATTERN.to(DEVICE), a.to(DEVICE), b.to(DEVICE), backend=backend)
    assert torch.equal(found.cpu(), (a @ b.mT)[PATTERN.row_indices, PATTERN.column_indices])


@backends
@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
def test_row_sums_and_diagonals_of_integers(dtype: torch.dtype, backend: Backend) -> None:
    values = torch.ones(NNZ).to(dtype).to(DEVICE)
    sums = row_sum(PATTERN.to(DEVICE), values, backend=backend)
    assert sums.dtype == torch.int64
    assert torch.equal(sums.cpu(), PATTERN.row_lengths.long())
    found = diagonal(PATTERN.to(DEVICE), values)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), torch.diagonal(dense_of(PATTERN, torch.ones(NNZ))).to(dtype))


@backends
def test_dtypes_of_results(backend: Backend) -> None:
    """Both operands are promoted. Autocast decides for floating-point ones, but not for sums."""
    pattern, x, values = PATTERN.to(DEVICE), zeros(6, 3), zeros(NNZ, dtype=torch.bool).logical_not()
    for wide in (torch.int64, torch.bool):
        assert spmm(pattern, values, x.to(wide), backend=backend).dtype == wide
        assert sddmm(pattern, zeros(9, 3, dtype=torch.bool), x.to(wide), backend=backend).dtype == wide
    halves, large = zeros(NNZ, dtype=torch.float16) + 1, x + 1e5
    assert spmm(pattern, halves, large, backend=backend).isfinite().all()
    assert spmm(pattern, zeros(NNZ), x.half(), backend=backend).dtype == torch.float32
    assert sddmm(pattern, zeros(9, 3, dtype=torch.float16), x, backend=backend).dtype == torch.float32
    with torch.autocast(DEVICE, torch.float16):
        assert spmm(pattern, halves, x, backend=backend).dtype == torch.float16
        assert sddmm(pattern, zeros(9, 3, dtype=torch.float16), x, backend=backend).dtype == torch.float16
        assert row_sum(pattern, zeros(NNZ), backend=backend).dtype == torch.float32
        assert sddmm(pattern, zeros(9, 3, dtype=torch.bool), x.bool(), backend=backend).dtype == torch.bool


@backends
def test_strided_operands(backend: Backend) -> None:
    """Values, dense factors, scores, masks and upstream gradients of any stride give the same results."""
    pattern = PATTERN.to(DEVICE)
    leaves = [random(2, NNZ).float(), random(2, 6, 5, seed=1).float(), random(2, 9, 5, seed=2).float()]
    upstream = random(2, 9, 5, seed=3).float()
    mask = random(2, NNZ, seed=4) > -0.5
    results = []
    sets_inside = lambda t: t.transpose(0, -2).contiguous().transpose(0, -2)  # noqa: E731 - as views of heads
    for change in (lambda t: t, strided, padded, lambda t: t.mT.contiguous().mT, sets_inside):
        values, x, a, g, m = (change(t.to(DEVICE)) for t in (*leaves, upstream, mask))
        given = [t.requires_grad_() for t in (values, x, a)]
        out = spmm(pattern, values, x, backend=backend)
        turned = spmm(pattern, values, a, transpose=True, backend=backend)
        sampled = sddmm(pattern, a, x, backend=backend)
        weights = sparse_softmax(pattern, values, mask=m, backend=backend)
        outs = [out, turned, sampled, weights]
        upstreams = [g, change(x.detach()), m.to(g.dtype), change(values.detach())]
        results.append([*outs, *torch.autograd.grad(outs, given, upstreams)])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


@backends
@pytest.mark.parametrize(
    ("rows", "columns", "channels"),
    [(0, 4, 3), (4, 0, 3), (4, 4, 0), (0, 0, 0)],
    ids=["no rows", "no columns", "no channels", "nothing"],
)
def test_empty_operands(rows: int, columns: int, channels: int, backend: Backend) -> None:
    pattern = Pattern(torch.zeros(rows + 1, dtype=torch.int64), ints(), columns).to(DEVICE)
    a, x, values = torch.ones(rows, channels, device=DEVICE), torch.ones(columns, channels, device=DEVICE), zeros(2, 0)
    assert torch.equal(spmm(pattern, values, x, backend=backend), zeros(2, rows, channels))
    assert sddmm(pattern, a, x, backend=backend).shape == (0,)
    assert sparse_softmax(pattern, values, backend=backend).shape == (2, 0)
    counts = spmm(pattern, values.long(), x.long(), backend=backend)
    assert torch.equal(counts, zeros(2, rows, channels, dtype=torch.int64))
    for form, given in (
        (EllPattern.from_pattern(pattern)[0], zeros(2, rows, 0)),
        (EllPattern.from_pattern(pattern, 3)[0], zeros(2, rows, 3)),
        (HybridPattern.from_pattern(pattern), values),
    ):
        assert torch.equal(form.matmul(given, x, backend=backend), zeros(2, rows, channels))
        assert torch.equal(form.matmul(given, a, transpose=True, backend=backend), zeros(2, columns, channels))
        assert torch.equal(form.sddmm(a, x, backend=backend), zeros(*given.shape[1:]))
        assert torch.equal(form.softmax(given, backend=backend), given)
        assert form.transpose[0].shape == (columns, rows)
