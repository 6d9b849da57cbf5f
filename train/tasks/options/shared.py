"""The options that all tasks share. The command line reads them, so this loads fast."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from diffnet.data.feature_names import canonical_features, vector_channels
from diffnet.data.options import Preprocessing, Variants
from diffnet.geometry.errors import OptionError
from diffnet.geometry.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    ScaleRule,
)
from diffnet.options import Architecture, InitialTimes

# A new task adds its name. The files of a task have this name: `tasks/NAME.py` holds its `TASK`, `options/NAME.py` its
# `OPTIONS`, and `commands/NAME.py` its command `train`.
TaskName: TypeAlias = Literal["segmentation", "classification", "regression", "correspondence"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
Schedule: TypeAlias = Literal["step", "cosine"]
RotationAxis: TypeAlias = Literal["any", "x", "y", "z"]
TrainBackend: TypeAlias = Literal["auto", "torch"]


@dataclass(frozen=True)
class SharedOptions(Architecture):
    """The options that all tasks of `diffnet train` share. Its `--help` explains each one.

    `__post_init__` of the class of a task's own options calls that of this class, and then checks its own values.

    task: the task that the network learns, which is the name of the command
    laplacian: None becomes the one that belongs to the operators, see `precompute`
    batch_meshes, batch_vertices: limits of a batch, which is that of all ranks
    accumulate: how many passes a rank makes over its share of a batch, which need less memory each
    max_faces: decimate meshes that have more faces, see `decimated`; None leaves all as they are
    clip: the norm to which longer gradients are scaled down; 0 for no limit
    average_weights: decay of the moving average of the weights, see `WeightAverage`; 0 for no average
    align: give the vectors among the features in the principal axes of each mesh, see `input_features`. In training,
        they are then rotated by small random angles only.
    rotate: rotate the vectors among the features at random in training: xyz, normals and vector:NAME. None means yes if
        there is one. Other features do not change under rotation.
    rotate_about: "any" for all rotations, or the axis of the rotations
    scale_range: multiply positions by a random factor from 1/scale_range to scale_range, see `augmented`
    jitter: standard deviation of noise on the positions among the features; the radius of a mesh is 1
    mirror: mirror half of the meshes
    cut, decimate: the largest shares of the surface and of the faces that variants of the training meshes lack
    upright: the `shared_axes` of the training meshes, nine numbers, if the network gets their orientation. Earlier
        versions stored the first axis alone, three numbers.
    variants: the number of variants of each mesh, if `cut` or `decimate` is not 0; see `make_variants`
    validation: the share of the training meshes that are held out to choose an epoch
    group_by: see `load_dataset`; it also holds for `validation`
    """

    task: TaskName = "segmentation"
    features: str = "curvature+diffused-curvature+log-hks"
    k: int = 128
    laplacian: LaplacianKind | None = None
    basis: BasisPrecision = "float32"
    join: JoinRule = "auto"
    operators: OperatorsKind = "diffnet"
    normalize: ScaleRule = "radius"
    max_faces: int | None = None
    epochs: int = 100
    learning_rate: float = 2e-3
    schedule: Schedule = "cosine"
    decay_every: int = 50
    clip: float = 0.0
    batch_meshes: int | None = 1
    batch_vertices: int | None = None
    accumulate: int = 1
    align: bool = False
    rotate: bool | None = None
    rotate_about: RotationAxis = "any"
    scale_range: float = 1.0
    jitter: float = 0.0
    mirror: bool = False
    cut: float = 0.0
    decimate: float = 0.0
    variants: int = 8
    average_weights: float = 0.0
    upright: tuple[float, ...] = ()
    validation: float = 0.0
    group_by: str | None = None
    eval_every: int = 5
    precision: Precision = "auto"
    backend: TrainBackend = "auto"
    seed: int = 0
    # The defaults of training that differ from those of `DiffusionNet`.
    width: int = field(default=256, kw_only=True)
    initial_times: InitialTimes = field(default="spread", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "features", canonical_features(self.features))  # the only way in a frozen dataclass
        for name in ("epochs", "decay_every", "eval_every", "variants", "accumulate"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} should be at least 1, got {getattr(self, name)}")
        for name in ("batch_meshes", "batch_vertices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} should be at least 1, got {value}")
        for name in ("validation", "average_weights", "jitter", "cut", "decimate"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name} should be at least 0 and below 1, got {getattr(self, name)}")
        try:
            re.compile(self.group_by or "")
        except re.error as e:
            raise OptionError(f"group_by should be a regular expression, got {self.group_by!r}: {e}") from e
        if self.max_faces is not None and self.max_faces < 4:
            raise OptionError(f"max_faces should be at least 4, got {self.max_faces}")
        if not 0 <= self.clip < math.inf:
            raise OptionError(f"clip should be a finite number of at least 0, got {self.clip}")
        if not 0 < self.learning_rate < 1e36:  # above 1e36, Adam's steps overflow float32
            raise OptionError(f"learning_rate should be above 0 and below 1e36, got {self.learning_rate}")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed should be at least 0 and below 2^63, got {self.seed}")
        if self.attention_heads and self.width % self.attention_heads != 0:
            raise OptionError(f"attention_heads should divide the width, {self.width}, got {self.attention_heads}")
        chosen = self.preprocessing  # checks its own options
        if chosen.k < 1 and self.diffusion == "spectral":
            raise OptionError(f"k should be at least 1 for spectral diffusion, got {self.k}")
        if (self.rotate or self.rotate_about != "any") and not vector_channels(self.features):
            name = "rotate" if self.rotate else "rotate_about"
            raise OptionError(f"{name} needs features with xyz, normals or vector:NAME, got {self.features!r}")
        if self.align and self.rotate_about != "any":
            raise OptionError(
                f"rotate_about is {self.rotate_about!r}, but features are aligned; leave it out or add --no-align"
            )
        if self.rotate is False and self.rotate_about != "any":
            raise OptionError(f"rotate_about should be any where nothing is rotated, got {self.rotate_about!r}")
        if self.jitter > 0 and "xyz" not in self.features.split("+"):
            raise OptionError(f"jitter needs features with xyz, got {self.features!r}")
        object.__setattr__(self, "upright", tuple(self.upright))
        if len(self.upright) not in (0, 3, 9) or not all(map(math.isfinite, self.upright)):
            raise OptionError(f"upright should be empty or three or nine finite numbers, got {self.upright}")
        if not 1 <= self.scale_range <= 10:
            raise OptionError(f"scale_range should be from 1, which is off, to 10, got {self.scale_range}")

    @property
    def preprocessing(self) -> Preprocessing:
        """The options that preprocessing depends on."""
        return Preprocessing(
            self.k, self.laplacian, self.features, self.basis, self.join, self.operators, self.normalize, self.align
        )

    @property
    def aligns(self) -> bool:
        """Whether there are features that are given in principal axes."""
        return self.align and bool(vector_channels(self.features))

    @property
    def mesh_variants(self) -> Variants:
        """The variants of the training meshes."""
        return Variants(self.variants if self.cut or self.decimate else 0, self.cut, self.decimate)

    @property
    def rotates(self) -> bool:
        """Whether features are rotated at random in training."""
        return bool(vector_channels(self.features)) if self.rotate is None else self.rotate

    def learning_rate_at(self, epoch: float) -> float:
        """The learning rate after a number of epochs, which may have a fraction.

        The step schedule halves it every `decay_every` epochs. The cosine schedule lowers it to 0 over the run.
        """
        if self.schedule == "step":
            return self.learning_rate * 0.5 ** int(epoch // self.decay_every)
        return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def check_together(self) -> None:
        """Raises OptionError for options of a task that don't go together. The classes of own options define it."""
