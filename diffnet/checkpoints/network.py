"""From a file to a network, and the options of a network that its weights show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffnet.checkpoints.files import (
    CheckpointError,
    FilePath,
    check_names_and_shapes,
    larger_module,
    original_weights,
    read_checkpoint_file,
    shown,
)
from diffnet.checkpoints.safetensors_file import is_safetensors, read_network_file
from diffnet.checkpoints.training import VECTOR_BLOCKS, network_in_checkpoint
from diffnet.geometry.errors import raised_as

M = TypeVar("M", bound=nn.Module)
SIZES = ("in_channels", "out_channels", "width", "blocks")
# The arguments that follow from the data of a run, so its options don't have them.
VISIBLE_ONLY = ("in_channels", "out_channels", "vectors", "pair_attention", "condition_channels")
ABOVE_0 = "above 0"  # the value of an option of which weights show only this


def read_network(path: FilePath) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Read weights, arguments of `DiffusionNet` and metadata. Raises CheckpointError if a file doesn't hold them."""
    if is_safetensors(path):
        return read_network_file(path)
    weights, architecture, metadata = network_in_checkpoint(path, read_checkpoint_file(path))
    visible = visible_options(weights)
    if not {"in_channels", "out_channels"} <= visible.keys():
        raise CheckpointError(f"{path}: first.weight and last.weight should be matrices")
    architecture |= {name: visible[name] for name in VISIBLE_ONLY if name in visible}
    return weights, VECTOR_BLOCKS | architecture if visible["vectors"] else architecture, metadata


def restore(build: Callable[..., M], path: FilePath, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> M:
    """Build a network with the options of a file, and give it the weights. Returns it on the CPU, in eval mode.

    The sizes in the options are compared with the weights, which are in memory, before anything is built.

    Raises CheckpointError if they don't fit each other, or if an option has a value that is not allowed.
    """
    visible = visible_options(weights)
    if not visible.keys() >= set(SIZES):
        raise CheckpointError(f"{path}: the weights are not those of a DiffusionNet")
    if visible["blocks"] > len(weights):
        raise CheckpointError(f"{path}: the weights name block {visible['blocks'] - 1}, and there are {len(weights)}")
    for name, value in visible.items():
        if name in SIZES and name not in options:
            raise CheckpointError(f"{path}: the options of the network lack {name}")
        if name in options and not agrees(options[name], value):
            raise CheckpointError(
                f"{path}: {name} is {shown(options[name])}, but the weights are those of {name} {value!s:.80}"
            )
    activation = options.get("last_activation")
    if isinstance(activation, dict):
        raise CheckpointError(
            f"{path}: the network ends in {activation.get('own')!s:.80}, a function that a file can't hold; pass "
            "last_activation=…, or last_activation=None to leave it out"
        )
    # Without memory: the weights of the file become those of the network.
    with raised_as(CheckpointError, path, TypeError, ValueError, RuntimeError), torch.device("meta"):
        network = build(**options)
    check_names_and_shapes(path, weights, network.state_dict())
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    network.load_state_dict(copies, assign=True)
    return network.eval()


def visible_options(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DiffusionNet` that the names and shapes of its weights show, which may be any dictionary."""
    shapes = {name: tuple(w.shape) for name, w in weights.items() if isinstance(name, str) and isinstance(w, Tensor)}
    options: dict[str, Any] = {}
    if len(shapes.get("first.weight", ())) == 2:
        options["width"], options["in_channels"] = shapes["first.weight"]
    if len(shapes.get("last.weight", ())) == 2:
        options["out_channels"] = shapes["last.weight"][0]
    options["vectors"] = vectors = (*shapes.get("last.vectors.along_normal.weight", ()), 0)[0]
    if vectors:
        options["out_channels"] = 3 * vectors + (*shapes.get("last.numbers.weight", ()), 0)[0]
    numbers = [int(m[1]) for m in (re.match(r"blocks\.(\d{1,9})\.", name) for name in shapes) if m]
    if numbers:
        options["blocks"] = 1 + max(numbers)
        options["gradient_features"] = "blocks.0.gradient_features.a_re" in shapes
        if options["gradient_features"]:
            options["gradient_rotation"] = "blocks.0.gradient_features.a_im" in shapes
        scales, shifts = (f"blocks.0.mlp_norm.{name}" in shapes for name in ("weight", "bias"))
        options["mlp_norm"] = "layer" if shifts else "rms" if scales else "none"
        attends = "blocks.0.attention.query_key_value.weight" in shapes
        options["attention_heads"] = ABOVE_0 if attends else 0
        middle = f"blocks.{options['blocks'] // 2}"
        options["global_tokens"] = (*shapes.get(f"{middle}.tokens.share.weight", ()), 0)[0]
        options["pair_attention"] = sum(bool(re.fullmatch(r"pairs\.\d{1,9}\.norm\.weight", name)) for name in shapes)
        options["condition_channels"] = (0, *shapes.get("modulation.weight", ()))[-1]
    layers = mlp_layers(shapes)
    if layers and all(len(shapes[f"blocks.0.mlp.{i}.weight"]) == 2 for i in layers):
        options["mlp_hidden"] = [shapes[f"blocks.0.mlp.{i}.weight"][0] for i in layers[:-1]]
        if len(layers) > 1:
            options["dropout"] = ABOVE_0 if layers[1] == 3 else 0
    return options


def mlp_layers(names: Iterable[str]) -> list[int]:
    """The layers of the first MLP. Their names count the ReLU before a layer, and the dropout if there is any."""
    matches = (re.fullmatch(r"blocks\.0\.mlp\.(\d{1,9})\.weight", name) for name in names)
    return sorted(int(m[1]) for m in matches if m)


def agrees(value: Any, visible: Any) -> bool:
    """Whether the value of an option is the one that weights show."""
    if isinstance(visible, str) and visible != ABOVE_0:
        return isinstance(value, str) and value == visible
    if isinstance(visible, list):
        return isinstance(value, (list, tuple)) and list(value) == visible
    if value == "swapped":  # a form of gradient_rotation, whose weights have the same shapes
        return visible is True
    if not isinstance(value, (int, float)):
        return False
    return value > 0 if visible == ABOVE_0 else value == visible


def check_state_dict(state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError, as PyTorch does, if a state dict is of another network, and names the options that differ.

    Differences that no option explains are left to PyTorch.
    """
    if original_weights(state) is not None:
        raise RuntimeError(
            "the state dict is of the original implementation; write DiffusionNet.from_original_state_dict(state_dict)"
        )
    if "options" in state and "model" in state:
        raise RuntimeError("this is a checkpoint of `diffnet train`, not a state dict; write DiffusionNet.load(path)")
    if (advice := larger_module(state, "state_dict")) is not None:
        raise RuntimeError(advice)
    theirs, ours = visible_options(state), visible_options(expected)
    if not theirs.keys() >= set(SIZES):
        return
    differences = [
        f"{name} is {theirs[name]} in the state dict and {ours[name]} here"
        for name in ours
        if name in theirs and theirs[name] != ours[name]
    ]
    # The hidden layers have the width of the network by default, so one difference would be listed twice.
    if theirs.get("mlp_hidden") == [theirs["width"]] * 2 and ours.get("mlp_hidden") == [ours.get("width")] * 2:
        differences = [line for line in differences if not line.startswith("mlp_hidden")]
    if differences:
        raise RuntimeError(f"the state dict is of another network: {'; '.join(differences)}")
