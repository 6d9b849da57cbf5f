"""Checkpoints hold everything needed to predict with a network and to resume its training.

A file can hold anything. The checks raise CheckpointError, which names the file and the value.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from diffnet import DiffusionNet, __version__
from diffnet.checkpoints.files import (
    CheckpointError,
    check_format,
    check_named_tensors,
    check_names_and_shapes,
    read_checkpoint_file,
    shown,
)
from diffnet.checkpoints.training import FORMAT, REMOVED, VECTOR_BLOCKS, metadata_of, options_in, outputs_at_of
from diffnet.data import Statistics, TargetsAt, check_statistics, check_target_statistics, feature_channels
from diffnet.geometry.errors import OptionError, raised_as
from diffnet.geometry.files import write_atomically
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import check_not_aligned
from diffnet.train.run_folder import columns
from diffnet.train.tasks.task import Task, task_named

__all__ = ["Checkpoint", "CheckpointError", "build_model", "load_checkpoint", "restore_model", "save_checkpoint"]

CONTENT = {"model", "optimizer", "history", "best", "options", "label_names", "labels_at", "data"}
PAIR_ATTENTION = 2  # layers of networks for partial shapes
MAX_INTEGER = 2**31  # of whole numbers in the options, except the seed

Path = str | os.PathLike[str]
Checkpoint = dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint, *more: Path) -> None:
    """Write a checkpoint, and more files with the same content. Old files stay until the new ones are complete."""
    buffer = io.BytesIO()
    torch.save({**checkpoint, "format": FORMAT, "version": __version__}, buffer)
    for file in (path, *more):
        write_atomically(file, buffer.getbuffer())


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint, and check everything in it before a network is built.

    A checkpoint can hold only tensors and plain values, never code. Raises CheckpointError for any other file, and for
    a checkpoint of a newer version.
    """
    checkpoint = _checked_values(path, read_checkpoint_file(path, device))
    options = _checked_options(path, checkpoint)
    task = task_named(options.task)
    _check_history(path, checkpoint, task, options)
    checkpoint["position"] = _checked_position(path, checkpoint)
    checkpoint["options"], checkpoint["format"] = options.as_dict(), FORMAT
    with raised_as(CheckpointError, path, OptionError):
        checkpoint |= checked_statistics(checkpoint, options, task, len(checkpoint["label_names"]))
    weights = check_named_tensors(path, checkpoint["model"])
    _check_sizes(path, options, weights)
    with torch.device("meta"):  # a network without memory
        network = build_model(options, checkpoint["label_names"], checkpoint["labels_at"], checkpoint["statistics"])
    check_names_and_shapes(path, weights, network.state_dict())
    checkpoint["averaging"] = _checked_averaging(path, checkpoint, options, network.state_dict())
    _check_optimizer(path, checkpoint["optimizer"], list(network.parameters()))
    return checkpoint


def build_model(
    options: TrainOptions, label_names: list[str], labels_at: TargetsAt, statistics: Statistics | None = None
) -> DiffusionNet:
    """A network with random weights. statistics: of the own arrays, which tell their numbers of channels"""
    return DiffusionNet(
        feature_channels(options.features, statistics),
        len(label_names),
        **options.network,
        condition_channels=len(options.condition_names),
        pair_attention=min(PAIR_ATTENTION, options.blocks) if options.partial else 0,
        vectors=options.vector_outputs,
        **(VECTOR_BLOCKS if options.vector_outputs else {}),
        outputs_at=outputs_at_of(labels_at),
        backend=options.backend,
    )


def restore_model(checkpoint: Checkpoint) -> tuple[DiffusionNet, TrainOptions]:
    """The network of a checkpoint in eval mode, which is that of `DiffusionNet.load`, and the options of its run."""
    options = TrainOptions(**checkpoint["options"])
    model = build_model(options, checkpoint["label_names"], checkpoint["labels_at"], checkpoint["statistics"])
    model.load_state_dict(checkpoint["model"])
    model.metadata = metadata_of(checkpoint)
    return model.eval(), options


def _checked_values(path: Path, checkpoint: Any) -> Checkpoint:
    """Check the format and all entries except weights, history and options."""
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise CheckpointError(f"{path}: not a checkpoint of `diffnet train`")
    check_format(path, checkpoint["format"], FORMAT, checkpoint.get("version", ""))
    if not checkpoint.keys() >= CONTENT:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(sorted(CONTENT - checkpoint.keys()))}")
    names = checkpoint["label_names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: label_names should be a list of names, got {shown(names)}")
    for name, hint in (("labels_at", TargetsAt), ("best", float), ("data", str)):
        if not fits(checkpoint[name], hint):
            raise CheckpointError(f"{path}: {name} has the value {shown(checkpoint[name])}, which is not allowed")
    return checkpoint


def _checked_options(path: Path, checkpoint: Checkpoint) -> TrainOptions:
    """The options of the run. A checkpoint of an older version lacks newer options and gets what that version did."""
    options = checkpoint["options"]
    if not isinstance(options, dict):
        raise CheckpointError(f"{path}: options should be a dictionary, got {type(options).__name__}")
    hints = get_type_hints(TrainOptions)
    present = {name: value for name, value in options.items() if name not in REMOVED}
    for name, value in present.items():
        if name not in hints:
            raise CheckpointError(
                f"{path}: unknown option {shown(name)}; a newer version of diffnet may have written it"
            )
        if not fits(value, hints[name]) or (fits(value, int) and name != "seed" and abs(value) >= MAX_INTEGER):
            raise CheckpointError(f"{path}: option {name} has the value {shown(value)}, which is not allowed")
    with raised_as(CheckpointError, path, OptionError):
        trained = TrainOptions(**options_in({**checkpoint, "options": present}))
        check_not_aligned(options.get("align"), trained.features)
    if options.get("stretch"):  # of a correspondence, whose checkpoints are only read to resume the run
        raise CheckpointError(
            f"{path}: stretch is {shown(options['stretch'])}. diffnet 1.0.0 of 2026-11-26 was the last version that "
            "trains on stretched copies; use it, or start a new run, for example with --from"
        )
    return trained


def _check_history(path: Path, checkpoint: Checkpoint, task: Task[Any, Any], options: TrainOptions) -> None:
    """Check the elements with targets, and the history, whose columns depend on the task and its score."""
    at = checkpoint["labels_at"]
    if not task.allows(at) or (isinstance(at, tuple) and len(at) != len(checkpoint["label_names"])):
        raise CheckpointError(f"{path}: labels_at is {at!s:.200}, which is not allowed in {task.name}")
    history, expected = checkpoint["history"], set(columns(task.score_name(options)))
    if not isinstance(history, list) or not all(_is_row(row, i, expected) for i, row in enumerate(history, 1)):
        raise CheckpointError(f"{path}: history should be a list with one row of numbers per epoch")


def _checked_position(path: Path, checkpoint: Checkpoint) -> Checkpoint | None:
    """The position in an epoch, or None between epochs, as in checkpoints of older versions.

    steps: how many of the epoch were taken, with their losses, their tally and the sums of `TrainingStep`
    random: the states of the random generators of each rank, as text
    """
    position: Checkpoint | None = checkpoint.get("position")
    if position is None:
        return None
    fine = isinstance(position, dict) and position.keys() - {"sums"} == {"steps", "losses", "tally", "random"}
    fine = fine and fits(position["steps"], int) and 0 < position["steps"] < MAX_INTEGER
    fine = fine and isinstance(position["random"], list) and all(fits(states, list) for states in position["random"])
    fine = fine and all(fits(text, str) for states in position["random"] for text in states)
    losses, tally = (position["losses"], position["tally"]) if fine else (None, None)
    if not (isinstance(losses, Tensor) and isinstance(tally, Tensor) and losses.shape == (position["steps"],)):
        raise CheckpointError(f"{path}: position should be one in an epoch, got {shown(position)}")
    sums = position.setdefault("sums", torch.zeros(2).double())  # older versions have none
    if not (isinstance(sums, Tensor) and sums.shape == (2,)):
        raise CheckpointError(f"{path}: sums of position should be two numbers, got {shown(sums)}")
    return position


def checked_statistics(
    stored: Mapping[str, Any], options: TrainOptions, task: Task[Any, Any], outputs: int
) -> dict[str, Any]:
    """The statistics of own arrays, of targets and of conditions in a checkpoint or in metadata. Raises OptionError.

    Checkpoints of older versions have none. Targets and conditions have None if they aren't standardized.
    """
    targets, conditions = outputs if task.standardized else 0, len(options.condition_names)
    counts = {"target_statistics": targets, "condition_statistics": conditions}
    others = {name: check_target_statistics(stored.get(name), n) if n else None for name, n in counts.items()}
    return {"statistics": check_statistics(options.features, stored.get("statistics", {})), **others}


def _check_sizes(path: Path, options: TrainOptions, weights: Mapping[str, Tensor]) -> None:
    """Compare the sizes in the options with the weights, which are in memory. A network is built from the options."""
    first = weights.get("first.weight")
    width = len(first) if first is not None and first.ndim == 2 else 0
    if options.width != width:
        raise CheckpointError(f"{path}: width is {options.width}, but the weights are those of width {width}")
    if options.blocks > len(weights):
        raise CheckpointError(f"{path}: blocks is {options.blocks}, but there are only {len(weights)} weights")


def _check_optimizer(path: Path, state: Any, parameters: Sequence[Tensor]) -> None:
    """Check the moments that Adam keeps for each parameter. The settings of Adam are not read from a checkpoint."""
    moments = state.get("state") if isinstance(state, dict) else None
    if not isinstance(moments, dict) or not all(
        fits(i, int) and 0 <= i < len(parameters) and isinstance(moments[i], dict) for i in moments
    ):
        raise CheckpointError(f"{path}: optimizer should hold the state of {len(parameters)} parameters")
    named = {f"optimizer.{i}.{name}": value for i in moments for name, value in moments[i].items()}
    expected = {
        f"optimizer.{i}.{name}": parameters[i] if name != "step" else parameters[i].new_empty(())
        for i in moments
        for name in ("step", "exp_avg", "exp_avg_sq")
    }
    check_names_and_shapes(path, check_named_tensors(path, named), expected)


def _checked_averaging(
    path: Path, checkpoint: Checkpoint, options: TrainOptions, expected: Mapping[str, Tensor]
) -> Checkpoint | None:
    """The state of `WeightAverage`, or None for a run without it."""
    state = checkpoint.get("averaging")
    if options.average_weights == 0 or not isinstance(state, dict):
        if options.average_weights > 0 or state is not None:
            raise CheckpointError(f"{path}: average_weights is {options.average_weights}, averaging is {shown(state)}")
        return None
    total = {"total": next(iter(expected.values())).new_empty(())}
    for name, tensors in (("trained", expected), ("averages", expected), ("total", total)):
        check_names_and_shapes(path, check_named_tensors(path, state.get(name)), tensors)
    return state


def _is_row(row: Any, epoch: int, expected: set[str]) -> bool:
    return (
        isinstance(row, dict)
        and row.keys() == expected
        and all(fits(value, float | None) for value in row.values())
        and row["epoch"] == epoch
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value has the type of an option. As usual, an int is also a float. A bool is no number."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:  # of any length, stored as a list
        return isinstance(value, (list, tuple)) and all(fits(item, get_args(hint)[0]) for item in value)
    if get_args(hint):
        return any(fits(value, choice) for choice in get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)
