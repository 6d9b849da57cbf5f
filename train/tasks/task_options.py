"""The names of the tasks, and the options in which they differ. The command line reads them, so this loads fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from diffnet.geometry.errors import OptionError

TaskName: TypeAlias = Literal["segmentation", "classification", "regression", "correspondence"]

LABEL_OPTIONS = ("label_smoothing", "ignore", "class_weights")


@dataclass(frozen=True)
class TaskOptions:
    """The options of `TrainOptions` in which a task differs from others.

    own: options that only this task and others that list them have
    unavailable: options that all tasks have but this one
    recipe: changes to the defaults of `TrainOptions`, for the default recipe
    original: changes to the recipe of the original, see `recipe` in `train/recipes.py`
    """

    own: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    original: Mapping[str, Any] = field(default_factory=dict)


TASK_OPTIONS: dict[TaskName, TaskOptions] = {
    "segmentation": TaskOptions(own=LABEL_OPTIONS),
    "classification": TaskOptions(
        own=LABEL_OPTIONS,
        recipe={"width": 128, "dropout": 0.0, "learning_rate": 1e-3, "batch_meshes": 4, "label_smoothing": 0.2},
        original={"width": 32, "dropout": 0.0, "label_smoothing": 0.2},
    ),
    "regression": TaskOptions(
        own=("targets", "loss"),
        recipe={"features": "xyz+normals+log-hks", "width": 128, "dropout": 0.0, "learning_rate": 1e-3},
    ),
    "correspondence": TaskOptions(
        own=("method", "map_k", "feature_scale", "align", "zoomout"),
        # They would change the correspondences of a pair, or hold out pairs whose meshes are trained on.
        unavailable=("max_faces", "scale_range", "jitter", "mirror", "cut", "decimate", "validation"),
        # The method of Donati et al. 2020 with DiffusionNet (Sharp et al. 2022), with more eigenpairs in the maps.
        recipe={
            "k": 128,
            "map_k": 100,
            "feature_scale": 3.0,
            "clip": 1.0,
            "width": 128,
            "dropout": 0.0,
            "learning_rate": 1e-3,
            "normalize": "area",
            "precision": "fp32",
            "eval_every": 1,
        },
        original={"map_k": 30, "normalize": "area"},
    ),
}


def check_task_options(task: TaskName, changed: Iterable[str]) -> None:
    """Raises OptionError for an option that a task doesn't have.

    changed: names of the options that don't have their default value
    """
    for name in changed:
        owners = [other for other, options in TASK_OPTIONS.items() if name in options.own]
        if owners and task not in owners:
            owner = "tasks with labels" if name in LABEL_OPTIONS else " and ".join(owners)
            raise OptionError(f"{name} is for {owner}, and the task is {task}")
        if name in TASK_OPTIONS[task].unavailable:
            raise OptionError(f"{name} is not available for {task}")
