"""The options of correspondence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diffnet.data.folders.layouts import BODY_MAPS
from diffnet.geometry.errors import OptionError
from diffnet.options import option
from diffnet.train.options.shared import SharedOptions
from diffnet.train.options.task_options import RecipeName, TaskOptions

Method: TypeAlias = Literal["supervised", "unsupervised"]
Regularizer: TypeAlias = Literal["resolvent", "squared_difference"]  # of `ops`, whose import would load PyTorch

LOSS_TERMS = "bijectivity", "orthogonality", "coupling"  # of the unsupervised method
# Changes for the unsupervised method, as in Cao et al. 2023, and those of the default besides.
_UNSUPERVISED: dict[str, Any] = {"features": "wks", "k": 200, "map_k": 200}
_UNSUPERVISED_DEFAULT: dict[str, Any] = {"feature_scale": 1.0}
# They would change the correspondences of a pair, or hold out pairs whose meshes are trained on. With other conditions,
# the meshes of a pair would have other features at vertices that correspond.
_UNAVAILABLE = "conditions", "max_faces", "scale_range", "jitter", "mirror", "decimate", "validation"
# Changes for partial shapes. Their area says nothing of their size, so the unit is that of the training set.
_PARTIAL: dict[str, Any] = {
    "partial": True,
    "features": "metric-curvature+diffused-offsets+log-hks",
    "normalize": "none",
    "cut": 0.7,
    "width": 256,
    "batch_meshes": 4,
    "precision": "auto",
}
# What the help says of shared options. A default of None is decided by the training set.
_CHANGES: dict[str, dict[str, Any]] = {
    "features": {
        "default": None,
        "help": "Input features, see `diffnet train segmentation`. By default curvature+log-hks; wks if unsupervised.",
    },
    "k": {"least": 1, "help": "Eigenpairs of the network."},
    "map_k": {"least": 1, "most": 300},
    "epochs": {
        "default": None,
        "help": "Passes over the training pairs. By default 10,000 pairs in all; 1,500 unsupervised, or 180 with "
        "--from; 25,000 partial.",
    },
    "cut": {"help": "With --partial: the largest share of its area that a copy of a mesh lacks."},
    "variants": {"help": "Copies of each mesh, and pairs of copies for each pair of meshes, with --partial."},
    "batch_meshes": {"flag": "--batch-pairs", "help": "Pairs per step, at least one per rank."},
}


@dataclass(frozen=True)
class CorrespondenceOptions(SharedOptions):
    """The options of correspondence alone. A step takes `batch_meshes` pairs.

    method, map_k, feature_scale, regularizer: see `pair_maps`
    loss_weights: see `unsupervised_loss`
    zoomout: see `point_map_of`
    """

    method: Method = option(
        "supervised", "supervised learns from correspondences, unsupervised from pairs without any."
    )
    map_k: int = option(30, "Eigenpairs of the functional maps.")
    feature_scale: float = option(
        0.0, "Scale features to this root mean square; 0: never. If unsupervised, 1.", least=0, metavar="SIZE"
    )
    regularizer: Regularizer = option(
        "squared_difference", "How supervised functional maps are regularized. The unsupervised ones: resolvent."
    )
    loss_weights: str = option(
        "bijectivity=1,orthogonality=1,coupling=1",
        "Weights of the terms of the unsupervised loss; a term that isn't named has none.",
        metavar="TERM=WEIGHT,…",
    )
    partial: bool = option(
        False,
        "Shapes may be parts. The network also predicts the overlap, and trains on copies of meshes that are cut by "
        "planes, have holes, or are what a camera sees.",
    )
    zoomout: bool = option(False, "Refine functional maps with ZoomOut, to all eigenpairs of the network.")

    @property
    def weight_of(self) -> dict[str, float]:
        """The weight of each term in `loss_weights`. Raises OptionError for text of another form."""
        parts = [part.strip().partition("=") for part in self.loss_weights.split(",")]
        if not all(name in LOSS_TERMS and re.fullmatch(r"\d*\.?\d+", text) for name, _, text in parts):
            terms = ", ".join(LOSS_TERMS)
            raise OptionError(f"loss_weights should be TERM=WEIGHT,… of {terms}, got {self.loss_weights!r:.200}")
        return dict.fromkeys(LOSS_TERMS, 0.0) | {name: float(text) for name, _, text in parts}

    def check_together(self) -> None:
        if not 1 <= self.map_k <= self.k:
            raise OptionError(f"map_k should be from 1 to k, which is {self.k}, got {self.map_k}")
        if not any(self.weight_of.values()):
            raise OptionError("loss_weights should have a weight above 0")
        if self.partial and self.normalize != "none":
            raise OptionError(f"a part's area says nothing of its size; use --normalize none, got {self.normalize}")
        if self.partial and self.zoomout:
            raise OptionError("zoomout refines functional maps, and partial shapes are matched without them")
        if self.cut and not self.partial:
            raise OptionError("cut needs --partial: without it, correspondence is for whole shapes")


def _adapted(name: RecipeName, options: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of the method, with maps of at most k eigenpairs."""
    recipe = dict(options)
    if choices.get("method") == "unsupervised":
        recipe |= _UNSUPERVISED | (_UNSUPERVISED_DEFAULT if name == "default" else {})
    if choices.get("partial"):
        recipe |= _PARTIAL
    return {**recipe, "map_k": min(recipe["map_k"], choices.get("k", recipe["k"]))}


OPTIONS = TaskOptions(
    help="""Train a network whose features match pairs of meshes, and report the geodesic errors of the test pairs.

    The network is trained on functional maps. supervised needs correspondences: .vts files or template points for each
    mesh, a map for each pair, or --registered. unsupervised needs none.

    --partial is for parts of shapes, which must have the unit of length of the training set. Missing points
    of a template and vertices without a partner have the number -1 in its files.

    Writes to --out the files of `diffnet train segmentation`, and errors.csv, errors.png and pages of some pairs. For
    Ctrl-C and --resume, see there. Repeat --pairs, --base and --registered with --resume, if they were given.
    """,
    data="Folder of meshes in pairs, also several times, or [bold]bodies[/], the built-in set of pairs.",
    takes_several=True,
    sets=("pairs", "base", "registered", "channels"),
    changes=_CHANGES,
    own=CorrespondenceOptions,
    unavailable=_UNAVAILABLE,
    builtin="bodies",
    folder=BODY_MAPS,
    prediction=("method", "map_k", "feature_scale", "regularizer", "loss_weights", "partial"),
    # The method of Donati et al. 2020 with DiffusionNet (Sharp et al. 2022), with more eigenpairs in the maps and the
    # regularizer of Ren et al. 2019.
    recipe={
        "features": "curvature+log-hks",
        "k": 200,
        "map_k": 200,
        "feature_scale": 3.0,
        "regularizer": "resolvent",
        "clip": 1.0,
        "width": 128,
        "dropout": 0.0,
        "learning_rate": 1e-3,
        "normalize": "area",
        "precision": "fp32",
        "eval_every": 1,
    },
    original={"map_k": 30, "normalize": "area", "regularizer": "squared_difference"},
    adapted=_adapted,
)
