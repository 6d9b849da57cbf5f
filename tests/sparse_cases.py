"""Patterns, fixtures and test cases that the tests of sparse operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import DEVICE, random
from torch import Tensor

from diffnet.ops import Pattern
from diffnet.ops.sparse import pattern as pattern_module

Shape: TypeAlias = tuple[int, int, int] | str

PIECE = 16  # in these tests, so that rows of several pieces are small enough for Triton's interpreter
BACKENDS = ["torch", "auto", "triton"]  # on a CPU, "auto" is PyTorch's own sparse products
# (rows, columns, channels). "skewed" has a row of several pieces and a full row.
SHAPES: list[Shape] = [(9, 6, 3), (1, 17, 5), (17, 1, 1), (7, 96, 40), (11, 55, 8), (12, 12, 130), "skewed"]
# (backend, dtype, index dtype, the shapes that are fast enough for the interpreter)
_KINDS: list[tuple[str, torch.dtype, torch.dtype, list[Shape]]] = [
    ("torch", torch.float64, torch.int64, SHAPES),
    ("torch", torch.bfloat16, torch.int32, SHAPES),
    ("auto", torch.float64, torch.int64, SHAPES),
    ("auto", torch.float32, torch.int32, SHAPES),
    ("auto", torch.bfloat16, torch.int32, SHAPES),
    ("triton", torch.float32, torch.int32, [(9, 6, 3), (17, 1, 1), (12, 12, 130), "skewed"]),
    ("triton", torch.bfloat16, torch.int32, [(9, 6, 3)]),
    ("triton", torch.float16, torch.int64, [(9, 6, 3)]),
]


def shape_id(shape: Shape) -> str:
    return shape if isinstance(shape, str) else "x".join(map(str, shape))


def name_of(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def cases_of(kinds: Sequence[tuple[Any, ...]], shapes: Sequence[Any], shape_id: Callable[[Any], str]) -> list[Any]:
    """Each kind with each shape. The last entry of a kind are the shapes that are fast enough for the interpreter."""
    return [
        pytest.param(
            shape,
            *kind,
            id="-".join([*map(name_of, kind), shape_id(shape)]),
            marks=() if shape in interpreted else pytest.mark.gpu,
        )
        for *kind, interpreted in kinds
        for shape in shapes
    ]


cases = pytest.mark.parametrize(("shape", "backend", "dtype", "index"), cases_of(_KINDS, SHAPES, shape_id))
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 16 entries are long. Softmax reads short and long rows in several windows."""
    from diffnet.ops.sparse import softmax_kernels, spmm_kernels

    monkeypatch.setattr(softmax_kernels, "WINDOW", 4)
    monkeypatch.setattr(softmax_kernels, "LONG_WINDOW", 16)
    for module in (pattern_module, spmm_kernels, softmax_kernels):
        monkeypatch.setattr(module, "PIECE", PIECE)


def random_mask(shape: Shape) -> tuple[np.ndarray, int]:
    """Return a random mask with an empty row and an empty column, and the channels of the dense factors."""
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


def random_pattern(shape: Shape = (9, 6, 3), index: torch.dtype = torch.int32) -> Pattern:
    return pattern_of(random_mask(shape)[0], index)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same tensor with a stride of 3 in its last dimension. The elements between hold other values."""
    other = ~x if x.dtype == torch.bool else x + 1
    out = torch.stack([x, other, other], dim=-1)[..., 0]
    assert x.numel() < 2 or not out.is_contiguous()
    return out


def padded(x: Tensor) -> Tensor:
    """Return the same tensor as the left half of a wider one, so that rows are twice as far apart."""
    return torch.cat([x, x.flip(-1)], dim=-1)[..., : x.shape[-1]]


def dense_of(pattern: Pattern, values: Tensor) -> Tensor:
    """Convert values (…, nnz) to a dense (…, rows, columns), differentiably."""
    place = pattern.row_indices.long() * pattern.columns + pattern.column_indices.long()
    flat = values.new_zeros(*values.shape[:-1], pattern.shape[0] * pattern.columns)
    return flat.index_add(-1, place, values).reshape(*values.shape[:-1], *pattern.shape)


def dense_softmax(pattern: Pattern, scores: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Softmax over the rows of a dense matrix. Returns the entries, (…, nnz)."""
    visible = torch.ones_like(scores) if mask is None else mask.to(scores).expand_as(scores)
    hidden = dense_of(pattern, visible) == 0
    weights = torch.softmax((scale * dense_of(pattern, scores)).masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0)
    return weights[..., pattern.row_indices.long(), pattern.column_indices.long()]


def check_softmax_of_nan(
    softmax: Callable[[Tensor], Tensor], rows: Tensor, keep: Tensor, at: Sequence[int], value: float, all_grads: bool
) -> None:
    """In rows with such a value, visible entries are NaN and hidden ones 0. Other rows are as without the value.

    softmax: scores (2, n) → (2, n)
    rows, keep: (n,), the row of each entry, and whether it is visible. Hidden entries hold NaN, without any effect.
    at: the rows that get the value
    all_grads: whether the gradients of hidden entries in these rows are NaN, too
    """
    scores = random(2, len(rows)).float()
    spoiled, broken = scores.masked_fill(~keep, torch.nan), torch.isin(rows, torch.tensor(at))
    for row in at:
        spoiled[0, (keep & (rows == row)).nonzero()[-1, 0]] = value
    results = []
    for given in (spoiled, scores):
        leaf = given.to(DEVICE).requires_grad_()
        out = softmax(leaf)
        (grad,) = torch.autograd.grad(out, leaf, random(2, len(rows), seed=2).float().to(DEVICE))
        results.append([out.detach().cpu(), grad.cpu()])
    (out, grad), (expected, expected_grad) = results
    assert out[0, broken & keep].isnan().all()
    assert (out[:, ~keep] == 0).all()
    assert grad[0, broken if all_grads else broken & keep].isnan().all()
    expected[0, broken], expected_grad[0, broken] = out[0, broken], grad[0, broken]
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)
