"""ELL and hybrid patterns against dense matrices. test_sparse_operands.py tests wrong operands and dtypes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import DEVICE, random
from sparse_cases import backends, strided
from torch import Tensor

from diffnet.ops import Backend, EllPattern, HybridPattern, Pattern
from diffnet.ops.sparse import ell
from diffnet.ops.sparse.ell import bucket_widths

pytestmark = pytest.mark.usefixtures("one_thread")


def random_pattern(rows: int, columns: int) -> Pattern:
    """Return a pattern with rows of 0, 2, 3 and 7 entries, and a full row."""
    rng = np.random.default_rng(rows)
    mask = np.zeros((rows, columns), dtype=bool)
    for i in range(rows):
        mask[i, rng.permutation(columns)[: (0, 2, 3, 7)[i % 4]]] = True
    mask[rows - 1 :] = True
    found = scipy.sparse.csr_matrix(mask)
    return Pattern(torch.from_numpy(found.indptr), torch.from_numpy(found.indices), columns)


def dense_of(pattern: Pattern, values: Tensor) -> Tensor:
    out = values.new_zeros(*values.shape[:-1], *pattern.shape)
    index = (..., pattern.row_indices.long(), pattern.indices.long())
    out[index] = values
    return out


SHAPES = [(13, 20), (1, 9), (9, 1), (6, 0), (0, 5)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@shapes
def test_ell(shape: tuple[int, int]) -> None:
    pattern = random_pattern(*shape)
    converted, entries = EllPattern.from_pattern(pattern)
    again, there = converted.to_pattern()
    assert torch.equal(again.indptr, pattern.indptr)
    assert torch.equal(again.indices, pattern.indices)
    values, x = random(2, pattern.nnz), random(shape[1], 3, seed=1)
    places = torch.full((2, *entries.shape), torch.nan, dtype=torch.float64)  # values at unused places are ignored
    places[:, there] = values
    assert torch.equal(entries[there], torch.arange(pattern.nnz))
    torch.testing.assert_close(converted.matmul(places, x), dense_of(pattern, values) @ x)
    wider, _ = EllPattern.from_pattern(pattern, 25)
    assert wider.indices.shape == (shape[0], 25)
    assert torch.equal(wider.to_pattern()[0].indices, pattern.indices)


@backends
@shapes
def test_hybrid(shape: tuple[int, int], backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ell, "BUCKET_COST", 1)
    monkeypatch.setattr(ell, "PIECE", 5)  # rows of 7 are long
    pattern = random_pattern(*shape)
    hybrid = HybridPattern.from_pattern(pattern.to(DEVICE))
    if shape == (13, 20):
        assert [bucket.indices.shape[1] for _, bucket, _ in hybrid.buckets] == [0, 2, 3]
        assert hybrid.rest[1].row_lengths.tolist() == [7, 7, 7, 20]
    values, x = random(2, pattern.nnz).float(), random(shape[1], 3, seed=1).float()
    leaves = [values.to(DEVICE).requires_grad_(), x.to(DEVICE).requires_grad_()]
    expected = [values.double().requires_grad_(), x.double().requires_grad_()]
    outs = [hybrid.matmul(*leaves, backend=backend), dense_of(pattern, expected[0]) @ expected[1]]
    weights = random(2, shape[0], 3, seed=2)
    results = [
        [out, *torch.autograd.grad((out * weights.to(out)).sum(), given)]
        for out, given in zip(outs, (leaves, expected), strict=True)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


def cost(histogram: list[int], widths: tuple[int, ...]) -> float:
    """Return the cost that `bucket_widths` minimizes."""
    total = 0.0
    rest = sum(n * count for n, count in enumerate(histogram) if n > max(widths, default=-1))
    for n, count in enumerate(histogram):
        total += count * min((w for w in widths if w >= n), default=0)
    return total + len(widths) * ell.BUCKET_COST + (rest * ell.REST_COST + ell.BUCKET_COST if rest else 0)


def test_buckets_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with trying all widths."""
    rng = np.random.default_rng(0)
    for bucket in (1, 20, 200):
        monkeypatch.setattr(ell, "BUCKET_COST", bucket)
        for _ in range(10):
            histogram = (rng.integers(0, 40, 9) * (rng.random(9) < 0.7)).tolist()
            found = tuple(bucket_widths(histogram))
            every = [c for n in range(10) for c in combinations(range(9), n)]
            assert cost(histogram, found) == pytest.approx(min(cost(histogram, c) for c in every))


def test_rows_of_meshes_are_in_buckets() -> None:
    """A few rows of thousands of entries are the rest."""
    histogram = [0] * 5001
    histogram[5:9] = [20_000, 60_000, 18_000, 2_000]
    assert bucket_widths(histogram)[-1] == 8
    histogram[5000] = 3
    assert bucket_widths(histogram)[-1] in (7, 8)
    assert bucket_widths([]) == []


def test_a_width_below_the_longest_row_is_refused() -> None:
    with pytest.raises(ValueError, match="20, got 4"):
        EllPattern.from_pattern(random_pattern(13, 20), 4)


def test_strided_indices_become_contiguous() -> None:
    ell, _ = EllPattern.from_pattern(random_pattern(13, 20))
    for indices in (strided(ell.indices), ell.indices.T.contiguous().T):
        made = EllPattern(indices, 20)
        assert made.indices.is_contiguous()
        assert torch.equal(made.filled.indices, ell.filled.indices)
    assert EllPattern(ell.indices, 20).indices is ell.indices
    assert ell.filled is ell.filled  # made once
