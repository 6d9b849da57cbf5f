"""The options of regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from diffnet.data.feature_names import target_parts
from diffnet.train.tasks.options.shared import SharedOptions
from diffnet.train.tasks.options.task_options import TaskOptions

Loss: TypeAlias = Literal["mse", "l1", "huber"]


@dataclass(frozen=True)
class RegressionOptions(SharedOptions):
    """The options of regression alone.

    targets: see `load_targets`
    loss: see `Regression.loss`
    scalar_targets: all targets are numbers that stay as they are when a mesh is rotated or mirrored, whatever the names
        of their columns look like
    """

    targets: str | None = None
    loss: Loss = "mse"
    scalar_targets: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets is not None:
            target_parts(self.targets)


OPTIONS = TaskOptions(
    own=RegressionOptions,
    unavailable=("align",),
    prediction=("targets",),
    recipe={"width": 128, "dropout": 0.0, "learning_rate": 1e-3},
)
