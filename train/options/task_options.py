"""`TaskOptions`: the options in which tasks differ. The command line reads them, so this loads fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diffnet.data.feature_names import AUTO_LABELS, checked_mask
from diffnet.data.folders.layouts import Layout
from diffnet.data.labeled import LabelsAt
from diffnet.data.options import Base
from diffnet.options import Checked, option
from diffnet.train.options.panels import of_labels
from diffnet.train.options.shared import SharedOptions

RecipeName: TypeAlias = Literal["default", "original"]


@dataclass(frozen=True, kw_only=True)
class SetOptions(Checked):
    """How a data set is read, which a run doesn't store. Each task reads the options of its sets.

    cache: the folder of preprocessed meshes and of indices
    targets, conditions, labels, group_by, seed: those of `TrainOptions`. The seed also makes the generated set.
    needs_train: whether the training part is read
    fold: see `load_dataset`
    jobs, without: see `index_dataset`. The values of `without` are reasons, which the report has.
    """

    layout: Layout = option("auto", "Layout of a folder for segmentation; auto detects it.")
    files: str | None = option(
        None,
        "The meshes of a folder, by their paths in it, such as 'sub-*/surf/lh.pial'. By default those in the folder, "
        "else those in its subfolders.",
        metavar="PATTERN",
    )
    mask: str | None = of_labels(
        None,
        "Where vertices count, file:NAME or label/lh.cortex.label: elsewhere, there are no loss, score and prediction, "
        "and own arrays among the features, which may be NaN, are 0. It is the feature mask:NAME.",
        metavar="file:NAME",
        check=checked_mask,
    )
    outputs_at: LabelsAt | None = of_labels(
        None, "Elements that the network labels; other labels are converted. Default: those of the labels."
    )
    pairs: str | None = option(
        None,
        "all pairs of meshes, those within or across folders, or a file with two names in each line. By default "
        "pairs.txt in the folder, else all.",
    )
    base: Base = option("auto", "Number of the first vertex in files of correspondences, 0 or 1; auto finds it.")
    registered: bool = option(False, "The meshes have the same faces, and vertices of one number correspond.")
    channels: int | None = option(
        None, "Features that the network computes. By default 128; 256 if unsupervised.", least=1
    )
    cache: Path
    targets: str | None = None
    labels: str = AUTO_LABELS
    conditions: str | None = None
    group_by: str | None = None
    seed: int = 0
    needs_train: bool = True
    fold: tuple[int, int] | None = None
    jobs: int | None = None
    without: dict[str, str] = field(default_factory=dict)

    def named(self, *names: str) -> dict[str, Any]:
        """Some of the options by name."""
        return {name: getattr(self, name) for name in names}

    def for_index(self) -> dict[str, Any]:
        """The keyword arguments that the functions for an index of a set share, see `index_dataset`."""
        return self.named("conditions", "seed", "needs_train", "group_by", "files", "fold", "jobs", "without")


@dataclass(frozen=True)
class TaskOptions:
    """The options of `TrainOptions` in which a task differs from others, and its command.

    help: the explanation of the command
    data: that of its option --data
    takes_several: whether --data may be repeated
    sets: the options of `SetOptions` that the command has
    changes: other explanations and defaults of options of the command, as arguments of `option`
    own: the shared options, and those that only this task and other tasks with the same class have
    owners: how error messages name the tasks with this class; None for the names of the tasks
    unavailable: options that all tasks have but this one
    builtin: the name of the data set on the command line that comes with diffnet; None if there is none
    folder: the folder of this set; None if it is generated
    prediction: names of the own options that are read from the metadata of a network, see `network_input`
    recipe: changes to the defaults of `TrainOptions`, for the default recipe
    original: changes to the recipe of the original, see `recipe`
    adapted: (name of a recipe, its options, the user's options) to the recipe's options that fit the user's
    """

    help: str
    data: str
    takes_several: bool = False
    sets: tuple[str, ...] = ()
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: type[SharedOptions] = SharedOptions
    owners: str | None = None
    unavailable: tuple[str, ...] = ()
    builtin: str | None = None
    folder: Path | None = None
    prediction: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    original: Mapping[str, Any] = field(default_factory=dict)
    adapted: Callable[[RecipeName, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = (
        lambda name, options, choices: options
    )

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the options that `own` adds to the shared ones."""
        return tuple(each.name for each in fields(self.own)[len(fields(SharedOptions)) :])
