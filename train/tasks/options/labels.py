"""The options of tasks whose targets are labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.options.shared import SharedOptions
from diffnet.train.tasks.options.sides import FDI, NO_SIDES, are_numbers, side_pairs
from diffnet.train.tasks.options.task_options import RecipeName, TaskOptions

BALANCED, SQRT = BY_FREQUENCY = "balanced", "sqrt"  # inverse to the frequencies of the classes, or to their roots
LabelLoss: TypeAlias = Literal["cross-entropy", "focal", "dice", "dice+cross-entropy", "generalized-dice"]
LabelScore: TypeAlias = Literal["accuracy", "balanced-accuracy", "mean-iou"]


@dataclass(frozen=True)
class LabelOptions(SharedOptions):
    """The options of tasks with labels.

    label_loss: the loss; see `focal_loss`, `dice_loss` and `generalized_dice_loss`. "dice+cross-entropy" is the sum.
    label_smoothing: s of `label_smoothing_loss`, in training
    score: the score in metrics.csv, by which `validation` chooses the epoch
    ignore: classes, by name or number, whose elements count neither in the loss nor in the scores
    class_weights: weights of the classes in the loss: "balanced", "sqrt", "1,0.5,2", or "arm=2,leg=0.5" and 1 for
        others
    mirror_labels: the classes that `mirror` exchanges: "11=21,12=22"; "fdi", by the FDI numbers of teeth; or "none". A
        run stores the number of the class that each class becomes, such as "0,2,1", with -1 for unlabeled.
    """

    label_loss: LabelLoss = "cross-entropy"
    label_smoothing: float = 0.0
    score: LabelScore = "accuracy"
    ignore: tuple[str, ...] = ()
    class_weights: str | None = None
    mirror_labels: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise OptionError(f"label_smoothing should be at least 0 and below 1, got {self.label_smoothing}")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise OptionError(f"ignore should be a list of names of classes, got {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # the only way in a frozen dataclass
        if self.class_weights is not None and self.class_weights not in BY_FREQUENCY:
            class_weight_entries(self.class_weights)
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


def _adapted(name: RecipeName, options: Mapping[str, Any], chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe without label smoothing if the loss has none."""
    return options if _smooths(chosen.get("label_loss", "cross-entropy")) else {**options, "label_smoothing": 0.0}


LABELED = TaskOptions(
    own=LabelOptions,
    owners="tasks with labels",
    unavailable=("align",),
    prediction=("ignore",),
    original={"label_smoothing": 0.0},
    adapted=_adapted,
)


def class_weight_entries(text: str) -> list[tuple[str | None, float]]:
    """The weights in a text such as "1,0.5,2" or "arm=2,leg=0.5", with the class of each, or None.

    Raises OptionError for a text that is neither, for a weight that is negative or not finite, for a class that occurs
    twice, and if all weights are 0.

    >>> class_weight_entries("arm=2,leg=0.5")
    [('arm', 2.0), ('leg', 0.5)]
    """
    expected = f"class_weights should be {BALANCED}, {SQRT}, a list such as 1,0.5,2, or a list such as arm=2,leg=0.5"
    found: list[tuple[str | None, float]] = []
    for entry in text.split(","):
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError as e:
            raise OptionError(f"{expected}; got {entry!r}") from e
        if not (0 <= weight < math.inf):
            raise OptionError(f"class_weights should be finite and at least 0, got {entry!r}")
        found.append((name.strip() if equals else None, weight))
    names = [name for name, _ in found]
    if None in names and any(name is not None for name in names):
        raise OptionError(f"{expected}; got {text!r}")
    if None not in names and len(set(names)) < len(names):
        raise OptionError(f"class_weights should name each class once, got {text!r}")
    if not any(weight for _, weight in found) and None in names:
        raise OptionError(f"class_weights should have a weight above 0, got {text!r}")
    return found
