"""Arguments of ELL and hybrid patterns: shapes, dtypes, devices and strides. Both backends accept the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from float64 import DEVICE, random
from sparse_cases import backends, dense_of, ints, random_pattern
from sparse_cases import small_pieces as small_pieces  # a fixture
from torch import Tensor

from diffnet.ops import Backend, EllPattern, HybridPattern, Pattern, sparse_softmax

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")

PATTERN = random_pattern()  # (9, 6)
NNZ = PATTERN.nnz
ELL, ENTRIES = EllPattern.from_pattern(PATTERN)
WIDTH = ELL.indices.shape[1]
VALUES = {"ell": (9, WIDTH), "hybrid": (NNZ,)}  # the last dimensions of values


def made(name: str) -> Any:
    return EllPattern(ELL.indices.to(DEVICE), 6) if name == "ell" else HybridPattern.from_pattern(PATTERN.to(DEVICE))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# (the name of an operation, options, the shapes of its operands; None stands for values)
OPERATIONS: dict[str, tuple[str, dict[str, Any], list[tuple[int, ...] | None]]] = {
    "matmul": ("matmul", {}, [None, (6, 3)]),
    "transposed": ("matmul", {"transpose": True}, [None, (9, 3)]),
    "sddmm": ("sddmm", {}, [(9, 3), (6, 3)]),
    "softmax": ("softmax", {}, [None]),
}
ROWS = [(name, operation) for name in VALUES for operation in OPERATIONS]
rows = pytest.mark.parametrize(("name", "operation"), ROWS, ids=["-".join(row) for row in ROWS])


def shapes_of(name: str, operation: str) -> list[tuple[int, ...]]:
    return [VALUES[name] if shape is None else shape for shape in OPERATIONS[operation][2]]


def call(name: str, operation: str, operands: list[Any], backend: Backend) -> Tensor:
    method, options, _ = OPERATIONS[operation]
    out: Tensor = getattr(made(name), method)(*operands, **options, backend=backend)
    return out


@backends
@rows
def test_wrong_shapes_are_refused(name: str, operation: str, backend: Backend) -> None:
    """One more or less along each dimension, 1 for it, and a missing dimension, for each operand."""
    right = shapes_of(name, operation)
    call(name, operation, [zeros(*shape) for shape in right], backend)
    for i, shape in enumerate(right):
        free = len(shape) - 1 if OPERATIONS[operation][2][i] is not None else None  # the channels
        if operation == "sddmm":
            free = None
        wrong = [shape[1:]]
        for d in range(len(shape)):
            if d != free:
                wrong += [(*shape[:d], n, *shape[d + 1 :]) for n in (shape[d] - 1, shape[d] + 1, 1)]
        for other in wrong:
            operands = [zeros(*(other if j == i else s)) for j, s in enumerate(right)]
            with pytest.raises(ValueError, match="should have shape"):
                call(name, operation, operands, backend)


@backends
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_promoted(dtype: torch.dtype, name: str, backend: Backend) -> None:
    values = (random(NNZ) > 0).to(dtype)
    given = values if name == "hybrid" else torch.where(ENTRIES >= 0, values[ENTRIES.clamp(min=0)], 1).to(dtype)
    a, x = random(9, 2).float(), random(6, 2, seed=1).float()
    pattern, given = made(name), given.to(DEVICE)
    out = pattern.matmul(given, x.to(DEVICE), backend=backend)
    torch.testing.assert_close(out.cpu(), dense_of(PATTERN, values.float()) @ x)
    out = pattern.matmul(given, a.to(DEVICE), transpose=True, backend=backend)
    torch.testing.assert_close(out.cpu(), dense_of(PATTERN, values.float()).mT @ a)
    counts = pattern.sddmm(torch.ones(9, 2, dtype=dtype, device=DEVICE), x.to(DEVICE), backend=backend)
    assert counts.dtype == torch.float32


WRONG_MASKS = [
    pytest.param(lambda s: zeros(*s), "bool", id="float"),
    pytest.param(lambda s: np.ones(s, dtype=bool), "bool, got ndarray", id="array"),
    pytest.param(
        lambda s: zeros(*s[:-1], s[-1] + 1, dtype=torch.bool), r"mask should broadcast to \(2,", id="too long"
    ),
    pytest.param(lambda s: zeros(3, *s, dtype=torch.bool), r"mask should broadcast to \(2,", id="too many sets"),
    pytest.param(lambda s: zeros(1, 1, *s, dtype=torch.bool)[..., :0], "mask should broadcast", id="empty"),
    pytest.param(lambda s: torch.tensor(True, device=DEVICE), r"shape is \(\)", id="scalar"),
    pytest.param(lambda s: zeros(*s, dtype=torch.bool, device="meta"), "it is on meta", id="device"),
]


@backends
@pytest.mark.parametrize("name", ["ell", "hybrid", "csr"])
@pytest.mark.parametrize(("mask", "message"), WRONG_MASKS)
def test_wrong_masks_are_refused(
    mask: Callable[[tuple[int, ...]], Any], message: str, name: str, backend: Backend
) -> None:
    shape = VALUES.get(name, (NNZ,))
    softmax = partial(sparse_softmax, PATTERN.to(DEVICE)) if name == "csr" else made(name).softmax
    with pytest.raises(ValueError, match=message):
        softmax(zeros(2, *shape), mask=mask(shape), backend=backend)


@backends
@pytest.mark.parametrize("name", VALUES)
def test_wrong_biases_and_scales_are_refused(name: str, backend: Backend) -> None:
    scores, shape = zeros(2, *VALUES[name]), VALUES[name]
    for bias in (zeros(*shape, dtype=torch.int64), zeros(3, *shape), zeros(*shape, device="meta"), [1.0]):
        with pytest.raises((TypeError, ValueError), match="bias"):
            made(name).softmax(scores, bias=bias, backend=backend)
    for scale in (zeros(3), zeros(2, dtype=torch.int64), "1"):
        with pytest.raises((TypeError, ValueError), match="scale"):
            made(name).softmax(scores, scale=scale, backend=backend)


@backends
def test_masks_of_ell_broadcast(backend: Backend) -> None:
    """Over sets, rows and places."""
    scores = random(2, 3, 9, WIDTH).float()
    ell, pattern = made("ell"), PATTERN.to(DEVICE)
    for shape in [(9, WIDTH), (WIDTH,), (9, 1), (1, 1, 9, WIDTH), (2, 1, 9, WIDTH), (3, 1, WIDTH), (2, 3, 9, WIDTH)]:
        mask = random(*shape, seed=len(shape)) > -0.5
        out = ell.softmax(scores.to(DEVICE), mask=mask.to(DEVICE), backend=backend)
        whole = mask.expand(scores.shape)[..., ELL.there].to(DEVICE)
        expected = sparse_softmax(pattern, scores[..., ELL.there].to(DEVICE), mask=whole, backend=backend)
        torch.testing.assert_close(out[..., ELL.there], expected)


def indices(*rows_of_places: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(rows_of_places, dtype=dtype, device=DEVICE)


WRONG_ELL = {
    "list": ([[0, 1]], 3, TypeError, "indices should be a plain tensor, got list"),
    "array": (np.zeros((1, 2), dtype=np.int64), 3, TypeError, "got ndarray"),
    "none": (None, 3, TypeError, "got NoneType"),
    "parameter": (torch.nn.Parameter(indices([0, 1]), requires_grad=False), 3, TypeError, "got Parameter"),
    "float": (zeros(1, 2), 3, ValueError, r"2-D int32 or int64, got torch\.float32 of shape \(1, 2\)"),
    "bool": (zeros(1, 2, dtype=torch.bool), 3, ValueError, r"got torch\.bool"),
    "1-D": (ints(0, 1), 3, ValueError, r"2-D int32 or int64, got torch\.int64 of shape \(2,\)"),
    "3-D": (indices([0, 1])[None], 3, ValueError, r"of shape \(1, 1, 2\)"),
    "columns float": (indices([0, 1]), 5.0, TypeError, "columns should be an integer, got 5.0 of type float"),
    "columns bool": (indices([0, 0]), True, TypeError, "columns should be an integer, got True"),
    "columns tensor": (indices([0, 1]), torch.tensor(3), TypeError, "columns should be an integer"),
    "columns negative": (indices([-1, -1]), -2, ValueError, "columns should be at least 0, got -2"),
    "too large": (indices([0, 1], [0, 3]), 3, ValueError, "below columns, 3, .* got 3 at place 1 of row 1"),
    "too small": (indices([0, 1], [-2, -1]), 3, ValueError, "got -2 at place 0 of row 1"),
    "no columns": (indices([0, -1]), 0, ValueError, "below columns, 0, .* got 0 at place 0 of row 0"),
    "descending": (indices([0, 1], [2, 1]), 3, ValueError, "ascend within a row, got 2 before 1 in row 1"),
    "twice": (indices([0, 1, 2], [0, 2, 2]), 3, ValueError, "got column 2 twice in row 1"),
    "gap": (indices([0, 1, 2], [0, -1, 2]), 3, ValueError, "come last in a row, got −1 before 2 in row 1"),
}


@pytest.mark.parametrize("name", WRONG_ELL)
def test_wrong_ell_patterns_are_refused(name: str) -> None:
    given, columns, error, message = WRONG_ELL[name]
    with pytest.raises(error, match=message):
        EllPattern(given, columns)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_right_ell_patterns_are_accepted(dtype: torch.dtype) -> None:
    for given in (indices([0, 2], [-1, -1], [1, -1], dtype=dtype), zeros(3, 0, dtype=dtype), zeros(0, 4, dtype=dtype)):
        assert EllPattern(given, 3).shape == (len(given), 3)
        assert EllPattern(given, np.int64(3)).shape == (len(given), 3)  # type: ignore[arg-type]
    assert EllPattern(indices([-1, -1]), 0).matmul(zeros(1, 2), zeros(0, 4)).shape == (1, 4)


def test_patterns_are_unchecked_on_request() -> None:
    """Without a check, the values are not read, as on the meta device."""
    assert EllPattern(indices([2, 0]), 1, check=False).columns == 1
    assert EllPattern(indices([2, 0]).to("meta"), 1).columns == 1


def test_from_pattern_refuses_other_arguments() -> None:
    for cls in (EllPattern, HybridPattern):
        with pytest.raises(TypeError, match="pattern should be a Pattern, got Tensor"):
            cls.from_pattern(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"width should be an integer, got 9\.0"):
        EllPattern.from_pattern(PATTERN, 9.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "widths", "error", "message"),
    [
        pytest.param(torch.eye(3), (3,), TypeError, "a Pattern, got Tensor", id="pattern"),
        pytest.param(PATTERN, (3.0,), TypeError, "each width should be an integer, got 3.0", id="float"),
        pytest.param(PATTERN, (3, 2), ValueError, r"ascend and be at least 0, got \(3, 2\)", id="descending"),
        pytest.param(PATTERN, (2, 2), ValueError, "ascend", id="twice"),
        pytest.param(PATTERN, (-1, 2), ValueError, "at least 0", id="negative"),
    ],
)
def test_wrong_hybrid_patterns_are_refused(pattern: Any, widths: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HybridPattern(pattern, widths)


@backends
@pytest.mark.parametrize(("rows", "columns", "channels"), [(0, 4, 3), (4, 0, 3), (4, 4, 0), (0, 0, 0)])
def test_empty_operands(rows: int, columns: int, channels: int, backend: Backend) -> None:
    pattern = Pattern(torch.zeros(rows + 1, dtype=torch.int64), ints(), columns).to(DEVICE)
    for form, values in (
        (EllPattern.from_pattern(pattern)[0], zeros(2, rows, 0)),
        (EllPattern.from_pattern(pattern, 3)[0], zeros(2, rows, 3)),
        (HybridPattern.from_pattern(pattern), zeros(2, 0)),
    ):
        a, x = zeros(rows, channels), zeros(columns, channels)
        assert torch.equal(form.matmul(values, x, backend=backend), zeros(2, rows, channels))
        assert torch.equal(form.matmul(values, a, transpose=True, backend=backend), zeros(2, columns, channels))
        assert torch.equal(form.sddmm(a, x, backend=backend), values[0])
        assert torch.equal(form.softmax(values, backend=backend), values)
        assert form.transpose[0].shape == (columns, rows)
