"""The network in a checkpoint of `diffnet train`, which also holds an optimizer and the history of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from diffnet.checkpoints.files import (
    CheckpointError,
    FilePath,
    check_format,
    check_named_tensors,
    larger_module,
    original_weights,
    with_older_scale,
)
from diffnet.options import Architecture

FORMAT = 2  # increase when older versions would misread a checkpoint
# The options of a run that are arguments of `DiffusionNet`. The others are metadata of the network.
ARCHITECTURE = (*(f.name for f in fields(Architecture)), "backend")
# Options that checkpoints of older versions lack, with what those versions did. An option of the network is off there.
OLDER_DEFAULTS: dict[str, Any] = {
    **Architecture().network,
    "join": "never",
    "normalize": "all-radius",
    "schedule": "step",
    "label_smoothing": 0.0,
    "average_weights": 0.0,
}
VECTOR_BLOCKS: dict[str, Any] = {"gradient_rotation": False}  # without it, vectors don't mirror with a mesh
REMOVED = ("align", "stretch")  # options that only older versions have


def network_in_checkpoint(path: FilePath, checkpoint: Any) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return the weights, the arguments of `DiffusionNet` that a run chooses, and the metadata in a checkpoint.

    Raises CheckpointError, which says what to write instead, for the content of other files.
    """
    other = original_weights(checkpoint)
    if other is not None:
        unsupervised = other.kind.startswith("unsupervised")
        program = "unsupervised functional maps" if unsupervised else "the original implementation"
        raise CheckpointError(f"{path}: a checkpoint of {program}; write DiffusionNet.from_original_checkpoint(path)")
    if (advice := larger_module(checkpoint, "torch.load(path)")) is not None:
        raise CheckpointError(f"{path}: {advice}, after building the network")
    if isinstance(checkpoint, dict) and "first.weight" in checkpoint:
        raise CheckpointError(
            f"{path}: a state dict, which has no options of its network. Build the network and call load_state_dict, "
            "or write the file with model.save(path)"
        )
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise CheckpointError(f"{path}: neither a file of DiffusionNet.save nor a checkpoint of `diffnet train`")
    check_format(path, checkpoint["format"], FORMAT, checkpoint.get("version", ""))
    missing = {"model", "options", "label_names", "labels_at"} - checkpoint.keys()
    if missing:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(sorted(missing))}")
    if not isinstance(checkpoint["options"], dict):
        raise CheckpointError(f"{path}: options should be a dictionary, got {type(checkpoint['options']).__name__}")
    weights = check_named_tensors(path, checkpoint["model"])
    options = checkpoint["options"]
    architecture = {name: options[name] for name in ARCHITECTURE if name in options}
    architecture["outputs_at"] = outputs_at_of(checkpoint["labels_at"])
    return weights, architecture, metadata_of(checkpoint)


def outputs_at_of(labels_at: Any) -> Any:
    """The `outputs_at` of a network whose labels are at vertices, faces, edges or meshes. Other values stay."""
    if isinstance(labels_at, tuple):  # of each channel
        return tuple(map(outputs_at_of, labels_at))
    return "global_mean" if labels_at == "meshes" else labels_at


def options_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run in a checkpoint. Older versions get what they did."""
    return OLDER_DEFAULTS | with_older_scale(checkpoint["format"], checkpoint["options"])


def metadata_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the network in a checkpoint: the names of its labels, its input and the options of its run."""
    options = options_in(checkpoint)
    described = {name: value for name, value in options.items() if name not in ARCHITECTURE}
    statistics = checkpoint.get("statistics", {})  # of features from files
    described = {**described, "label_names": checkpoint["label_names"], "statistics": statistics}
    # Only regressions have the statistics, only numbered labels have numbers, and older versions stored no meshes.
    names = "label_numbers", "label_colors", "target_statistics", "condition_statistics", "train_meshes"
    more = {name: checkpoint.get(name) for name in names}
    return described | {name: value for name, value in more.items() if value is not None}
