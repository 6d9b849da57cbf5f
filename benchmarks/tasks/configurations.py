"""The configurations of the ablation in `recipes`: changes of one option, and combinations of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from diffnet.train.options import TrainOptions, recipe
from diffnet.train.options.task_options import RecipeName

# The options of each data set that differ from the recipe of the original.
SETS: dict[str, dict[str, Any]] = {
    "rna": {"epochs": 100},
    "bodies": {"epochs": 20, "k": 64, "width": 64},
    "shapes": {"task": "classification", "epochs": 40, "k": 64, "width": 64, "dropout": 0.5, "batch_meshes": 4},
}

BASE = "base"

# The base is the recipe of the original with the operators and the joining of vertices of diffnet, which accept any
# mesh, and the same dropout in all tasks.
_KEPT = {"operators": "diffnet", "join": "auto"}

CHANGES: dict[str, dict[str, Any]] = {
    "log-hks": {"features": "log-hks"},
    "wks": {"features": "wks"},
    "hks-wks": {"features": "log-hks+wks"},
    "curvature": {"features": "curvature+log-hks"},
    "diffused": {"features": "diffused-curvature+log-hks"},
    "curvatures": {"features": "curvature+diffused-curvature+log-hks"},
    "diffused-wks": {"features": "diffused-curvature+wks"},
    "curvature-wks": {"features": "curvature+wks"},
    "curvature-hks-wks": {"features": "curvature+log-hks+wks"},
    "normals": {"features": "xyz+normals"},
    "normals-hks": {"features": "xyz+normals+log-hks"},
    "normals-curvature-hks": {"features": "xyz+normals+curvature+log-hks"},
    "cosine": {"schedule": "cosine"},
    "times": {"initial_times": "spread"},
    "layer": {"mlp_norm": "layer"},
    "rms": {"mlp_norm": "rms"},
    "average": {"average_weights": 0.999},
    "original-operators": {"operators": "original", "join": "never"},
}

# The options of the changes "NAME-NUMBER", for example "width-64".
NUMBERS: dict[str, tuple[str, type[int] | type[float]]] = {
    "dropout": ("dropout", float),
    "width": ("width", int),
    "smoothing": ("label_smoothing", float),
    "k": ("k", int),
    "lr": ("learning_rate", float),
    "batch": ("batch_meshes", int),
    "epochs": ("epochs", int),
    "average": ("average_weights", float),
    "validation": ("validation", float),
    "scale": ("scale_range", float),
    "jitter": ("jitter", float),
    "decimate": ("decimate", float),
    "cut": ("cut", float),
}

# A configuration that begins with one of these has all options of the recipe, also epochs, eigenpairs and width.
RECIPES: tuple[RecipeName, ...] = ("default", "original")

_FIRST_LEADS = "log-hks+cosine+dropout-0.2"

# The configurations behind docs/recipe.md, in order of importance: a run may be stopped at any time.
_RNA = (
    BASE,
    _FIRST_LEADS,
    f"{_FIRST_LEADS}+width-256",
    f"{_FIRST_LEADS}+width-256+times",
    f"{_FIRST_LEADS}+width-256+times+curvature",
    f"{_FIRST_LEADS}+width-256+times+curvature+lr-2e-3",
    "log-hks",
    "cosine",
    "dropout-0.2",
    "width-256",
    f"{_FIRST_LEADS}+times",
    f"{_FIRST_LEADS}+layer",
    f"{_FIRST_LEADS}+average",
    f"{_FIRST_LEADS}+smoothing-0.1",
    f"{_FIRST_LEADS}+lr-2e-3",
    f"{_FIRST_LEADS}+batch-2",
    f"{_FIRST_LEADS}+k-256",
    f"{_FIRST_LEADS}+width-256+times+curvature+lr-2e-3+k-64",
)
_BODIES = (
    BASE,
    _FIRST_LEADS,
    f"{_FIRST_LEADS}+width-256",
    f"{_FIRST_LEADS}+width-192",
    f"{_FIRST_LEADS}+times",
    f"{_FIRST_LEADS}+times+curvature",
    f"{_FIRST_LEADS}+times+curvature+lr-2e-3",
    "log-hks",
    "cosine",
    "dropout-0.2",
    "width-256",
    f"{_FIRST_LEADS}+layer",
    f"{_FIRST_LEADS}+average",
    f"{_FIRST_LEADS}+smoothing-0.1",
    f"{_FIRST_LEADS}+lr-2e-3",
    "times",
    "layer",
    "average",
    "smoothing-0.1",
    "lr-2e-3",
    "batch-2",
    "k-256",
    "rms",
    "smoothing-0.2",
    "lr-3e-4",
    "lr-3e-3",
    "batch-4",
    f"{_FIRST_LEADS}+width-256+times+layer",
    f"{_FIRST_LEADS}+normals-hks",
    f"{_FIRST_LEADS}+hks-wks",
)

# The promising changes in classification: no dropout, and diffusion times that start at several scales.
_OF_CLASSES = "cosine+dropout-0+times"
_SHAPES = (
    BASE,
    f"log-hks+{_OF_CLASSES}",
    f"curvature+{_OF_CLASSES}",
    f"normals-hks+{_OF_CLASSES}",
    f"curvature+{_OF_CLASSES}+epochs-120",
    f"normals-curvature-hks+{_OF_CLASSES}+epochs-120",
    f"curvature+{_OF_CLASSES}+layer",
    f"curvature+{_OF_CLASSES}+epochs-120+width-128+k-128",
    f"curvature+{_OF_CLASSES}+lr-3e-3",
    f"curvature+{_OF_CLASSES}+batch-8",
    f"curvature+{_OF_CLASSES}+batch-1",
    f"curvature+{_OF_CLASSES}+smoothing-0",
    f"curvature+{_OF_CLASSES}+average",
    "curvature+cosine+dropout-0.2+times",
    "curvature+cosine+dropout-0",
    "curvature+dropout-0+times",
    f"curvature+{_OF_CLASSES}+width-128",
    f"curvature+{_OF_CLASSES}+k-128",
)
ORDER = {"rna": _RNA, "bodies": _BODIES, "shapes": _SHAPES}


def options_of(data: str, configuration: str, seed: int = 0) -> TrainOptions:
    """The options of a configuration: changes joined by "+", after the name of a recipe or not, or "base".

    data: the name of a data set; names that are not in `SETS` are trained as "rna"

    Raises KeyError for an unknown change, and OptionError for a change that the task of the data set doesn't have.
    """
    base = SETS.get(data, SETS["rna"])
    task = base.get("task", "segmentation")
    changes = [] if configuration == BASE else configuration.split("+")
    named = next((name for name in RECIPES if changes[:1] == [name]), None)
    values = recipe(named, task) if named else {**recipe("original", task), **_KEPT, **base}
    for change in changes[1:] if named else changes:
        number = re.fullmatch(rf"({'|'.join(NUMBERS)})-(\d+(?:\.\d+)?(?:e-?\d+)?)", change)
        if number:
            option, kind = NUMBERS[number[1]]
            values[option] = kind(number[2])
        else:
            values.update(CHANGES[change])
    options = TrainOptions(**{**values, "task": task, "seed": seed})
    return replace(options, eval_every=options.epochs)


def differs_from_base(data: str, configuration: str) -> bool:
    """Whether a configuration is another one than the base of this data set."""
    return options_of(data, configuration) != options_of(data, BASE)
