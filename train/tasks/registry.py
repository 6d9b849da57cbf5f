"""All tasks by name."""

from __future__ import annotations

from diffnet.train.tasks.classification import CLASSIFICATION
from diffnet.train.tasks.correspondence import CORRESPONDENCE
from diffnet.train.tasks.regression import REGRESSION
from diffnet.train.tasks.segmentation import SEGMENTATION
from diffnet.train.tasks.task import Task
from diffnet.train.tasks.task_options import TaskName

_TASKS: dict[TaskName, Task] = {task.name: task for task in (SEGMENTATION, CLASSIFICATION, REGRESSION, CORRESPONDENCE)}

# The files of the reports of all tasks, besides predictions.html.
REPORT_FILES = tuple(dict.fromkeys(name for task in _TASKS.values() for name in task.report_files))


def task_named(name: TaskName) -> Task:
    """The task of this name."""
    return _TASKS[name]
