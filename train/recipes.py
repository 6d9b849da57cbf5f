"""The recipes of training: options that are chosen together. `docs/recipe.md` has the measurements behind them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from diffnet.train.options import Method
from diffnet.train.tasks.task_options import TASK_OPTIONS, TaskName

RecipeName: TypeAlias = Literal["default", "original"]

# Further changes for `--method unsupervised`: of the default, and those of Cao et al. 2023.
_UNSUPERVISED: dict[str, Any] = {
    "features": "xyz+normals+wks",
    "feature_scale": 1.0,
    "learning_rate": 2e-3,
    "align": True,
}
_ORIGINAL_UNSUPERVISED: dict[str, Any] = {"features": "wks", "k": 200, "map_k": 200}
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


def recipe(name: RecipeName, task: TaskName, method: Method = "supervised") -> dict[str, Any]:
    """The options of a recipe, for `TrainOptions`. Options that it doesn't name have their defaults.

    method: of a correspondence

    >>> from diffnet.train.options import TrainOptions
    >>> TrainOptions(task="classification", **recipe("original", "classification")).width
    32
    """
    supervised = method == "supervised"
    if name == "original":
        return {**_ORIGINAL, **TASK_OPTIONS[task].original, **({} if supervised else _ORIGINAL_UNSUPERVISED)}
    return {**TASK_OPTIONS[task].recipe, **({} if supervised else _UNSUPERVISED)}
