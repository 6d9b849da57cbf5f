"""Fixtures that several tests of training share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import Tensor, nn

from diffnet import DiffusionNet
from diffnet.data import Sample
from diffnet.geometry import Operators
from diffnet.train.correspondence import maps
from diffnet.train.steps.step import TrainingStep

DRAW = Figure.savefig


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a sample, of operators with their sparse matrices, or of a network."""
    if isinstance(value, Sample):
        back = [] if value.interpolation is None else [*vars(value.interpolation).values()]
        return [value.features, value.labels, *back, *tensors_of(value.operators)]
    if isinstance(value, nn.Module):
        return [*value.state_dict().values()]
    found: list[Tensor] = [value] if isinstance(value, Tensor) else []
    if isinstance(value, Operators):
        value.map_tensors(lambda x: found.append(x) or x)
    return found


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often steps, networks and solvers for maps are called. All of their tensors begin at a multiple of 64 bytes.

    Products of matrices have other bits on some CPUs where a factor begins elsewhere or has other strides. This checks
    the addresses, so it fails on every CPU.
    """
    calls: dict[str, int] = {}

    def check(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def checked(*given: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            for x in (x for value in given for x in tensors_of(value) if x.numel()):
                assert x.data_ptr() % 64 == 0, f"{name} gets {tuple(x.shape)} {x.dtype} at {x.data_ptr() % 64} bytes"
                assert x.is_contiguous(), f"{name} gets {tuple(x.shape)} {x.dtype} with strides {x.stride()}"
            return plain(*given)

        monkeypatch.setattr(owner, name, checked)

    check(TrainingStep, "__call__")
    check(TrainingStep, "add")
    check(DiffusionNet, "forward")
    check(maps, "point_map_of")
    return calls


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn in spite of `small_pictures`."""
    monkeypatch.setattr(Figure, "savefig", DRAW)
    monkeypatch.setattr("diffnet.train.report.charts.DPI", 40)


@pytest.fixture
def short_waits() -> Iterator[None]:
    """A test that waits forever fails instead."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
