"""Checkpoints hold everything needed to predict with a network and to resume its training."""

from __future__ import annotations

import io
import os

import torch

from diffnet import DiffusionNet, __version__
from diffnet.checkpoints.files import CheckpointError, check_named_tensors, check_names_and_shapes, read_checkpoint_file
from diffnet.checkpoints.training import FORMAT, metadata_of, outputs_at_of
from diffnet.data import Statistics, TargetsAt, feature_channels
from diffnet.geometry.files import write_atomically
from diffnet.train.checkpoint_checks import (
    Checkpoint,
    check_all_statistics,
    check_history,
    check_optimizer,
    check_sizes,
    checked_averaging,
    checked_options,
    checked_position,
    checked_values,
)
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.task import task_named

__all__ = ["Checkpoint", "CheckpointError", "build_model", "load_checkpoint", "restore_model", "save_checkpoint"]


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint, *more: str | os.PathLike[str]) -> None:
    """Write a checkpoint. The file is complete at any time: the old one stays until the new one is written.

    more: further files that get the same content, after the first one
    """
    buffer = io.BytesIO()
    torch.save({**checkpoint, "format": FORMAT, "version": __version__}, buffer)
    for file in (path, *more):
        write_atomically(file, buffer.getbuffer())


def load_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint, and check everything in it before a network is built.

    A checkpoint can hold only tensors and plain values, never code. Raises CheckpointError for any other file, and for
    a checkpoint of a newer version.
    """
    checkpoint = checked_values(path, read_checkpoint_file(path, device))
    options = checked_options(path, checkpoint)
    task = task_named(options.task)
    check_history(path, checkpoint, task, options)
    checkpoint["position"] = checked_position(path, checkpoint)
    checkpoint["options"], checkpoint["format"] = options.as_dict(), FORMAT
    check_all_statistics(path, checkpoint, options, task)
    weights = check_named_tensors(path, checkpoint["model"])
    check_sizes(path, options, weights)
    with torch.device("meta"):  # a network without memory
        network = build_model(options, checkpoint["label_names"], checkpoint["labels_at"], checkpoint["statistics"])
    check_names_and_shapes(path, weights, network.state_dict())
    checkpoint["averaging"] = checked_averaging(path, checkpoint, options, network.state_dict())
    check_optimizer(path, checkpoint["optimizer"], list(network.parameters()))
    return checkpoint


def build_model(
    options: TrainOptions, label_names: list[str], labels_at: TargetsAt, statistics: Statistics | None = None
) -> DiffusionNet:
    """A network with random weights, as the options describe it.

    statistics: of the own arrays among the features, which tell their numbers of channels
    """
    return DiffusionNet(
        feature_channels(options.features, statistics),
        len(label_names),
        **options.network,
        outputs_at=outputs_at_of(labels_at),
        backend=options.backend,
    )


def restore_model(checkpoint: Checkpoint) -> tuple[DiffusionNet, TrainOptions]:
    """The trained network of a checkpoint, in eval mode, and the options of its run.

    The network is the one of `DiffusionNet.load`: it has the same metadata.
    """
    options = TrainOptions(**checkpoint["options"])
    model = build_model(options, checkpoint["label_names"], checkpoint["labels_at"], checkpoint["statistics"])
    model.load_state_dict(checkpoint["model"])
    model.metadata = metadata_of(checkpoint)
    return model.eval(), options
