"""The options of tasks whose targets are labels."""

from __future__ import annotations

from dataclasses import dataclass

from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.class_weights import BALANCED, class_weight_entries
from diffnet.train.tasks.task_options import OptionGroup, TaskOptions


@dataclass(frozen=True)
class LabelOptions(OptionGroup):
    """The options of tasks with labels.

    label_smoothing: s of `label_smoothing_loss`, in training
    ignore: classes, by name or number, whose elements count neither in the loss nor in the scores
    class_weights: weights of the classes in the loss: "balanced", "1,0.5,2", or "arm=2,leg=0.5" and 1 for others
    """

    label_smoothing: float = 0.0
    ignore: tuple[str, ...] = ()
    class_weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise OptionError(f"label_smoothing should be at least 0 and below 1, got {self.label_smoothing}")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise OptionError(f"ignore should be a list of names of classes, got {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # the only way in a frozen dataclass
        if self.class_weights is not None and self.class_weights != BALANCED:
            class_weight_entries(self.class_weights)


LABELED = TaskOptions(
    own=LabelOptions,
    owners="tasks with labels",
    unavailable=("align",),
    prediction=("ignore",),
    original={"label_smoothing": 0.0},
)
