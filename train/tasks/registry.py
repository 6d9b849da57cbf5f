"""The tasks by name, and the list of their files. `train/tasks/options/` lists the names, without PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

from diffnet.train.tasks.options.shared import TaskName
from diffnet.train.tasks.task import Task


def task_named(name: TaskName) -> Task[Any, Any]:
    """The task of this name."""
    task: Task[Any, Any] = import_module(f"diffnet.train.tasks.{name}").TASK
    return task


def report_files() -> tuple[str, ...]:
    """The files of the reports of all tasks, besides predictions.html."""
    return tuple(dict.fromkeys(file for name in get_args(TaskName) for file in task_named(name).report_files))
