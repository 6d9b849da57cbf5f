"""All tasks by name."""

from __future__ import annotations

from diffnet.train.tasks.classification import CLASSIFICATION
from diffnet.train.tasks.names import TaskName
from diffnet.train.tasks.regression import REGRESSION
from diffnet.train.tasks.segmentation import SEGMENTATION
from diffnet.train.tasks.task import Task

_TASKS: dict[TaskName, Task] = {task.name: task for task in (SEGMENTATION, CLASSIFICATION, REGRESSION)}


def task_named(name: TaskName) -> Task:
    """The task of this name."""
    return _TASKS[name]
