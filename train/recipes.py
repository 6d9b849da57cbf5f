"""The recipes of training: options that are chosen together. `docs/recipe.md` has the measurements behind them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from diffnet.train.options import Method
from diffnet.train.tasks.names import TaskName

RecipeName: TypeAlias = Literal["default", "original"]

# How the default recipe of a task differs from the defaults of `TrainOptions`.
_DEFAULT: dict[TaskName, dict[str, Any]] = {
    "classification": {"width": 128, "dropout": 0.0, "batch_meshes": 4, "label_smoothing": 0.2},
    "regression": {"features": "xyz+normals+log-hks", "width": 128, "dropout": 0.0},
    # The method of Donati et al. 2020 with DiffusionNet (Sharp et al. 2022), with more eigenpairs in the maps.
    "correspondence": {
        "k": 128,
        "map_k": 100,
        "feature_scale": 3.0,
        "clip": 1.0,
        "width": 128,
        "dropout": 0.0,
        "normalize": "area",
        "precision": "fp32",
        "eval_every": 1,
    },
}
_DEFAULT_UNSUPERVISED: dict[str, Any] = {"features": "xyz+normals+wks", "feature_scale": 1.0, "learning_rate": 2e-3}
CHANNELS: dict[Method, int] = {"supervised": 128, "unsupervised": 256}  # features that a network computes

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
    "correspondence": {"map_k": 30, "normalize": "area"},
}
# Those of Cao et al. 2023.
_ORIGINAL_UNSUPERVISED: dict[str, Any] = {"features": "wks", "k": 200, "map_k": 200}


def recipe(name: RecipeName, task: TaskName, method: Method = "supervised") -> dict[str, Any]:
    """The options of a recipe, for `TrainOptions`. Options that it doesn't name have their defaults.

    method: of a correspondence

    >>> from diffnet.train.options import TrainOptions
    >>> TrainOptions(task="classification", **recipe("original", "classification")).width
    32
    """
    supervised = method == "supervised"
    if name == "original":
        return _ORIGINAL | _ORIGINAL_OF_TASKS.get(task, {}) | ({} if supervised else _ORIGINAL_UNSUPERVISED)
    return _DEFAULT.get(task, {}) | ({} if supervised else _DEFAULT_UNSUPERVISED)
