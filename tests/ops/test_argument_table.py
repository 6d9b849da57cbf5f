"""Every public operation × wrong shape, dtype, stride, device, empty and non-finite input.

Both backends must agree on each row of this generated table: the same kind of error, or the same numbers.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from dense_cases import Case, cases, wrong_shapes
from float64 import random
from kernel_accuracy import LAYOUTS, column
from sparse_cases import poisoned as poisoned  # a fixture
from torch import Tensor

from diffnet import ops

pytestmark = [
    pytest.mark.usefixtures("one_thread", "poisoned"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the table runs kernels on CPU tensors, in the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # NumPy's, about NaN in Triton's interpreter
]

# Kernels multiply in another order. Products with inf and their differences are then inf in one order, NaN in another.
REASSOCIATED = ("spectral_gradient_features", "values_and_gradient_features", "diffusion_and_gradient_features")
KINDS = ("shape", "dtype", "stride", "device", "empty", "non-finite")
BLOCK = 16


class Row(NamedTuple):
    """One call: an operation with one argument replaced."""

    operation: str
    kind: str
    argument: str
    value: Any
    case: Case


def single(function: Callable[..., Any], **arguments: Any) -> Case:
    """An operation without kernels. Its rows must raise an error of a documented kind or give numbers."""
    return Case(function, arguments, backends=("torch",))


def sparse_cases() -> dict[str, Case]:
    """Valid calls of every sparse operation in float32. Index arrays of patterns are arguments, too."""
    pattern = ops.Pattern(torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 3, 0, 1, 2, 3]), 4)
    values, dense = random(6).float(), random(4, 3).float()
    bools = torch.tensor([[True, False], [True, True]])
    blocks = ops.BlockPattern.from_mask(bools, BLOCK)
    block_values, block_dense = random(*blocks.values_shape).float(), random(1, 2 * BLOCK, BLOCK).float()
    ell, _ = ops.EllPattern.from_pattern(pattern)
    hybrid = ops.HybridPattern.from_pattern(pattern)
    square = ops.Pattern(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), 2)
    indptr, indices = pattern.indptr, pattern.indices
    query, key, value = (random(1, 1, 2 * BLOCK, BLOCK).float() for _ in range(3))
    return {
        "spmm": Case(partial(ops.spmm, pattern), {"values": values, "x": dense}),
        "sddmm": Case(partial(ops.sddmm, pattern), {"a": dense, "b": random(4, 3).float()}),
        "row_sum": Case(partial(ops.row_sum, pattern), {"values": values}),
        "sparse_softmax": Case(partial(ops.sparse_softmax, pattern), {"scores": values}),
        "EllPattern": Case(ell.matmul, {"values": random(*ell.indices.shape).float(), "x": dense}),
        "HybridPattern": Case(hybrid.matmul, {"values": values, "x": dense}),
        "BlockPattern": single(blocks.to_dense, values=block_values),
        "block_matmul": Case(partial(ops.block_matmul, blocks, mode="dsd"), {"a": block_values, "b": block_dense}),
        "block_softmax": Case(partial(ops.block_softmax, blocks), {"scores": block_values}),
        "block_attention": Case(partial(ops.block_attention, blocks), {"query": query, "key": key, "value": value}),
        "implicit_diffusion": Case(
            lambda x, time, values, mass, ptr, backend: ops.implicit_diffusion(
                x, time, ops.SparseMatrix(square, values), mass, ptr, max_iterations=4, check_every=2, backend=backend
            ),
            {
                "x": random(2, 3).float(),
                "time": random(3).float().abs(),
                "values": torch.tensor([1.0, 0.0, 1.0]),
                "mass": torch.ones(2),
                "ptr": torch.tensor([0, 2]),
            },
        ),
        "Pattern": Case(
            lambda indptr, indices, x, backend: ops.spmm(ops.Pattern(indptr, indices, 4), values, x, backend=backend),
            {"indptr": indptr, "indices": indices, "x": dense},
        ),
        "SparseMatrix": Case(
            lambda values, x, backend: ops.spmm(pattern, ops.SparseMatrix(pattern, values).values, x, backend=backend),
            {"values": values, "x": dense},
        ),
        "diagonal": single(partial(ops.diagonal, pattern), values=values),
        "block_diagonal": single(
            lambda values: ops.block_diagonal([ops.SparseMatrix(square, values)] * 2).values, values=random(3).float()
        ),
        "split_diagonal": single(
            lambda values: ops.split_diagonal(ops.SparseMatrix(square, values), [2, 0])[0].values,
            values=random(3).float(),
        ),
        "block_diagonal_pattern": single(
            lambda indptr, indices: ops.block_diagonal_pattern([ops.Pattern(indptr, indices, 4)] * 2).indices,
            indptr=indptr,
            indices=indices,
        ),
        "split_diagonal_pattern": single(
            lambda indptr, indices: ops.split_diagonal_pattern(ops.Pattern(indptr, indices, 4), [4])[0][0].indices,
            indptr=indptr,
            indices=indices,
        ),
    }


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    for name, case in {**cases(), **sparse_cases()}.items():
        for argument in [*case.floating, *case.indices]:
            x = case.arguments[argument]
            for kind, value in replacements(x):
                if kind == "non-finite" and name in REASSOCIATED and value.is_floating_point() and value.isinf().any():
                    continue
                yield Row(name, kind, argument, value, case)


def replacements(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from (("shape", wrong) for wrong in wrong_shapes(x))
    wrong_dtypes = (torch.int64, torch.bool, torch.complex64) if x.is_floating_point() else (torch.float32, torch.int16)
    yield from (("dtype", x.to(dtype)) for dtype in wrong_dtypes)
    if x.ndim == 1:
        yield "stride", column(x) if x.is_floating_point() else torch.stack([x, 0 * x], 1)[:, 0]
    else:
        yield from (("stride", layout(x)) for layout in LAYOUTS)
    yield "device", x.to("meta")
    yield from (("empty", x.narrow(d, 0, 0)) for d in range(x.ndim))
    strange = (torch.nan, torch.inf) if x.is_floating_point() else (-1, 2**40)
    for number in strange:
        changed = x.clone()
        changed.view(-1)[x.numel() // 2] = number
        yield "non-finite", changed


def outcome(row: Row, backend: str) -> type[Exception] | list[Tensor]:
    try:
        return row.case.run(backend, **{row.argument: row.value})
    except (TypeError, ValueError, IndexError) as error:
        return type(error)


TABLE = list(rows())
OPERATIONS = list({row.operation: None for row in TABLE})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_backends_agree(operation: str) -> None:
    for row in TABLE:
        if row.operation != operation:
            continue
        where = f"{row.operation}: {row.kind} of {row.argument}, {row.value.dtype} {tuple(row.value.shape)}"
        first, second = (outcome(row, backend) for backend in (row.case.backends * 2)[:2])
        if isinstance(first, type) or isinstance(second, type):
            assert first is second, (where, first, second)
            continue
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(
                b, a, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, where=where: f"{where}\n{m}"
            )


def test_the_table_is_complete() -> None:
    """Every operation has a row of each kind. `row_offsets` takes no tensor, see below."""
    names = {n for n in ops.__all__ if inspect.isclass(getattr(ops, n)) or inspect.isfunction(getattr(ops, n))}
    assert names - {"row_offsets"} == set(OPERATIONS)
    found = Counter((row.operation, row.kind) for row in TABLE)
    missing = [(operation, kind) for operation in OPERATIONS for kind in KINDS if found[operation, kind] == 0]
    assert not missing
    assert len(TABLE) >= 400
