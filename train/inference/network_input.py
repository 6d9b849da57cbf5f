"""Trained networks from files, and their input and labels, as their metadata say."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, get_type_hints

from diffnet import DiffusionNet
from diffnet.checkpoints.files import CheckpointError, shown
from diffnet.data import TargetsAt, feature_channels
from diffnet.data.labeled import PlaceAt
from diffnet.geometry.errors import OptionError, raised_as
from diffnet.geometry.files import as_text
from diffnet.geometry.mesh.normalize import scale_rule
from diffnet.train.checkpoint import checked_statistics, fits
from diffnet.train.fine_tuning import load_any_network
from diffnet.train.options import TASK_OPTIONS, TrainOptions
from diffnet.train.orientation import check_not_aligned
from diffnet.train.tasks.task import MetadataError, NetworkInput, task_named

NEEDED = ("features", "k", "normalize")  # they have no defaults, because a wrong value changes predictions silently
_SHARED = "laplacian", "basis", "join", "operators", "conditions", "max_faces", "precision", "units", "clip", "upright"
OPTIONAL = ("task", *_SHARED, *(name for options in TASK_OPTIONS.values() for name in options.prediction))


def network_input(network: DiffusionNet) -> NetworkInput:
    """Read what `diffnet predict` needs from the metadata of a network.

    | entry | value | default |
    |---|---|---|
    | `features` | "hks", "xyz+normals" and others, see `input_features` | none |
    | `k` | number of eigenpairs | none |
    | `normalize` | how positions are normalized first: true or "radius", "area", "none", a float, or false | none |
    | `units` | with "none", the length that becomes 1 | 1.0 |
    | `task` | "segmentation", … "correspondence" | "classification" or "segmentation", which fits `outputs_at` |
    | `method`, `map_k`, `feature_scale`, `regularizer` | of a correspondence | those of `pair_maps`, 30 |
    | `clip` | limit of the norm of gradients in `match_meshes`; 0 for none | 0 |
    | `upright` | the orientation of the training meshes, for a warning of others | not known |
    | `laplacian`, `basis`, `join`, `operators` | see `precompute` | those of `precompute` |
    | `max_faces` | meshes with more faces are decimated, see `decimated` | none are |
    | `precision` | "fp32", "bf16", or "auto" for bf16 on a GPU | "fp32" |
    | `ignore` | names of classes that don't count in scores | none |
    | `label_names` | a name for each output channel | "0", "1", … |
    | `label_numbers` | a whole number for each output channel, which `diffnet predict` writes | see `NetworkInput` |
    | `label_colors` | [red, green, blue] from 0 to 255 by name, for files of cortices | none |
    | `target_statistics` | {"mean": […], "std": […]} of the targets of a regression | 0 and 1 |
    | `conditions`, `condition_statistics` | "speed,yaw", and {"mean": […], "std": […]} | none |
    | `statistics` | of features from files, see `array_statistics` | none of them |
    | `train_meshes` | hashes of the training meshes, by which `diffnet evaluate` counts them | not known |

    Networks of `diffnet train` have all of them. Raises MetadataError if one is missing or wrong, and for a network
    with other input channels. Raises TypeError for anything but a network.
    """
    if not hasattr(network, "outputs_at"):  # a compiled network has it, too
        hint = "; write DiffusionNet.load(path)" if isinstance(network, (str, os.PathLike)) else ""
        raise TypeError(f"network should be a DiffusionNet, got {type(network).__name__}{hint}")
    at = network.outputs_at
    places: list[PlaceAt] = ["meshes" if p == "global_mean" else p for p in ((at,) if isinstance(at, str) else at)]
    labels_at: TargetsAt = places[0] if isinstance(at, str) else tuple(places)
    metadata = network.metadata
    missing = [name for name in NEEDED if name not in metadata]
    if missing:
        raise MetadataError(
            f"the metadata of the network, which takes {network.in_channels} channels, lack {', '.join(missing)}; "
            'write for example model.save(path, features="hks", k=128, normalize=True)'
        )
    try:
        rule = scale_rule(metadata["normalize"])
    except OptionError as e:
        raise MetadataError(f"{e}, in the metadata") from e
    options = {
        "task": "classification" if labels_at == "meshes" else "segmentation",
        "precision": "fp32",
        "normalize": "none" if isinstance(rule, float) else rule or "radius",
        "units": rule if isinstance(rule, float) else 1.0,
        **{name: metadata[name] for name in ("features", "k", *OPTIONAL) if name in metadata},
    }
    hints = get_type_hints(TrainOptions)
    faults = [name for name in OPTIONAL if name in options and not fits(options[name], hints[name])]
    fault = f"{faults[0]} has the value {shown(options[faults[0]])}, which is not allowed" if faults else None
    try:
        trained = TrainOptions(**options, diffusion=network.diffusion)
        if fault is not None:
            raise OptionError(fault)
        check_not_aligned(metadata.get("align"), trained.features)
        task, count = task_named(trained.task), network.out_channels
        plain = {"target_statistics": {"mean": [0.0] * count, "std": [1.0] * count}}
        statistics = checked_statistics({**plain, **metadata}, trained, task, count)
    except (OptionError, TypeError) as e:
        reason = e if fault is None or isinstance(e, OptionError) else fault
        raise MetadataError(f"the metadata of the network can't be used: {reason}") from e
    if not task.allows(labels_at):
        raise MetadataError(f"the metadata name the task {trained.task}, but the network has outputs at {labels_at}")
    channels = feature_channels(trained.features, statistics["statistics"])
    if network.in_channels != channels:
        raise MetadataError(
            f"the features {trained.features} have {channels} channels, and the network takes {network.in_channels}; "
            "call a network with features of its own in Python"
        )
    label_names = _label_names(metadata.get("label_names"), network.out_channels)
    numbers = _label_numbers(metadata.get("label_numbers"), label_names)
    hashes = metadata.get("train_meshes")
    if hashes is not None and not (isinstance(hashes, list) and all(isinstance(each, str) for each in hashes)):
        raise MetadataError(f"train_meshes in the metadata should be a list of hashes, got {hashes!r:.200}")
    meshes = None if hashes is None else frozenset(hashes)
    conditions = len(trained.condition_names)
    if network.condition_channels != conditions:
        raise MetadataError(
            f"the metadata name {conditions} conditions, and the network takes {network.condition_channels}; call a "
            "network with conditions of its own in Python"
        )
    colors = metadata.get("label_colors", {})
    if not (isinstance(colors, dict) and all(map(_is_color, colors.values()))):
        raise MetadataError(f"label_colors in the metadata should be [red, green, blue] by name, got {shown(colors)}")
    more: dict[str, Any] = {"train_meshes": meshes, "label_numbers": numbers, "label_colors": colors}
    return NetworkInput(trained, rule is not None, label_names, labels_at, **statistics, **more)


def _is_color(color: Any) -> bool:
    return isinstance(color, list) and len(color) == 3 and all(type(c) is int and 0 <= c < 256 for c in color)


def _label_names(names: Any, count: int) -> list[str]:
    if names is None:
        return [str(i) for i in range(count)]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) != count:
        raise MetadataError(f"label_names in the metadata should be a list of {count} names, got {names!r:.200}")
    return [as_text(name) for name in names]


def _label_numbers(numbers: Any, names: list[str]) -> tuple[int, ...]:
    if numbers is None:
        # Checkpoints of older versions have no numbers, but the names that numbers without names got.
        are_numbers = all(re.fullmatch("0|-?[1-9][0-9]{0,17}", name) for name in names)
        are_numbers = are_numbers and len(set(names)) == len(names)
        return tuple(int(name) for name in names) if are_numbers else tuple(range(len(names)))
    if (
        not isinstance(numbers, list)
        or not all(type(number) is int and abs(number) < 2**63 for number in numbers)
        or not len(numbers) == len(set(numbers)) == len(names)
    ):
        raise MetadataError(
            f"label_numbers in the metadata should be a list of {len(names)} different whole numbers below 2^63, got "
            f"{shown(numbers)}"
        )
    return tuple(numbers)


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
        with raised_as(CheckpointError, path, OptionError):
            task_named(task).on_meshes()
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
