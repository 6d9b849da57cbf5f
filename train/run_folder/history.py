"""The history of a run: one row of metrics.csv per epoch."""

from __future__ import annotations

from collections.abc import Sequence

from diffnet.geometry.files import csv_text

Row = dict[str, float | int | None]


def columns(score: str) -> tuple[str, ...]:
    """The columns of metrics.csv of a task with this score, see `Task.score_name`.

    >>> columns("accuracy")[3:6]
    ('train_accuracy', 'validation_accuracy', 'test_accuracy')
    """
    scores = (f"{part}_{score}" for part in ("train", "validation", "test"))
    return ("epoch", "learning_rate", "train_loss", *scores, "seconds")


def as_csv(history: Sequence[Row], score: str) -> str:
    """The content of metrics.csv."""
    names = columns(score)
    return csv_text([names, *([row[name] for name in names] for row in history)])
