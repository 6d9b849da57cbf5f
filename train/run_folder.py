"""What a run keeps in its folder: the rows of metrics.csv, and predictions in a file without a name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.files import csv_text, npy_bytes
from diffnet.geometry.store.transfer import aligned


class Spool(Sequence[Tensor]):
    """Tensors on the CPU in a file without a name, which the system frees when the process ends. folder: on a disk"""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open as long as this object exists
        self._places: dict[int, int] = {}

    def put(self, number: int, tensor: Tensor) -> None:
        """Write the tensor that gets a number. In the end, there should be one for each number from 0.

        Raises OSError if the disk is full.
        """
        self._places[number] = self._file.seek(0, os.SEEK_END)
        self._file.write(npy_bytes(tensor.numpy()))  # `np.save` would hide why a write fails

    def clear(self) -> None:
        self._file.truncate(0)
        self._places = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: Any) -> Any:
        if i not in self._places:
            raise IndexError(i)
        self._file.seek(self._places[i])
        return aligned(torch.from_numpy(np.load(self._file)))


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
