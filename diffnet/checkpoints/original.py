"""Checkpoints of the original implementation and of unsupervised functional maps, which copied its network.

Sources: https://github.com/nmwsharp/diffusion-net, and Cao et al. 2023, "Unsupervised Learning of Robust Spectral Shape
Matching".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffnet.checkpoints.files import FIRSTS, CheckpointError, FilePath, Kind, check_named_tensors, original_weights
from diffnet.checkpoints.network import mlp_layers, visible_options

_RENAMED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(first|last)_lin(ear)?\.", r"\1."),
    (r"^block_(\d{1,9})\.", r"blocks.\1."),
    (r"\.diffusion\.diffusion_time$", ".diffusion.time"),
    (r"\.gradient_features\.A_im\.weight$", ".gradient_features.a_im"),
    (r"\.gradient_features\.A(_re)?\.weight$", ".gradient_features.a_re"),
    # The original numbers linear layers. Here a layer's number also counts the ReLU and the dropout before it.
    (r"miniMLP_(?:mlp_layer|linear)_(\d{1,9})\.", lambda match: f"{3 * int(match[1])}."),
)
# The input features of the published networks, by their number of channels. A checkpoint doesn't record them.
_FEATURES = {3: "xyz", 16: "hks", 128: "wks-128"}


def our_names(names: list[str]) -> dict[str, str]:
    """Map each of the original's parameter names to the name in `DiffusionNet`."""
    renamed = {name: name for name in names}
    for pattern, replacement in _RENAMED:
        renamed = {name: re.sub(pattern, replacement, new) for name, new in renamed.items()}
    return renamed


def converted_original(
    path: FilePath, content: Any, *, in_memory: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any], Kind]:
    """Convert the content of a checkpoint of one of the kinds.

    path: for messages
    in_memory: whether the content is from no file

    Returns the state dict of a `DiffusionNet`, the arguments that build it, and the kind. Raises CheckpointError, a
    ValueError, for any other content.
    """
    network = original_weights(content)
    if network is None:
        raise CheckpointError(
            f"{path}: not a checkpoint of the original implementation or of unsupervised functional maps, it has no "
            f"{' or '.join(FIRSTS)}"
        )
    kind = network.kind
    if network.others and not kind.startswith("unsupervised"):
        raise CheckpointError(
            f"{path}: weights of the network start with {network.prefix}, but not {network.others[0]:.80}; leave it out"
        )
    weights = check_named_tensors(path, network.weights, in_memory=in_memory)
    names = our_names(list(weights))
    state = {names[name]: tensor.detach().float().cpu() for name, tensor in weights.items()}
    missing = [name for name in ("last.weight", "blocks.0.diffusion.time") if name not in state]
    if missing:
        raise CheckpointError(f"{path}: a checkpoint of the kind {kind!r} without {missing[0]}")
    for name in ("first.weight", "last.weight", *(f"blocks.0.mlp.{i}.weight" for i in mlp_layers(state))):
        if state[name].ndim != 2 or 0 in state[name].shape:
            shape = tuple(state[name].shape)
            raise CheckpointError(f"{path}: {name} should be a matrix, its shape is {shape}")
    options = visible_options(state)
    for name in ("dropout", "attention_heads"):  # the names are those of a network with dropout, the default
        options.pop(name, None)
    if kind == "unsupervised correspondence" and options.get("gradient_rotation"):
        options["gradient_rotation"] = "swapped"
    return state, options, kind


def original_metadata(kind: Kind, in_channels: int) -> dict[str, Any]:
    """The metadata of a network of one of the kinds: the kind, and the input of the published networks of this kind."""
    features = {"features": _FEATURES[in_channels]} if in_channels in _FEATURES else {}
    metadata = {"kind": kind, **features, "k": 128, "operators": "original"}
    if kind == "original":
        return {**metadata, "normalize": "radius"}
    supervised = kind == "original correspondence"
    maps = {"method": "supervised", "map_k": 30} if supervised else {"method": "unsupervised", "map_k": 128}
    return {**metadata, "normalize": "area", "task": "correspondence", **maps}
