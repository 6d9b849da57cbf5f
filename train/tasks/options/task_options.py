"""`TaskOptions`: the options in which tasks differ. The command line reads them, so this loads fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from diffnet.train.tasks.options.shared import SharedOptions

RecipeName: TypeAlias = Literal["default", "original"]


@dataclass(frozen=True)
class TaskOptions:
    """The options of `TrainOptions` in which a task differs from others.

    own: the shared options, and those that only this task and other tasks with the same class have
    owners: how error messages name the tasks with this class; None for the names of the tasks
    unavailable: options that all tasks have but this one
    generated: the name of the generated data set of this task on the command line; None if there is none. NAME:VARIANT
        is a variant of it, see `variant`.
    prediction: names of the own options that are read from the metadata of a network, see `network_input`
    recipe: changes to the defaults of `TrainOptions`, for the default recipe
    original: changes to the recipe of the original, see `recipe` in `train/recipes.py`
    adapted: (name of a recipe, its options, the user's options) to the recipe's options that fit the user's
    advice: (options, number of classes, mean number of vertices of a mesh) to a hint about options that suit such data
        better, or None
    """

    own: type[SharedOptions] = SharedOptions
    owners: str | None = None
    unavailable: tuple[str, ...] = ()
    generated: str | None = None
    prediction: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    original: Mapping[str, Any] = field(default_factory=dict)
    adapted: Callable[[RecipeName, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = (
        lambda name, options, chosen: options
    )
    advice: Callable[[SharedOptions, int, float], str | None] = lambda options, classes, vertices: None

    def variant(self, data: object) -> str | None:
        """VARIANT of "NAME:VARIANT", the name of a generated set; "" for NAME alone, and None for other data sets."""
        name, _, variant = str(data).partition(":")
        return variant if name == self.generated else None

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the options that `own` adds to the shared ones."""
        return tuple(each.name for each in fields(self.own)[len(fields(SharedOptions)) :])
