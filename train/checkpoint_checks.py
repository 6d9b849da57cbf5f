"""Checks of the plain values in a checkpoint, and of the sizes that they name.

Each function raises CheckpointError, which names the file and the value. A file can hold anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from diffnet.checkpoints.files import (
    CheckpointError,
    check_format,
    check_named_tensors,
    check_names_and_shapes,
    shown,
)
from diffnet.checkpoints.training import FORMAT, OLDER
from diffnet.data import Statistics, TargetsAt, check_statistics
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions
from diffnet.train.run_folder.history import COLUMNS
from diffnet.train.tasks.names import TARGETS_AT

CONTENT = {"model", "optimizer", "history", "best", "options", "label_names", "labels_at", "data"}
LARGEST = 2**31  # bound of whole numbers in the options, except the seed

Path = str | os.PathLike[str]
Checkpoint = dict[str, Any]


def checked_values(path: Path, checkpoint: Any) -> Checkpoint:
    """Check the format and all entries except weights and options."""
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise CheckpointError(f"{path}: not a checkpoint of `diffnet train`")
    check_format(path, checkpoint["format"], FORMAT, checkpoint.get("version", ""))
    if not checkpoint.keys() >= CONTENT:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(sorted(CONTENT - checkpoint.keys()))}")
    names = checkpoint["label_names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: label_names should be a list of names, got {shown(names)}")
    for name, hint in (("labels_at", TargetsAt), ("best", float), ("data", str)):
        if not _fits(checkpoint[name], hint):
            raise CheckpointError(f"{path}: {name} has the value {shown(checkpoint[name])}, which is not allowed")
    history = checkpoint["history"]
    if not isinstance(history, list) or not all(_is_row(row, epoch) for epoch, row in enumerate(history, 1)):
        raise CheckpointError(f"{path}: history should be a list with one row of numbers per epoch")
    return checkpoint


def checked_options(path: Path, checkpoint: Checkpoint) -> TrainOptions:
    """The options of the run. A checkpoint of an older version lacks newer options and gets what that version did."""
    options = checkpoint["options"]
    if not isinstance(options, dict):
        raise CheckpointError(f"{path}: options should be a dictionary, got {type(options).__name__}")
    hints = get_type_hints(TrainOptions)
    for name, value in options.items():
        if name not in hints:
            raise CheckpointError(
                f"{path}: unknown option {shown(name)}; a newer version of diffnet may have written it"
            )
        if not _fits(value, hints[name]) or (_fits(value, int) and name != "seed" and abs(value) >= LARGEST):
            raise CheckpointError(f"{path}: option {name} has the value {shown(value)}, which is not allowed")
    try:
        read = TrainOptions(**OLDER | options)
    except OptionError as e:
        raise CheckpointError(f"{path}: {e}") from e
    if checkpoint["labels_at"] not in TARGETS_AT[read.task]:
        raise CheckpointError(f"{path}: labels_at is {checkpoint['labels_at']}, which is not allowed in {read.task}")
    return read


def checked_statistics(path: Path, checkpoint: Checkpoint, options: TrainOptions) -> Statistics:
    """The statistics of the own arrays among the features. Checkpoints of older versions have neither."""
    try:
        return check_statistics(options.features, checkpoint.get("statistics", {}))
    except OptionError as e:
        raise CheckpointError(f"{path}: {e}") from e


def check_sizes(path: Path, options: TrainOptions, weights: Mapping[str, Tensor]) -> None:
    """Compare the sizes in the options with the weights, which are in memory. A network is built from the options."""
    first = weights.get("first.weight")
    width = len(first) if first is not None and first.ndim == 2 else 0
    if options.width != width:
        raise CheckpointError(f"{path}: width is {options.width}, but the weights are those of width {width}")
    if options.blocks > len(weights):
        raise CheckpointError(f"{path}: blocks is {options.blocks}, but there are only {len(weights)} weights")


def check_optimizer(path: Path, state: Any, parameters: Sequence[Tensor]) -> None:
    """Check the moments that Adam keeps for each parameter. The settings of Adam are not read from a checkpoint."""
    moments = state.get("state") if isinstance(state, dict) else None
    if not isinstance(moments, dict) or not all(
        _fits(i, int) and 0 <= i < len(parameters) and isinstance(moments[i], dict) for i in moments
    ):
        raise CheckpointError(f"{path}: optimizer should hold the state of {len(parameters)} parameters")
    named = {f"optimizer.{i}.{name}": value for i in moments for name, value in moments[i].items()}
    expected = {
        f"optimizer.{i}.{name}": parameters[i] if name != "step" else parameters[i].new_empty(())
        for i in moments
        for name in ("step", "exp_avg", "exp_avg_sq")
    }
    check_names_and_shapes(path, check_named_tensors(path, named), expected)


def _is_row(row: Any, epoch: int) -> bool:
    return (
        isinstance(row, dict)
        and row.keys() == set(COLUMNS)
        and all(_fits(value, float | None) for value in row.values())
        and row["epoch"] == epoch
    )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value has the type of an option. As usual, an int is also a float. A bool is no number."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:  # of any length, stored as a list
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    choices = get_args(hint) or (hint,)
    types = {*choices, *((int,) if float in choices else ())}
    return type(value) in types or (value is None and NoneType in types)
