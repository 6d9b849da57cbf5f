"""Fixtures of the tests of operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo  # before `poisoned` replaces functions, which torch.compile would not know afterwards
from kernel_accuracy import ONE_PLACE_PER_DEVICE, PLACES, Place
from torch import Tensor


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each device and arithmetic."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param.tf32 else "highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=ONE_PLACE_PER_DEVICE)
def any_place(request: pytest.FixtureRequest) -> Place:
    """Few places, for tests that don't depend on the arithmetic."""
    return request.param


def _poison(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills empty tensors with NaN, so that no kernel passes that leaves elements unwritten."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, original=original, **k: _poison(original(*a, **k)))
