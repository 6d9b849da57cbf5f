"""From a file to a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffnet.checkpoints.architecture import SIZES, agrees, visible_options
from diffnet.checkpoints.files import CheckpointError, check_names_and_shapes, read_checkpoint_file, shown
from diffnet.checkpoints.safetensors_file import is_safetensors, read_network_file
from diffnet.checkpoints.training import network_in_checkpoint

M = TypeVar("M", bound=nn.Module)


def read_network(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Read weights, arguments of `DiffusionNet` and metadata that `DiffusionNet.save` or `diffnet train` wrote.

    Raises CheckpointError for any other file.
    """
    if is_safetensors(path):
        return read_network_file(path)
    return network_in_checkpoint(path, read_checkpoint_file(path))


def restore(
    build: Callable[..., M], path: str | os.PathLike[str], weights: Mapping[str, Tensor], options: Mapping[str, Any]
) -> M:
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
    try:
        with torch.device("meta"):  # without memory: the weights of the file become those of the network
            network = build(**options)
    except (TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"{path}: {e}") from e
    check_names_and_shapes(path, weights, network.state_dict())
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    network.load_state_dict(copies, assign=True)
    return network.eval()
