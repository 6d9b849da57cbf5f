"""Networks for prediction, from files of diffnet and of the original implementation."""

from __future__ import annotations

import os
from collections.abc import Sequence

from diffnet import DiffusionNet
from diffnet.checkpoints.files import CheckpointError, read_checkpoint_file
from diffnet.checkpoints.kinds import kind_of
from diffnet.checkpoints.safetensors_file import is_safetensors
from diffnet.checkpoints.training import outputs_at_of
from diffnet.data import TargetsAt
from diffnet.geometry.errors import OptionError


def load_network(
    path: str | os.PathLike[str], label_names: Sequence[str] | None = None, labels_at: TargetsAt | None = None
) -> DiffusionNet:
    """The network in a file of `DiffusionNet.save`, of `diffnet train` or of the original implementation.

    label_names: the names of the classes, for a network whose file has none
    labels_at: what a network of the original labels, by default vertices; its file doesn't tell

    Raises CheckpointError for any other file and for a network that computes features for correspondence, OptionError
    for label names or `labels_at` beside a file that has its own.
    """
    kind = None if is_safetensors(path) else kind_of(read_checkpoint_file(path))
    if kind is None:
        if labels_at is not None:
            raise OptionError(f"{path}: the file records what its network labels; leave out --labels-at")
        network = DiffusionNet.load(path)
    elif kind == "original":
        network = DiffusionNet.from_original_checkpoint(path, outputs_at_of(labels_at or "vertices"))
    else:
        raise CheckpointError(
            f"{path}: a checkpoint of the kind {kind!r}, which computes features and no labels. "
            "`diffnet match` uses them"
        )
    if label_names is not None:
        if "label_names" in network.metadata:
            raise OptionError(f"{path}: the file has names of its classes; leave out --class-names")
        network.metadata["label_names"] = list(label_names)
    return network


def load_matching_network(path: str | os.PathLike[str]) -> DiffusionNet:
    """The network in a checkpoint of `diffnet train correspondence`, or in a published one of correspondence.

    Raises CheckpointError for any other file.
    """
    kind = None if is_safetensors(path) else kind_of(read_checkpoint_file(path))
    network = DiffusionNet.load(path) if kind is None else DiffusionNet.from_original_checkpoint(path)
    task = network.metadata.get("task", "segmentation or classification" if kind == "original" else "no known task")
    if task != "correspondence":
        raise CheckpointError(
            f"{path}: the network is for {task}; expected one of `diffnet train correspondence`, or a published one of "
            "correspondence"
        )
    return network
