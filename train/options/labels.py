"""The options of tasks whose targets are labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from diffnet.data.feature_names import AUTO_LABELS, checked_label_source
from diffnet.data.folders.layouts import BODIES
from diffnet.geometry.errors import OptionError
from diffnet.train.options.panels import of_labels
from diffnet.train.options.shared import SharedOptions, weight_entries
from diffnet.train.options.sides import FDI, NO_SIDES, are_numbers, side_pairs
from diffnet.train.options.task_options import RecipeName, TaskOptions

BALANCED, _ = BY_FREQUENCY = "balanced", "sqrt"  # inverse to the frequencies of the classes, or to their roots
LabelLoss: TypeAlias = Literal["cross-entropy", "focal", "dice", "dice+cross-entropy", "generalized-dice"]
LabelScore: TypeAlias = Literal["accuracy", "balanced-accuracy", "mean-iou", "dice", "roc-auc", "average-precision"]
RANKED: tuple[LabelScore, ...] = ("roc-auc", "average-precision")  # scores of probabilities
FurtherScore: TypeAlias = Literal["roc-auc", "average-precision", "teeth"]  # of `diffnet evaluate`


@dataclass(frozen=True)
class LabelOptions(SharedOptions):
    """The options of tasks with labels.

    label_loss: see `focal_loss`, `dice_loss` and `generalized_dice_loss`. "dice+cross-entropy" is the sum.
    label_smoothing: s of `label_smoothing_loss`, in training
    mirror_labels: a run stores the number of the class that each class becomes, such as "0,2,1", with -1 for unlabeled
    """

    label_loss: LabelLoss = of_labels(
        "cross-entropy",
        "focal gives elements that are predicted well less weight. Dice losses measure overlap, so a rare class "
        "counts as much as a frequent one.",
        flag="--loss",
    )
    label_smoothing: float = of_labels(0.0, "Weight of the wrong classes in the loss, all together.", least=0, below=1)
    labels: str = of_labels(
        AUTO_LABELS,
        "Where the labels are: file:NAME, as MESH.NAME or NAME/MESH with .npy, .txt or .csv, or the property NAME of a "
        "mesh file; groups or materials of OBJ files; or colors. auto: label files, else a property, else colors. "
        "Classification takes the name of a column of its table.",
        metavar="file:NAME",
        check=checked_label_source,
    )
    score: LabelScore = of_labels(
        "accuracy",
        "The score of each epoch, by which --validation chooses one. A rare class counts as much as a frequent "
        "one in balanced-accuracy, mean-iou and dice. roc-auc and average-precision score the order of probabilities.",
    )
    ignore: tuple[str, ...] = of_labels(
        (),
        "A class, by name or number, that counts neither in the loss nor in the scores. Repeatable.",
        metavar="CLASS",
    )
    class_weights: str | None = of_labels(
        None,
        "Weights of the classes in the loss: balanced, one over their frequencies; sqrt, one over the roots; or "
        "1,0.5,2 for all, or NAME=2,NAME=0.5.",
        metavar="WEIGHTS",
    )
    mirror_labels: str | None = of_labels(
        None,
        "Classes that --mirror exchanges: NAME=NAME,NAME=NAME, or fdi for the FDI numbers of teeth, or none.",
        metavar="PAIRS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise OptionError(f"ignore should be a list of names of classes, got {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # the only way in a frozen dataclass
        if self.class_weights is not None and self.class_weights not in BY_FREQUENCY:
            weight_entries("class_weights", self.class_weights)
        if self.mirror_labels not in (None, FDI, NO_SIDES) and not are_numbers(self.mirror_labels):
            side_pairs(self.mirror_labels)

    def check_together(self) -> None:
        if self.label_smoothing > 0 and not _smooths(self.label_loss):
            raise OptionError(
                f"label_smoothing is {self.label_smoothing}, but it smooths the labels of a cross-entropy, and the "
                f"loss is {self.label_loss}; leave it out"
            )
        if self.class_weights is not None and self.label_loss == "generalized-dice":
            raise OptionError(
                f"class_weights is {self.class_weights}, but the loss generalized-dice has its own weights of classes; "
                "leave it out, or choose dice"
            )
        if self.mirror_labels is not None and not self.mirror:
            raise OptionError(f"mirror_labels is {self.mirror_labels}, but no mesh is mirrored; add --mirror")


def _smooths(loss: str) -> bool:
    return "cross-entropy" in loss


def _adapted(name: RecipeName, options: Mapping[str, Any], choices: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe without label smoothing if the loss has none."""
    return options if _smooths(choices.get("label_loss", "cross-entropy")) else {**options, "label_smoothing": 0.0}


HIGHEST_RATE, LOWEST_RATE, STEPS_AT_HIGHEST = 2e-3, 5e-4, 8_000  # see `segmentation_rate`
_CHANGES: dict[str, dict[str, Any]] = {
    "learning_rate": {
        "default": None,
        "help": "Learning rate of Adam. By default 2e-3 for at most 8,000 steps, and 16 / steps for more, at least "
        "5e-4. With --from, at most 5e-4.",
    }
}


def segmentation_rate(steps: int) -> float:
    """The learning rate of a run of so many steps. Long runs at a high one learn the labels of each mesh by heart.

    `docs/recipe.md` has the measurements.

    >>> segmentation_rate(1_200), segmentation_rate(16_000), segmentation_rate(100_000)
    (0.002, 0.001, 0.0005)
    """
    return min(HIGHEST_RATE, max(LOWEST_RATE, HIGHEST_RATE * STEPS_AT_HIGHEST / max(steps, 1)))


SEGMENTATION = TaskOptions(
    help="""Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C and SIGTERM stop the run. With --resume, it continues after the last complete epoch with its options, so only
    --data and --out are repeated, and --layout if it was given. Only --epochs may change, with --schedule step.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """,
    data="Folder of labeled meshes or of shards, a table file,labels (.csv or .tsv) of meshes with label files, or "
    "[bold]bodies[/], the built-in set.",
    sets=("layout", "files", "mask", "outputs_at"),
    changes=_CHANGES,
    own=LabelOptions,
    owners="tasks with labels",
    builtin="bodies",
    folder=BODIES,
    prediction=("ignore", "labels"),
    original={"label_smoothing": 0.0},
    adapted=_adapted,
)
CLASSIFICATION = replace(
    SEGMENTATION,
    help="""Train a network that classifies whole meshes, and report its results on the test meshes.

    --data holds CLASS/train/ and CLASS/test/, or CLASS/ with meshes, or a table labels.csv with lines file,label or
    file,label,split. Without a split, a random fifth of each class is for testing.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """,
    data="Folder of classes or of shards, a table file,label (.csv), or [bold]shapes[/], the generated set of classes.",
    sets=("files", "mask"),
    builtin="shapes",
    folder=None,
    changes={},
    recipe={"width": 128, "dropout": 0.5, "learning_rate": 1e-3, "batch_meshes": 4, "label_smoothing": 0.2},
    original={"width": 32, "dropout": 0.0, "label_smoothing": 0.2},
)
