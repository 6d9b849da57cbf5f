"""Training that starts from another network: whether a run fits it, and its weights in the network of the run."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from diffnet import DiffusionNet
from diffnet.checkpoints.files import original_weights, read_checkpoint_file
from diffnet.checkpoints.safetensors_file import is_safetensors
from diffnet.checkpoints.training import VECTOR_BLOCKS, outputs_at_of
from diffnet.data import ArrayStatistics, Statistics, TargetsAt, check_statistics, check_target_statistics
from diffnet.data.feature_names import canonical_features, feature_parts
from diffnet.geometry.errors import OptionError
from diffnet.pretrained import network_path
from diffnet.train.options import TrainOptions
from diffnet.vector_outputs import VectorOutputs

# Options that the weights of a network decide. `diffnet train` has no option for the last three.
DECIDED = (
    *("features", "width", "blocks", "mlp_norm", "attention_heads", "global_tokens", "conditions"),
    *("mlp_hidden", "gradient_features", "gradient_rotation"),
)


def is_original(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a checkpoint of the original implementation or of unsupervised functional maps."""
    return not is_safetensors(path) and original_weights(read_checkpoint_file(path)) is not None


def load_any_network(path: str | os.PathLike[str], labels_at: TargetsAt | None = None) -> DiffusionNet:
    """The network in a file of any kind, also one that computes features for correspondence. See `load_network`."""
    if is_original(path):
        return DiffusionNet.from_original_checkpoint(path, outputs_at_of(labels_at or "vertices"))
    if labels_at is not None:
        raise OptionError(f"{path}: the file records what its network labels; leave out --labels-at")
    return DiffusionNet.load(path)


def start_network(options: TrainOptions, network: DiffusionNet | None = None) -> DiffusionNet | None:
    """The network that a run starts from, or None. network: the one in the file, if it has been read

    Raises CheckpointError for a file that can't be read, and OptionError, which names an option, if its weights don't
    fit the options.
    """
    if options.start is None:
        return None
    network = network or load_any_network(network_path(options.start))
    with torch.device("meta"):
        more = VECTOR_BLOCKS if options.vector_outputs else {}
        built = DiffusionNet(network.in_channels, network.out_channels, **options.network, **more)
    features = canonical_features(network.metadata.get("features", options.features))
    theirs = {**network.architecture, "features": features, "conditions": network.metadata.get("conditions")}
    ours = {**built.architecture, "features": options.features, "conditions": options.conditions}
    for name in DECIDED:
        if ours[name] != theirs[name]:
            raise OptionError(f"{name} is {ours[name]}, and {theirs[name]} in the network of {options.start}")
    return network


def start_note(network: DiffusionNet, options: TrainOptions, label_names: list[str]) -> str:
    """What the summary of the set says of the network that a run starts from, see `start_network`."""
    is_same = sorted(_output_names(network, options)) == sorted(label_names)
    last = "all layers" if is_same else "all layers but the last"
    return f"starts with {last} of {options.start}"


def _output_names(network: DiffusionNet, options: TrainOptions) -> list[str]:
    """The names of a network's outputs, or none if they are not known or of another task than that of the run."""
    metadata = network.metadata
    if metadata.get("task", options.task) != options.task or network.vectors != options.vector_outputs:
        return []
    numbers = [str(i) for i in range(network.out_channels)]  # see `NetworkInput`
    names = metadata.get("label_names", numbers if "task" in metadata else [])
    return names if isinstance(names, list) else []


@torch.no_grad()
def copy_weights(
    network: DiffusionNet,
    model: DiffusionNet,
    options: TrainOptions,
    label_names: list[str],
    statistics: Statistics | None,
    targets: ArrayStatistics | None,
    conditions: ArrayStatistics | None = None,
) -> None:
    """Give a new network the weights of another one, see `start_network`. The last layer stays new for other outputs.

    statistics, targets, conditions: of the set of the run, by which its own arrays, its targets and its conditions are
        standardized. The layers that read or give these follow, so a network with the same outputs predicts what it
        did.

    Raises OptionError for own arrays with another number of channels.
    """
    if network.in_channels != model.in_channels:
        raise OptionError(
            f"features have {model.in_channels} channels in this set, and {network.in_channels} in the network of "
            f"{options.start}"
        )
    parts = ("blocks", "pairs") if network.pair_attention == model.pair_attention > 0 else ("blocks",)
    for layers, others in ((getattr(model, name), getattr(network, name)) for name in parts):
        for parameter, other in zip(layers.parameters(), others.parameters(), strict=True):
            parameter.copy_(other)
    before = _moments(options.features, check_statistics(options.features, network.metadata.get("statistics", {})))
    (mean, std), (new_mean, new_std) = before, _moments(options.features, statistics or {})
    weight, bias = network.first.weight.double(), network.first.bias.double()
    model.first.weight.copy_(weight * (new_std / std))
    model.first.bias.copy_(bias + weight @ ((new_mean - mean) / std))
    if conditions is not None:
        stored = check_target_statistics(network.metadata.get("condition_statistics"), network.condition_channels)
        (mean, std), (new_mean, new_std) = _tensors(stored), _tensors(conditions)
        weight = network.modulation.weight.double()
        model.modulation.weight.copy_(weight * (new_std / std))
        model.modulation.bias.copy_(network.modulation.bias.double() + weight @ ((new_mean - mean) / std))
    names = _output_names(network, options)
    if sorted(names) == sorted(label_names):
        _copy_last(network, model, [names.index(name) for name in label_names], targets)


def _copy_last(network: DiffusionNet, model: DiffusionNet, rows: list[int], targets: ArrayStatistics | None) -> None:
    """Copy these rows of the last layer. targets: of the set of the run"""
    plain = ArrayStatistics(mean=[0.0] * len(rows), std=[1.0] * len(rows))
    stored = plain if targets is None else network.metadata.get("target_statistics", plain)
    before, after = _tensors(check_target_statistics(stored, len(rows)))[:, rows], _tensors(targets or plain)
    last, source = model.last, network.last
    if isinstance(last, VectorOutputs) and isinstance(source, VectorOutputs):
        count = 3 * model.vectors
        vectors = [row // 3 for row in rows[:count:3]]
        for name in ("coefficients", "along_normal"):
            layer, other = (getattr(each.vectors, name) for each in (last, source))
            _copy_rows(layer, other, vectors, before[:, :count:3], after[:, :count:3])
        if last.numbers is not None and source.numbers is not None:
            numbers = [row - count for row in rows[count:]]
            _copy_rows(last.numbers, source.numbers, numbers, before[:, count:], after[:, count:])
    elif isinstance(last, nn.Linear) and isinstance(source, nn.Linear):
        _copy_rows(last, source, rows, before, after)


def _copy_rows(layer: nn.Linear, source: nn.Linear, rows: list[int], before: Tensor, after: Tensor) -> None:
    """Copy these rows, or groups of rows, of a layer. before, after: (2, R), the moments of its outputs"""
    (mean, std), (new_mean, new_std) = before[..., None], after[..., None]
    weight = source.weight.double().reshape(len(rows), -1, source.in_features)[rows]
    bias = source.bias.double().reshape(len(rows), -1)[rows]
    layer.weight.copy_((weight * (std / new_std)[..., None]).flatten(0, 1))
    layer.bias.copy_(((bias * std + mean - new_mean) / new_std).flatten())


def _moments(features: str, statistics: Statistics) -> Tensor:
    """What is subtracted from each channel of features, and what it is divided by, (2, C) float64."""
    parts = []
    for part in feature_parts(features):
        plain = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        parts.append(plain.expand(2, part.channels or 0) if part.array is None else _tensors(statistics[part.array]))
    return torch.cat(parts, 1)


def _tensors(statistics: ArrayStatistics) -> Tensor:
    """The means and the standard deviations, (2, C) float64."""
    return torch.tensor([statistics["mean"], statistics["std"]], dtype=torch.float64)
