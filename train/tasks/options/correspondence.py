"""The options of correspondence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.options.shared import SharedOptions
from diffnet.train.tasks.options.task_options import RecipeName, TaskOptions

Method: TypeAlias = Literal["supervised", "unsupervised"]
MAX_STRETCH = 2.0  # sizes that differ by a factor of 50

# Changes for the unsupervised method: of the default, and those of Cao et al. 2023.
_UNSUPERVISED: dict[RecipeName, dict[str, Any]] = {
    "default": {
        "features": "xyz+normals+wks",
        "k": 200,
        "map_k": 200,
        "feature_scale": 1.0,
        "learning_rate": 2e-3,
        "align": True,
    },
    "original": {"features": "wks", "k": 200, "map_k": 200},
}


@dataclass(frozen=True)
class CorrespondenceOptions(SharedOptions):
    """The options of correspondence alone. A step takes `batch_meshes` pairs.

    method, map_k, feature_scale: see `pair_maps`
    zoomout: see `point_map_of`
    stretch: also train on copies with other proportions, see `with_stretched`; 0 makes none
    """

    method: Method = "supervised"
    map_k: int = 30
    feature_scale: float = 0.0
    zoomout: bool = False
    stretch: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.feature_scale < math.inf:
            raise OptionError(f"feature_scale should be a finite number of at least 0, got {self.feature_scale}")
        if not 0 <= self.stretch <= MAX_STRETCH:
            raise OptionError(f"stretch should be from 0 to {MAX_STRETCH:g}, got {self.stretch}")

    def check_together(self) -> None:
        if not 1 <= self.map_k <= self.k:
            raise OptionError(f"map_k should be from 1 to k, which is {self.k}, got {self.map_k}")


def _adapted(name: RecipeName, options: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of the method, with maps of at most k eigenpairs."""
    recipe = {**options, **(_UNSUPERVISED[name] if chosen.get("method") == "unsupervised" else {})}
    return {**recipe, "map_k": min(recipe["map_k"], chosen.get("k", recipe["k"]))}


OPTIONS = TaskOptions(
    own=CorrespondenceOptions,
    # They would change the correspondences of a pair, or hold out pairs whose meshes are trained on.
    unavailable=("max_faces", "scale_range", "jitter", "mirror", "cut", "decimate", "validation"),
    generated="figures",
    prediction=("method", "map_k", "feature_scale"),
    # The method of Donati et al. 2020 with DiffusionNet (Sharp et al. 2022), with more eigenpairs in the maps.
    recipe={
        "features": "curvature+log-hks",
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
    adapted=_adapted,
)
