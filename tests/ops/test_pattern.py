"""Patterns: how they are made, checked, transposed, reordered and packed."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from float64 import random
from refusals import refused
from sparse_cases import (
    PIECE,
    dense_of,
    ints,
    pattern_of,
    random_mask,
    random_pattern,
    small_pieces as small_pieces,  # a fixture
    strided,
)
from torch import Tensor

from diffnet.ops import (
    EllPattern,
    Pattern,
    SparseMatrix,
    block_diagonal,
    block_diagonal_pattern,
    sddmm,
    split_diagonal,
    split_diagonal_pattern,
    spmm,
)

# Some tests read private fields to see whether a pattern has computed them already. The properties would compute them.
pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces")


@pytest.mark.parametrize(
    ("indptr", "indices", "columns", "message"),
    [
        pytest.param(ints(0, 2, 1), ints(0), 3, "got 2 then 1 at row 1", id="indptr descends"),
        pytest.param(ints(1, 2), ints(0, 1), 3, "start at 0, got 1", id="indptr starts at 1"),
        pytest.param(ints(0, 2), ints(0, 1, 2), 3, "number of indices, 3, got 2", id="indptr ends early"),
        pytest.param(ints(0, 2), ints(0, 3), 3, "from 0 to 2, got 3 at entry 1", id="column too large"),
        pytest.param(ints(0, 2), ints(-4, 2), 3, "from 0 to 2, got -4 at entry 0", id="negative column"),
        pytest.param(ints(0, 1, 3), ints(2, 1, 0), 3, "1 before 0 in row 1", id="columns descend"),
        pytest.param(ints(0, 1, 3), ints(1, 2, 2), 3, "column 2 twice in row 1", id="column twice"),
        pytest.param(ints(0, 1), ints(0, dtype=torch.int32), 3, "one dtype", id="two dtypes"),
        pytest.param(ints(0, 1).double(), ints(0), 3, "float64", id="float indptr"),
        pytest.param(ints(0, 1), ints(0)[None], 3, r"\(1, 1\)", id="2-D indices"),
        pytest.param(ints(0, 0), ints(), -2, "columns should be at least 0, got -2", id="negative number of columns"),
        pytest.param(ints(), ints(), 2, "got none", id="no indptr"),
    ],
)
def test_wrong_arrays_are_refused(indptr: Tensor, indices: Tensor, columns: int, message: str) -> None:
    refused(ValueError, message, Pattern, indptr, indices, columns)
    assert Pattern(indptr, indices, columns, check=False).columns == columns


@pytest.mark.parametrize(
    ("order", "message"),
    [
        pytest.param(ints(0, 1), r"\(3,\), dtype torch.int32.*shape \(2,\)", id="too short"),
        pytest.param(ints(0, 1, 1), "row 2 is missing or twice", id="row twice"),
        pytest.param(ints(0, 1, 3), "row 2 is missing or twice", id="row too large"),
        pytest.param(ints(-1, 1, 2), "row 0 is missing or twice", id="negative row"),
    ],
)
def test_wrong_row_orders_are_refused(order: Tensor, message: str) -> None:
    refused(ValueError, message, pattern_of(np.ones((3, 3), dtype=bool)).with_row_order, order)


def test_errors_name_rows_in_their_own_order() -> None:
    refused(ValueError, "column 2 twice in row 3", Pattern, ints(0, 1, 1, 3, 3), ints(0, 2, 2), 3, ints(1, 0, 3, 2))


@pytest.mark.parametrize("check", [True, False])
def test_strided_arrays_become_contiguous(check: bool) -> None:
    """A column of an (E, 2) edge list is a strided array."""
    pattern, _ = random_pattern().with_row_order(torch.arange(9).flip(0))
    assert pattern.row_order is not None
    given = [strided(t) for t in (pattern.stored_indptr, pattern.stored_indices)]
    made = Pattern(*given, pattern.columns, strided(pattern.row_order), check=check)
    assert made.row_order is not None
    for name in ("stored_indptr", "stored_indices", "row_order"):
        assert getattr(made, name).is_contiguous()
        assert torch.equal(getattr(made, name), getattr(pattern, name))
    edges = torch.stack([pattern.row_indices, pattern.column_indices], dim=1)
    assert Pattern(pattern.stored_indptr, edges[:, 1], 6, check=check).indices.is_contiguous()


def test_contiguous_arrays_are_shared() -> None:
    indptr, indices = ints(0, 2, 3), ints(0, 2, 1)
    pattern = Pattern(indptr, indices, 3)
    assert pattern.indptr is indptr
    assert pattern.indices is indices


def test_from_row_lengths() -> None:
    pattern = random_pattern()
    again = Pattern.from_row_lengths(pattern.row_lengths, pattern.indices, 6)
    assert torch.equal(again.indptr, pattern.indptr)
    assert again.indptr.dtype == torch.int32
    refused(ValueError, "float", Pattern.from_row_lengths, torch.ones(3), pattern.indices, 6)
    refused(ValueError, r"indices should be .* of shape \(\)", Pattern.from_row_lengths, ints(1, 1), ints(1)[0], 6)
    refused(ValueError, "indices should be .*float32", Pattern.from_row_lengths, ints(1, 1), torch.ones(2), 6)
    refused(ValueError, "descend", Pattern.from_row_lengths, ints(3, -1, 1), ints(0, 1, 2), 6)


def test_vector() -> None:
    vector = SparseMatrix(Pattern.vector(ints(1, 4), 6), random(2))
    assert vector.pattern.shape == (1, 6)
    refused(ValueError, r"indices should be .* of shape \(\)", Pattern.vector, ints(1)[0], 6)
    x = random(6, 3)
    torch.testing.assert_close((vector @ x)[0], vector.values @ x[[1, 4]])


def test_transpose() -> None:
    matrix = SparseMatrix(random_pattern(), random(2, random_pattern().nnz))
    pattern, order = matrix.pattern.transpose
    assert pattern.shape == (6, 9)
    Pattern(pattern.indptr, pattern.indices, 9)  # passes the checks
    torch.testing.assert_close(dense_of(pattern, matrix.values[:, order]), dense_of(matrix.pattern, matrix.values).mT)
    torch.testing.assert_close(
        dense_of(matrix.mT.pattern, matrix.mT.values), dense_of(pattern, matrix.values[:, order])
    )
    assert matrix.pattern.transpose[0] is pattern  # sorted once


def test_long_pieces() -> None:
    """Every entry of a long row is in one piece. A row of exactly PIECE entries isn't long."""
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
    """Rows are sorted only if the lengths of neighbors differ much, and in a packed pattern within each part."""
    even, uneven, long = (
        Pattern.from_row_lengths(torch.tensor(n), torch.cat([torch.arange(i) for i in n]).int(), max(n))
        for n in ([3, 4, 2, 3] * 8, [1, 1, 9, 1, 1, 1, 1, 1] * 4, [2 * PIECE] + [2] * 15)
    )
    assert len(even.rows_by_length) == 0
    assert len(long.rows_by_length) == 0  # its pieces have their own programs
    numbers = torch.arange(32)
    for wrong, message in (
        (torch.zeros(32), "row 1 is missing or twice"),
        (numbers[:31], r"\(32,\).*\(31,\)"),
        (numbers + (numbers > 30), "row 31 is missing"),
    ):
        refused(ValueError, f"rows_by_length.*{message}", uneven.with_known, rows_by_length=wrong.int())
    order = uneven.rows_by_length
    assert order.dtype == torch.int32
    assert sorted(order.tolist()) == list(range(32))
    assert uneven.row_lengths[order.long()].tolist() == sorted(uneven.row_lengths.tolist())
    square = [pattern_of(np.eye(5, dtype=bool)).prepare(), pattern_of(np.eye(3, dtype=bool)).prepare()]
    # The private field, since no pattern this small is sorted: packing has to keep the order of each part.
    object.__setattr__(square[1], "_by_length", torch.tensor([2, 0, 1], dtype=torch.int32))
    packed = block_diagonal([SparseMatrix(p, torch.ones(p.nnz)) for p in square]).pattern
    assert packed._by_length is not None  # see above
    assert packed._by_length.tolist() == [0, 1, 2, 3, 4, 7, 5, 6]
    alike = block_diagonal([SparseMatrix(square[0], torch.ones(5))] * 2).pattern
    assert alike._by_length is not None
    assert len(alike._by_length) == 0


def test_row_orders_are_kept_by_other_operations() -> None:
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
    refused(ValueError, "rows 0 to 4 form a block", split_diagonal_pattern, mixed, [5, 5])
    wide, _ = pattern_of(np.ones((5, 6), dtype=bool)).with_row_order(order)
    assert wide.transpose[0].row_order is None


def test_block_diagonal_and_back() -> None:
    parts = []
    for n in (5, 2 * PIECE, 4):
        mask = np.random.default_rng(n).random((n, n)) < 0.3
        mask[n // 2] = n > PIECE
        parts.append(SparseMatrix(pattern_of(mask), random(2, int(mask.sum()))))
    # The private field shows whether the result was computed already. The property would compute it.
    assert block_diagonal(parts).pattern._transpose is None
    for part in parts:
        part.pattern.prepare()
    packed = block_diagonal(parts)
    torch.testing.assert_close(
        dense_of(packed.pattern, packed.values[0]), torch.block_diag(*(dense_of(m.pattern, m.values[0]) for m in parts))
    )
    # The combined results of the parts must equal the results found for the whole.
    fresh, kept = Pattern(packed.pattern.indptr, packed.pattern.indices, packed.pattern.columns), packed.pattern
    assert kept._transpose is not None
    # The private field shows whether the result was computed already. The property would compute it.
    assert kept._long_pieces is not None
    assert kept._transpose[0]._long_pieces is not None
    assert len(kept.long_pieces) == 2
    (a, *ours), (b, *found) = (
        (p.transpose[0], p.transpose[1], p.long_pieces, p.transpose[0].long_pieces) for p in (kept, fresh)
    )
    assert torch.equal(a.indptr, b.indptr)
    assert torch.equal(a.indices, b.indices)
    torch.testing.assert_close(ours, found, rtol=0, atol=0)
    for part, again in zip(parts, split_diagonal(packed, [5, 2 * PIECE, 4]), strict=True):
        torch.testing.assert_close(again.values, part.values)
        torch.testing.assert_close(again.pattern.indptr, part.pattern.indptr)
        torch.testing.assert_close(again.pattern.indices, part.pattern.indices)
        assert again.pattern._transpose is not None
        for split, found in zip(again.pattern.transpose, part.pattern.transpose, strict=True):
            arrays = [(x.indptr, x.indices) if isinstance(x, Pattern) else (x,) for x in (split, found)]
            torch.testing.assert_close(*arrays, rtol=0, atol=0)


def test_moving_a_pattern_moves_its_findings() -> None:
    pattern = pattern_of(random_mask("skewed")[0]).prepare()
    moved = pattern.to("meta")
    for found in (moved._long_pieces, moved._by_length):
        assert found is not None
        assert found.device.type == "meta"
    assert moved._transpose is not None
    assert moved._transpose[0]._long_pieces is not None
    assert pattern.to("cpu") is pattern


# ---- wrong arguments ----

INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
PARAMETER = torch.nn.Parameter(INDICES, requires_grad=False)
WITH_NEW_ORDER: Any = Pattern(INDPTR, INDICES, 3).with_row_order
# A call and its arguments, and the message of the error.
WRONG_ARRAYS: list[tuple[Any, tuple[Any, ...], str]] = [
    (Pattern, ([0, 2, 3], INDICES, 3), "indptr should be a tensor, got list; convert it with torch.tensor"),
    (Pattern, (INDPTR.numpy(), INDICES, 3), "indptr should be a tensor, got ndarray; convert it with torch.from_numpy"),
    (Pattern, (PARAMETER, INDICES, 3), "indptr should be a plain tensor, got Parameter; write indptr.data"),
    (Pattern, (INDPTR, (0, 2, 1), 3), "indices should be a tensor, got tuple; convert it with torch.tensor"),
    (Pattern, (INDPTR, PARAMETER, 3), "got Parameter; write indices.data"),
    (Pattern, (INDPTR, None, 3), "indices should be a tensor, got NoneType"),
    (Pattern, (INDPTR, INDICES, 3, [0, 1]), "row_order should be a tensor, got list"),
    (WITH_NEW_ORDER, ([1, 0],), "order should be a tensor, got list"),
    (Pattern.from_row_lengths, ([2, 1], INDICES, 3), "lengths should be a tensor, got list"),
    (Pattern.from_row_lengths, (INDICES[:2], INDICES.numpy(), 3), "indices should be a tensor, got ndarray"),
    (Pattern.vector, ([0, 2], 3), "indices should be a tensor, got list"),
    (Pattern.vector, (PARAMETER, 3), "indices should be a plain tensor, got Parameter"),
    (Pattern, (INDPTR, INDICES, 5.0), "columns should be an integer, got 5.0 of type float"),
    (Pattern, (INDPTR, INDICES, True), "columns should be an integer, got True of type bool"),
    (Pattern, (INDPTR, INDICES, torch.tensor(3)), "columns should be an integer, got tensor(3) of type Tensor"),
    (Pattern.vector, (INDICES[:2], "3"), "columns should be an integer, got '3' of type str"),
]


def test_wrong_types_are_refused() -> None:
    for make, arguments, message in WRONG_ARRAYS:
        refused(TypeError, re.escape(message), make, *arguments)


def test_patterns_on_the_meta_device() -> None:
    pattern = Pattern(INDPTR.to("meta"), INDICES.to("meta"), 3).prepare()
    assert pattern.shape == (2, 3)
    assert pattern.transpose[0].shape == (3, 2)
    refused(TypeError, "columns should be an integer", Pattern, INDPTR.to("meta"), INDICES.to("meta"), 3.0)


def square() -> Pattern:
    """Blocks of 2, 0 and 3 rows, the last stored backwards."""
    rows = [[0, 1], [1], [2, 4], [3], [2, 4]]
    lengths = torch.tensor([len(row) for row in rows])
    pattern = Pattern.from_row_lengths(lengths, torch.tensor([c for row in rows for c in row]), 5)
    return pattern.with_row_order(torch.tensor([0, 1, 4, 3, 2]))[0]


def test_splits_follow_blocks() -> None:
    for lengths in ([2, 0, 3], [2, 3], [5], [0, 2, 3, 0]):
        whole = square().prepare()
        parts = split_diagonal_pattern(whole, lengths)
        for part, own in parts:
            transposed, position = part.transpose
            assert torch.equal(part.row_indices[position], transposed.column_indices)
            assert torch.equal(part.column_indices[position], transposed.row_indices)
            assert len(part.long_pieces) == len(whole.long_pieces) == 0
            assert part.nnz == own.stop - own.start
        assert [p.shape for p, _ in parts] == [(n, n) for n in lengths]
        together = block_diagonal_pattern([p for p, _ in parts])
        assert torch.equal(together.row_indices, square().row_indices)
        assert torch.equal(together.column_indices, square().column_indices)


def test_splits_cut_no_entry() -> None:
    for lengths in ([1, 1, 3], [3, 2], [2, 1, 1, 1]):
        plain = square().with_row_order(None)[0]
        first = min(
            (int(e), int(r), int(c))
            for e, (r, c) in enumerate(zip(plain.row_indices, plain.column_indices, strict=True))
            if block_of(int(r), lengths) != block_of(int(c), lengths)
        )[1:]
        message = f"lengths should cut no entry, got {lengths}, which cut entry {first}"
        refused(ValueError, re.escape(message), split_diagonal_pattern, plain, lengths)


def block_of(row: int, lengths: list[int]) -> int:
    return next(b for b in range(len(lengths)) if row < sum(lengths[: b + 1]))


def test_lengths_of_a_split() -> None:
    for lengths in ([2, 2], [5, 1], [6, -1], []):
        refused(ValueError, re.escape(f"pattern, 5 and 5, got {lengths}"), split_diagonal_pattern, square(), lengths)
    refused(ValueError, "2 and 3, got", split_diagonal_pattern, Pattern(INDPTR, INDICES, 3), [2])


def test_blocks_that_cannot_be_packed() -> None:
    pattern = Pattern(INDPTR, INDICES, 3)
    refused(ValueError, "one block or more, got none", block_diagonal_pattern, [])
    with pytest.raises(ValueError, match=r"one dtype on one device, got torch\.int32 on cpu, torch\.int64 on cpu"):
        block_diagonal_pattern([pattern, Pattern(INDPTR.int(), INDICES.int(), 3)])
    with pytest.raises(ValueError, match=r"one device, got torch\.int64 on cpu, torch\.int64 on meta"):
        block_diagonal_pattern([pattern, pattern.to("meta")])


@pytest.mark.parametrize("trace", ["export", "grad"])
def test_patterns_remember_nothing_from_a_trace(trace: str) -> None:
    pattern, ell = (random_pattern() for _ in range(2))
    ell, (rows, columns) = EllPattern.from_pattern(ell)[0], pattern.shape

    class Products(torch.nn.Module):
        def forward(self, values: Tensor, x: Tensor) -> Tensor:
            y = spmm(pattern, values, spmm(pattern, values, x), transpose=True)
            z = y * sddmm(pattern, x.new_ones(rows, 2), x)[:1]
            return (z if trace == "export" else z + ell.matmul(ell_values, x).sum()).sum()

    values, x, ell_values = random(pattern.nnz), random(columns, 2), random(*ell.indices.shape)
    if trace == "export":
        torch.export.export(Products(), (values, x))
    else:
        torch.func.grad(Products())(values, x)
    # The properties would compute what the private fields remember.
    assert pattern._transpose is pattern._long_pieces is pattern._by_length is ell._csr is None
    assert pattern._product_arrays == {}  # neither does this one have a value
    out = Products()(values.requires_grad_(), x)
    (grad,) = torch.autograd.grad(out, values)
    assert type(out) is type(grad) is Tensor


@pytest.mark.parametrize("lengths", [([2, 3], [4, 1]), ([2, 0, 1], [0, 3, 2]), ([0], [3]), ([], [])], ids=str)
def test_pattern_between_the_meshes_of_two_batches(lengths: tuple[list[int], list[int]]) -> None:
    blocks = [torch.ones(a, b, dtype=torch.bool) for a, b in zip(*lengths, strict=True)]
    expected = torch.block_diag(*blocks) > 0 if blocks else torch.zeros(0, 0, dtype=torch.bool)
    found, dense = Pattern.between(*lengths), Pattern.from_mask(expected)
    assert found.shape == dense.shape
    assert torch.equal(found.indptr, dense.indptr)
    assert torch.equal(found.indices, dense.indices)
    refused(ValueError, "one for each mesh of both", Pattern.between, [*lengths[0], 1], lengths[1])
