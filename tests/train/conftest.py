"""Fixtures that several tests of training share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

DRAW = Figure.savefig


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
