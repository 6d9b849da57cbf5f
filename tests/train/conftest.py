"""Fixtures that several tests of training share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Reports with small pictures, which take a tenth of the time to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffnet.train.report.report.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.charts.DPI", 40)
        patch.setattr("diffnet.train.report.pairs.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.regression.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.regression.WHOLE_SIZE", (60, 50))
        patch.setattr("diffnet.train.report.shapes.PICTURE_SIZE", (60, 50))
        for task in ("segmentation", "classification", "regression"):
            patch.setattr(f"diffnet.train.tasks.{task}.PICTURE_SIZE", (90, 90))
        yield


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
