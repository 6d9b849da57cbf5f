"""The recipes of training: options that are chosen together. `docs/recipe.md` has the measurements behind them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from diffnet.train.tasks.names import TaskName

RecipeName: TypeAlias = Literal["default", "original"]

# How the default recipe of a task differs from the defaults of `TrainOptions`.
_DEFAULT: dict[TaskName, dict[str, Any]] = {
    "classification": {"width": 128, "dropout": 0.0, "batch_meshes": 4, "label_smoothing": 0.2},
    "regression": {"features": "xyz+normals+log-hks", "width": 128, "dropout": 0.0},
}

# What the experiments of the original implementation do: https://github.com/nmwsharp/diffusion-net/tree/master/experiments
_ORIGINAL: dict[str, Any] = {
    "features": "hks",
    "k": 128,
    "operators": "original",
    "basis": "float32",
    "join": "never",
    "width": 128,
    "blocks": 4,
    "diffusion": "spectral",
    "initial_times": "zero",
    "mlp_norm": "none",
    "attention_heads": 0,
    "dropout": 0.5,
    "learning_rate": 1e-3,
    "schedule": "step",
    "decay_every": 50,
    "batch_meshes": 1,
    "label_smoothing": 0.0,
    "average_weights": 0.0,
}
_ORIGINAL_OF_TASKS: dict[TaskName, dict[str, Any]] = {
    "classification": {"width": 32, "dropout": 0.0, "label_smoothing": 0.2},
}


def recipe(name: RecipeName, task: TaskName) -> dict[str, Any]:
    """The options of a recipe, for `TrainOptions`. Options that it doesn't name have their defaults.

    >>> from diffnet.train.options import TrainOptions
    >>> TrainOptions(task="classification", **recipe("original", "classification")).width
    32
    """
    if name == "original":
        return _ORIGINAL | _ORIGINAL_OF_TASKS.get(task, {})
    return dict(_DEFAULT.get(task, {}))
