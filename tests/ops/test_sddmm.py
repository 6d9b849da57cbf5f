"""Dense times dense at the entries of a pattern, against dense products in float64. See test_spmm.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float64 import DEVICE, check, random
from sparse_cases import Shape, backends, cases, pattern_of, random_mask, random_pattern
from sparse_cases import small_pieces as small_pieces  # a fixture
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffnet.ops import Backend, Pattern, sddmm

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces", "poisoned")


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


@backends
@pytest.mark.parametrize(
    ("shape", "a", "b"),
    [
        pytest.param("skewed", (), (), id="one set"),
        pytest.param("skewed", (), (3,), id="one a, 3 b"),
        pytest.param((9, 6, 3), (2,), (), id="2 a, one b"),
        pytest.param((9, 6, 3), (3,), (3,), id="3 a, 3 b"),
        pytest.param((9, 6, 3), (2, 3), (2, 3), id="2x3 sets"),
        pytest.param((9, 6, 3), (2, 1), (3,), id="batches broadcast"),
    ],
)
def test_sddmm_over_sets(shape: Shape, a: tuple[int, ...], b: tuple[int, ...], backend: Backend) -> None:
    mask, channels = random_mask(shape)
    pattern = pattern_of(mask)
    moved = pattern.to(DEVICE)
    check(
        lambda a, b: sddmm(moved, a, b, backend=backend),
        lambda a, b: (a @ b.mT)[..., pattern.row_indices, pattern.column_indices],
        [random(*a, mask.shape[0], channels), random(*b, mask.shape[1], channels, seed=1)],
        torch.float32,
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


def test_gradcheck() -> None:
    pattern = random_pattern()
    a, b = random(2, 9, 3, seed=2).requires_grad_(), random(6, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: sddmm(pattern, a, b), (a, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda a, b: sddmm(pattern, a, b), (a, b), fast_mode=True)
