"""The names of the tasks. The command line and the options of a run read them, so this loads fast."""

from __future__ import annotations

from typing import Literal, TypeAlias

TaskName: TypeAlias = Literal["segmentation", "classification", "regression"]

# The elements that have targets in each task.
TARGETS_AT: dict[TaskName, tuple[str, ...]] = {
    "segmentation": ("vertices", "faces", "edges"),
    "classification": ("meshes",),
    "regression": ("vertices", "faces", "edges", "meshes"),
}

# The score of each task in metrics.csv. The higher, the better.
SCORES: dict[TaskName, str] = {"segmentation": "accuracy", "classification": "accuracy", "regression": "r2"}
