"""Fixtures that several tests of training share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib.figure import Figure

from diffnet.viz.render import png_bytes

DRAW = Figure.savefig


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Reports with small pictures, and with an empty picture for each chart. Drawing takes most of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        empty = png_bytes(np.zeros((2, 2, 3), np.uint8))
        patch.setattr(Figure, "savefig", lambda figure, out, **options: out.write(empty))
        patch.setattr("diffnet.train.report.report.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.pairs.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.regression.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.regression.WHOLE_SIZE", (60, 50))
        patch.setattr("diffnet.train.report.shapes.PICTURE_SIZE", (60, 50))
        patch.setattr("diffnet.train.tasks.task.PICTURE_SIZE", (90, 90))
        yield


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
