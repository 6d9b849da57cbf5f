"""The options of a training run. A checkpoint stores them. The command line shows their values, so this loads fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from diffnet.train.tasks.options.all_tasks import TASK_OPTIONS, OptionsOfTasks, check_task_options


@dataclass(frozen=True)
class TrainOptions(OptionsOfTasks):
    """The options of a run of `diffnet train`: those that all tasks share, and those in `train/tasks/options/`.

    Raises OptionError for a value that is not allowed, and for an option that the task doesn't have.

    >>> TrainOptions(features="xyz", epochs=20).rotates
    True
    >>> TrainOptions(task="regression", loss="huber").loss
    'huber'
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task_options(self.task, (f.name for f in fields(self) if getattr(self, f.name) != f.default))
        TASK_OPTIONS[self.task].own.check_together(self)
        object.__setattr__(self, "laplacian", self.preprocessing.laplacian)  # last, because it isn't the default

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for a checkpoint or a JSON file."""
        values = asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}  # as in JSON
