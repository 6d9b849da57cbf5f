"""Networks for prediction, from files of diffnet and of the original implementation."""

from __future__ import annotations

import os
from collections.abc import Sequence

from diffnet import DiffusionNet
from diffnet.checkpoints.files import CheckpointError, kind_of, read_checkpoint_file
from diffnet.checkpoints.safetensors_file import is_safetensors
from diffnet.checkpoints.training import outputs_at_of
from diffnet.data import TargetsAt
from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.options.all_tasks import TASK_OPTIONS
from diffnet.train.tasks.registry import task_named


def load_network(
    path: str | os.PathLike[str], label_names: Sequence[str] | None = None, labels_at: TargetsAt | None = None
) -> DiffusionNet:
    """The network in a file of `DiffusionNet.save`, of `diffnet train` or of the original implementation.

    label_names: the names of the classes, for a network whose file has none
    labels_at: what a network of the original labels, by default vertices; its file doesn't tell

    Raises CheckpointError for any other file and for a network that computes features for correspondence, OptionError
    for label names or `labels_at` beside a file that has its own, and for another number of names than classes.
    """
    network = load_any_network(path, labels_at)
    task = network.metadata.get("task")
    if isinstance(task, str) and task in TASK_OPTIONS:
        try:
            task_named(task).on_meshes()
        except OptionError as e:
            raise CheckpointError(f"{path}: {e}") from e
    if label_names is not None:
        if "label_names" in network.metadata:
            raise OptionError(f"{path}: the file has names of its classes; leave out --class-names")
        if len(label_names) != network.out_channels:
            raise OptionError(
                f"{path}: --class-names should have a name for each of the {network.out_channels} classes, got "
                f"{', '.join(label_names)}"
            )
        network.metadata["label_names"] = list(label_names)
    return network


def load_any_network(path: str | os.PathLike[str], labels_at: TargetsAt | None = None) -> DiffusionNet:
    """The network in a file of any kind, also one that computes features for correspondence. See `load_network`."""
    if is_original(path):
        return DiffusionNet.from_original_checkpoint(path, outputs_at_of(labels_at or "vertices"))
    if labels_at is not None:
        raise OptionError(f"{path}: the file records what its network labels; leave out --labels-at")
    return DiffusionNet.load(path)


def load_scored_network(path: str | os.PathLike[str]) -> DiffusionNet:
    """The network in a file of `DiffusionNet.save` or of `diffnet train`, or in a published one of correspondence.

    Raises CheckpointError for any other file.
    """
    if is_original(path):
        network = DiffusionNet.from_original_checkpoint(path)
        if "task" in network.metadata:  # a segmentation file of the original doesn't name its task
            return network
    return DiffusionNet.load(path)


def is_original(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a checkpoint of the original implementation or of unsupervised functional maps."""
    return not is_safetensors(path) and kind_of(read_checkpoint_file(path)) is not None
