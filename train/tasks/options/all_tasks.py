"""The options of all tasks. A new task adds the class of its own options to `OptionsOfTasks`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import get_args

from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.options.correspondence import CorrespondenceOptions
from diffnet.train.tasks.options.labels import LabelOptions
from diffnet.train.tasks.options.regression import RegressionOptions
from diffnet.train.tasks.options.shared import TaskName
from diffnet.train.tasks.options.task_options import TaskOptions


@dataclass(frozen=True)
class OptionsOfTasks(LabelOptions, RegressionOptions, CorrespondenceOptions):
    """The options that all tasks share, and those that only some tasks have."""


TASK_OPTIONS: dict[TaskName, TaskOptions] = {
    name: import_module(f"diffnet.train.tasks.options.{name}").OPTIONS for name in get_args(TaskName)
}


def check_task_options(task: TaskName, changed: Iterable[str]) -> None:
    """Raises OptionError for an option that a task doesn't have.

    changed: names of the options that don't have their default value
    """
    chosen = TASK_OPTIONS[task]
    for name in changed:
        owners = [options.owners or other for other, options in TASK_OPTIONS.items() if name in options.own_names]
        if owners and name not in chosen.own_names:
            raise OptionError(f"{name} is for {' and '.join(dict.fromkeys(owners))}, and the task is {task}")
        if name in chosen.unavailable:
            raise OptionError(f"{name} is not available for {task}")
