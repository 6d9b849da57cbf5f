"""The names of the tasks. The command line and the options of a run read them, so this loads fast."""

from __future__ import annotations

from typing import Literal, TypeAlias

TaskName: TypeAlias = Literal["segmentation", "classification"]

# The elements that have targets in each task.
TARGETS_AT: dict[TaskName, tuple[str, ...]] = {
    "segmentation": ("vertices", "faces", "edges"),
    "classification": ("meshes",),
}
