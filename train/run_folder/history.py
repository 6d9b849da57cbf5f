"""The history of a run: one row of metrics.csv per epoch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

COLUMNS = (
    "epoch",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "validation_accuracy",
    "test_accuracy",
    "seconds",
)

Row = dict[str, float | int | None]


def as_csv(history: Sequence[Row]) -> str:
    """The content of metrics.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()
