"""The options of a training run, each declared once, and the recipes. The command line reads them, so they load fast.

A checkpoint stores `TrainOptions`. A new task adds its class of options and its `OPTIONS` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from diffnet.geometry.errors import OptionError
from diffnet.options import Architecture
from diffnet.train.options import correspondence, labels, regression
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import RecipeName, TaskOptions

TASK_OPTIONS: dict[TaskName, TaskOptions] = {
    "segmentation": labels.SEGMENTATION,
    "classification": labels.CLASSIFICATION,
    "regression": regression.OPTIONS,
    "correspondence": correspondence.OPTIONS,
}


def tasks_with(option: str) -> list[TaskName]:
    """The tasks that an option is for, or none if all tasks share it."""
    return [task for task, options in TASK_OPTIONS.items() if option in (*options.own_names, *options.sets)]


RATE_FROM_NETWORK = 5e-4  # a higher one forgets what the network has learned

# The options of the experiments of the original implementation: https://github.com/nmwsharp/diffusion-net/tree/master/experiments
_ORIGINAL: dict[str, Any] = {
    "features": "hks",
    "k": 128,
    "operators": "original",
    "basis": "float32",
    "join": "never",
    **Architecture().network,
    "learning_rate": 1e-3,
    "schedule": "step",
    "decay_every": 50,
    "batch_meshes": 1,
    "average_weights": 0.0,
}


@dataclass(frozen=True)
class TrainOptions(labels.LabelOptions, regression.RegressionOptions, correspondence.CorrespondenceOptions):
    """The options of a run of `diffnet train`: those that all tasks share, and those that only some tasks have.

    The fields in `train/options/` explain each one. Raises OptionError for a value that is not allowed, and for an
    option that the task doesn't have.

    >>> TrainOptions(features="xyz", epochs=20).rotates
    True
    >>> TrainOptions(task="regression", loss="huber").loss
    'huber'
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        task_options = TASK_OPTIONS[self.task]
        for name in (f.name for f in fields(self) if getattr(self, f.name) != f.default):
            owners = [TASK_OPTIONS[task].owners or task for task in tasks_with(name)]
            if owners and name not in task_options.own_names:
                raise OptionError(f"{name} is for {' and '.join(dict.fromkeys(owners))}, and the task is {self.task}")
            if name in task_options.unavailable:
                raise OptionError(f"{name} is not available for {self.task}")
        task_options.own.check_together(self)
        object.__setattr__(self, "laplacian", self.preprocessing.laplacian)  # last, because it isn't the default

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for a checkpoint or a JSON file."""
        values = asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}  # as in JSON


def recipe(name: RecipeName, task: TaskName, choices: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a recipe, which are chosen together. `docs/recipe.md` has the measurements behind them.

    choices: options that the user chose, on which a recipe may depend

    Options that the recipe doesn't name have their defaults.

    >>> TrainOptions(task="classification", **recipe("original", "classification")).width
    32
    """
    task_options, choices = TASK_OPTIONS[task], choices or {}
    options = {**_ORIGINAL, **task_options.original} if name == "original" else task_options.recipe
    options = dict(task_options.adapted(name, options, choices))
    if choices.get("start") is not None:
        options["learning_rate"] = min(options.get("learning_rate", TrainOptions.learning_rate), RATE_FROM_NETWORK)
    return options
