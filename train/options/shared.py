"""The options that all tasks share. The command line reads them, so this loads fast."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from diffnet.data.feature_names import FEATURE_CHANNELS, canonical_features, column_names, vector_channels
from diffnet.data.options import Preprocessing, Variants
from diffnet.geometry.errors import OptionError, raised_as
from diffnet.geometry.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    Scale,
    ScaleRule,
    scale_in_units,
)
from diffnet.options import Architecture, InitialTimes
from diffnet.train.options.panels import of_augmentation, of_features, of_run, of_training

# A new task adds its name.
TaskName: TypeAlias = Literal["segmentation", "classification", "regression", "correspondence"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
Schedule: TypeAlias = Literal["step", "cosine"]
Freeze: TypeAlias = Literal["blocks"]
RotationAxis: TypeAlias = Literal["any", "x", "y", "z"]
TrainBackend: TypeAlias = Literal["auto", "torch"]

_FORMS = {
    "class_weights": "balanced, sqrt, a list such as 1,0.5,2, or a list such as arm=2,leg=0.5",
    "target_weights": "weights of different names, such as p=2,u=0.5",
}


def weight_entries(option: str, text: str) -> list[tuple[str | None, float]]:
    """The weights in a text such as "1,0.5,2" or "arm=2,leg=0.5", with the name of each, or None.

    option: the one with this text, class_weights or target_weights

    Raises OptionError for a text that is neither, for a weight that is negative or not finite, for a name that occurs
    twice, and if all weights are 0.

    >>> weight_entries("class_weights", "arm=2,leg=0.5")
    [('arm', 2.0), ('leg', 0.5)]
    """
    expected = f"{option} should be {_FORMS[option]}"
    entries: list[tuple[str | None, float]] = []
    for entry in text.split(","):
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError as e:
            raise OptionError(f"{expected}; got {entry!r}") from e
        if not (0 <= weight < math.inf):
            raise OptionError(f"{option} should be finite and at least 0, got {entry!r}")
        entries.append((name.strip() if equals else None, weight))
    names = [name for name, _ in entries]
    if None in names and any(name is not None for name in names):
        raise OptionError(f"{expected}; got {text!r}")
    if None not in names and len(set(names)) < len(names):
        raise OptionError(f"{option} should name each once, got {text!r}")
    if not any(weight for _, weight in entries) and None in names:
        raise OptionError(f"{option} should have a weight above 0, got {text!r}")
    return entries


def checked_pattern(text: str) -> str:
    """The regular expression. Raises OptionError for another text."""
    with raised_as(OptionError, f"group_by should be a regular expression, got {text!r}", re.error):
        re.compile(text)
    return text


@dataclass(frozen=True)
class SharedOptions(Architecture):
    """The options that all tasks of `diffnet train` share.

    `__post_init__` of the class of a task's own options calls that of this class, and then checks its own values.

    task: the task that the network learns, which is the name of the command
    laplacian: None becomes the one that belongs to the operators, see `precompute`
    rotate: None means yes if there are vectors among the features
    upright: the `shared_axes` of the training meshes, nine numbers, if the network gets their orientation. Earlier
        versions stored the first axis alone, three numbers.
    """

    task: TaskName = "segmentation"
    features: str = of_features(
        "curvature+diffused-curvature+log-hks",
        f"Input features at the vertices: {', '.join(FEATURE_CHANNELS)} and file:NAME, one or several joined by +."
        " file:NAME is NAME/MESH.npy, MESH.NAME.npy or NAME in a PLY or VTK file; file:colors is the colors of "
        "the vertices of a PLY, OBJ or OFF file. vector:NAME turns with the mesh, and scalar:NAME doesn't.",
        metavar="PART+PART…",
        check=canonical_features,
    )
    k: int = of_features(128, "Number of eigenpairs; 0 is allowed for implicit diffusion of xyz.", least=0)
    laplacian: LaplacianKind | None = of_features(
        None, "robust, the default, accepts any mesh; cotan is the one of --operators original."
    )
    basis: BasisPrecision = of_features(
        "float32", "Storage precision of eigenvectors. Half precision makes the cache a third smaller."
    )
    join: JoinRule = of_features(
        "auto", "Join vertices at the same position: auto does where this connects most of the mesh."
    )
    operators: OperatorsKind = of_features(
        "diffnet", "original has the operators of the original implementation, with its regularization."
    )
    normalize: ScaleRule = of_features(
        "radius",
        "Scale meshes to radius 1 or to area 1. all-radius and all-area count vertices of no face, too. none keeps the "
        "size of meshes, for targets that depend on it.",
    )
    units: float = of_features(
        1.0,
        "With --normalize none: the length that becomes 1. Choose about the radius of a mesh, in the unit of its file.",
        metavar="LENGTH",
    )
    conditions: str | None = of_features(
        None,
        "Columns of the table that are inputs, too: numbers of each mesh, such as a speed or an age. --data is the "
        "table, or the folder with it. Those that are no columns are numbers in the field data of VTK files.",
        metavar="COLUMN,COLUMN…",
        check=lambda text: ",".join(column_names("conditions", text)),
    )
    max_faces: int | None = of_features(
        None,
        "Decimate meshes with more faces. Scores and predictions are those of the full meshes. Default: none.",
        least=4,
    )
    start: str | None = of_training(
        None,
        "Start from the weights of a network, with its features, size and operators: its file, the folder of a run, or "
        "the name of a built-in network. With other classes, the last layer is new.",
        flag="--from",
        metavar="NETWORK",
    )
    freeze: Freeze | None = of_training(None, "With --from: blocks trains the last layer only.")
    epochs: int = of_training(100, "Passes over the training meshes.", least=1)
    learning_rate: float = of_training(2e-3, "Learning rate of Adam. With --from, at most 5e-4.", flag="--lr")
    schedule: Schedule = of_training(
        "cosine", "step halves the learning rate every --decay-every epochs; cosine lowers it to 0."
    )
    decay_every: int = of_training(50, "Epochs between two steps of the step schedule.", least=1)
    clip: float = of_training(
        0.0, "Scale gradients down to this norm if they are longer; 0: never.", least=0, metavar="NORM"
    )
    batch_meshes: int | None = of_training(1, "Meshes per step of all ranks, one each at least.", least=1)
    batch_vertices: int | None = of_training(
        None, "Instead of a number of meshes: at most N vertices per step.", least=1
    )
    accumulate: int = of_training(
        1, "Divide each step into N passes, which need less memory, with equal results.", least=1, metavar="N"
    )
    average_weights: float = of_training(
        0.0, "Average the weights over about 1/(1 - DECAY) steps.", least=0, below=1, most=0.999999, metavar="DECAY"
    )
    validation: float = of_training(
        0.0,
        "Share of the training meshes held out to choose the best epoch, as a part val/ of the data does.",
        least=0,
        below=1,
        most=0.9,
    )
    group_by: str | None = of_training(
        None,
        "Random divisions leave groups together, such as scans of a patient. A regular expression on the names of "
        "meshes: its first group, or all that it matches, names the group.",
        metavar="PATTERN",
        check=checked_pattern,
    )
    eval_every: int = of_training(5, "Epochs between evaluations of the test set.", least=1)
    seed: int = of_training(0, "Seed of weights, order of meshes, dropout and splits.")
    rotate: bool | None = of_augmentation(None, "Rotate xyz, normals and vectors at random in training. Default: yes.")
    rotate_about: RotationAxis = of_augmentation("any", "The axis of the random rotations; any for all rotations.")
    scale_range: float = of_augmentation(
        1.0, "Scale meshes at random by a factor from 1/S to S in training.", least=1, most=10
    )
    jitter: float = of_augmentation(
        0.0, "Standard deviation of noise on xyz in training. Meshes have radius 1.", least=0, below=1
    )
    mirror: bool = of_augmentation(False, "Mirror half of the meshes in training.")
    cut: float = of_augmentation(
        0.0, "Also train on cut variants of the meshes. Random planes cut off up to this share.", least=0, below=1
    )
    decimate: float = of_augmentation(
        0.0, "Also train on variants with fewer faces, which lack up to this share.", least=0, below=1
    )
    variants: int = of_augmentation(8, "Variants of each training mesh, with --cut or --decimate.", least=1)
    precision: Precision = of_run("auto", "auto is bf16 on GPUs that support it, else fp32.")
    backend: TrainBackend = of_run("auto", "auto uses the fused kernels on a GPU; torch is plain PyTorch.")
    upright: tuple[float, ...] = ()
    # The defaults of training that differ from those of `DiffusionNet`.
    width: int = field(default=256, kw_only=True)
    dropout: float = field(default=0.2, kw_only=True)
    initial_times: InitialTimes = field(default="spread", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.learning_rate < 1e36:  # above 1e36, Adam's steps overflow float32
            raise OptionError(f"learning_rate should be above 0 and below 1e36, got {self.learning_rate}")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed should be at least 0 and below 2^63, got {self.seed}")
        if self.freeze is not None and self.start is None:
            raise OptionError(f"freeze is {self.freeze}, but there is no network to start from; add --from")
        if self.attention_heads and self.width % self.attention_heads != 0:
            raise OptionError(f"attention_heads should divide the width, {self.width}, got {self.attention_heads}")
        preprocessing = self.preprocessing  # checks its own options
        if preprocessing.k < 1 and self.diffusion == "spectral":
            raise OptionError(f"k should be at least 1 for spectral diffusion, got {self.k}")
        if (self.rotate or self.rotate_about != "any") and not vector_channels(self.features):
            name = "rotate" if self.rotate else "rotate_about"
            raise OptionError(f"{name} needs features with xyz, normals or vector:NAME, got {self.features!r}")
        if metric := {"metric-curvature", "diffused-offsets"}.intersection(self.features.split("+")):
            if self.scale_range > 1:
                raise OptionError(f"scale_range can't change {max(metric)}, which depends on the size")
            if self.mirror and "diffused-offsets" in metric:
                raise OptionError("mirror can't change diffused-offsets, which tell left from right")
        if self.rotate is False and self.rotate_about != "any":
            raise OptionError(f"rotate_about should be any where nothing is rotated, got {self.rotate_about!r}")
        if self.jitter > 0 and "xyz" not in self.features.split("+"):
            raise OptionError(f"jitter needs features with xyz, got {self.features!r}")
        object.__setattr__(self, "upright", tuple(self.upright))  # the only way in a frozen dataclass
        if len(self.upright) not in (0, 3, 9) or not all(map(math.isfinite, self.upright)):
            raise OptionError(f"upright should be empty or three or nine finite numbers, got {self.upright}")

    @property
    def preprocessing(self) -> Preprocessing:
        """The options that preprocessing depends on."""
        return Preprocessing(self.k, self.laplacian, self.features, self.basis, self.join, self.operators, self.scale)

    @property
    def scale(self) -> Scale:
        """How positions are normalized. Raises OptionError for units that don't go with the rule."""
        return scale_in_units(self.normalize, self.units)

    @property
    def condition_names(self) -> list[str]:
        """The names of the conditions of each mesh."""
        return [] if self.conditions is None else self.conditions.split(",")

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
