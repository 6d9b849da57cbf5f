"""The list of all tasks. A new task adds its name to `TaskName`, and the class of its own options to `OptionsOfTasks`.

The files of a task have its name: `NAME.py` holds its `TASK`, `options/NAME.py` its `OPTIONS`, and `commands/NAME.py`
its command `train`. This module loads the options only. Commands import `TrainOptions`, which inherits the options, and
tasks import PyTorch, which would slow `--help` down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.options.correspondence import CorrespondenceOptions
from diffnet.train.tasks.options.labels import LabelOptions
from diffnet.train.tasks.options.regression import RegressionOptions
from diffnet.train.tasks.task_options import TaskOptions

if TYPE_CHECKING:
    from diffnet.train.tasks.task import Task

TaskName: TypeAlias = Literal["segmentation", "classification", "regression", "correspondence"]


@dataclass(frozen=True)
class OptionsOfTasks(LabelOptions, RegressionOptions, CorrespondenceOptions):
    """The options that only some tasks have."""


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


def task_named(name: TaskName) -> Task[Any, Any]:
    """The task of this name."""
    task: Task[Any, Any] = import_module(f"diffnet.train.tasks.{name}").TASK
    return task


def command_named(name: TaskName) -> Callable[..., None]:
    """The command `diffnet train NAME`."""
    command: Callable[..., None] = import_module(f"diffnet.train.tasks.commands.{name}").train
    return command


def report_files() -> tuple[str, ...]:
    """The files of the reports of all tasks, besides predictions.html."""
    return tuple(dict.fromkeys(file for name in get_args(TaskName) for file in task_named(name).report_files))
