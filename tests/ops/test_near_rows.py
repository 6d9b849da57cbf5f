"""Rows of a pattern in a bad order are taken in groups of neighbors, which changes no result."""

from __future__ import annotations

import pytest
import torch
from float64 import DEVICE, random
from torch import Tensor

from diffnet.benchmarks.harness.patterns import mesh_pattern
from diffnet.ops import Pattern, sddmm, spmm
from diffnet.ops.sparse import csr as module
from diffnet.ops.sparse.csr import near_rows

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GAP", 60)
    monkeypatch.setattr(module, "GROUP", 512)


def order_of(pattern: Pattern) -> Tensor:
    return near_rows(pattern.indptr, pattern.indices, pattern.columns)


def test_groups_of_a_shuffled_mesh(small_groups: None) -> None:
    """Groups are compact: 64 rows read 2 columns for each row at most, where a square of 8 × 8 reads 1.6."""
    pattern = mesh_pattern(4096, "shuffled", CPU)
    order = pattern.rows_by_length
    assert order.dtype == pattern.indices.dtype
    assert torch.equal(order.sort().values, torch.arange(4096).int())
    assert torch.equal(order, order_of(pattern))  # the same in every run
    read = [len(group.unique()) / 64 for group in pattern.indices.reshape(-1, 7)[order.long()].split(64)]
    assert sum(read) / len(read) < 2.2


def test_other_patterns_keep_their_order(small_groups: None) -> None:
    """Meshes in a good order, random graphs, patterns without entries, and those that are not square."""
    shuffled = mesh_pattern(4096, "shuffled", CPU)
    generator = torch.Generator().manual_seed(0)
    assert len(order_of(shuffled)) == 4096
    assert len(order_of(mesh_pattern(4096, "local", CPU))) == 0
    assert len(order_of(Pattern.random(1000, 1000, 0.01, generator))) == 0
    assert len(order_of(Pattern(torch.zeros(101).int(), torch.zeros(0).int(), 100))) == 0
    assert len(order_of(Pattern(shuffled.indptr, shuffled.indices, 4097))) == 0


def test_rows_without_entries(small_groups: None) -> None:
    """A group may have one row, and rows may have no entry on the diagonal."""
    pattern = mesh_pattern(4096, "shuffled", CPU)
    kept = (pattern.row_indices % 5 > 0) & (pattern.row_indices != pattern.column_indices)
    lengths = torch.bincount(pattern.row_indices[kept], minlength=4096)
    order = order_of(Pattern.from_row_lengths(lengths, pattern.indices[kept], 4096))
    assert torch.equal(order.sort().values, torch.arange(4096).int())


def test_results_are_equal_to_the_bit(small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_GAIN", 1)
    pattern = mesh_pattern(256, "shuffled", CPU)
    none = pattern.indices[:0]
    transposed, entries = pattern.transpose
    plain = pattern.with_known(rows_by_length=none, transpose=(transposed.with_known(rows_by_length=none), entries))
    assert len(pattern.rows_by_length) == len(transposed.rows_by_length) == 256
    results = []
    for each in (pattern.to(DEVICE), plain.to(DEVICE)):
        values, x = (random(n, 3, seed=n).float().to(DEVICE).requires_grad_() for n in (pattern.nnz, 256))
        out = spmm(each, values[:, 0], x, backend="triton")
        turned = spmm(each, values[:, 1], x, transpose=True, backend="triton")
        sampled = sddmm(each, out, turned, backend="triton")
        results.append([out, turned, sampled, *torch.autograd.grad(sampled.square().sum(), [values, x])])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
