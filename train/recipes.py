"""The recipes of training: options that are chosen together. `docs/recipe.md` has the measurements behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffnet.options import Architecture
from diffnet.train.tasks.options.all_tasks import TASK_OPTIONS
from diffnet.train.tasks.options.shared import TaskName
from diffnet.train.tasks.options.task_options import RecipeName

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


def recipe(name: RecipeName, task: TaskName, chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a recipe, for `TrainOptions`. Options that it doesn't name have their defaults.

    chosen: options that the user chose, on which a recipe may depend

    >>> from diffnet.train.options import TrainOptions
    >>> TrainOptions(task="classification", **recipe("original", "classification")).width
    32
    """
    own = TASK_OPTIONS[task]
    options = {**_ORIGINAL, **own.original} if name == "original" else own.recipe
    return dict(own.adapted(name, options, chosen or {}))
