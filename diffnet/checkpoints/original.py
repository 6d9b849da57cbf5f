"""Checkpoints of the original implementation and of unsupervised functional maps, which copied its network.

Sources: https://github.com/nmwsharp/diffusion-net, and Cao et al. 2023, "Unsupervised Learning of Robust Spectral Shape
Matching".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffnet.checkpoints.architecture import visible_options
from diffnet.checkpoints.files import CheckpointError, check_named_tensors, read_checkpoint_file
from diffnet.checkpoints.kinds import PREFIX, Kind, kind_of

_RENAMED = (
    (r"^first_lin(ear)?\.", "first."),
    (r"^last_lin(ear)?\.", "last."),
    (r"^block_(\d{1,9})\.", r"blocks.\1."),
    (r"\.diffusion\.diffusion_time$", ".diffusion.time"),
    (r"\.gradient_features\.A_re\.weight$", ".gradient_features.a_re"),
    (r"\.gradient_features\.A_im\.weight$", ".gradient_features.a_im"),
    (r"\.gradient_features\.A\.weight$", ".gradient_features.a_re"),
)
# The input features of the published networks, by their number of channels. A checkpoint doesn't record them.
_FEATURES = {3: "xyz", 16: "hks"}


def our_names(names: list[str]) -> dict[str, str]:
    """Map each of the original's parameter names to the name in `DiffusionNet`."""
    renamed = {}
    for name in names:
        new = name
        for pattern, replacement in _RENAMED:
            new = re.sub(pattern, replacement, new)
        # The original numbers linear layers. Here a layer's number also counts the ReLU and the dropout before it.
        new = re.sub(r"miniMLP_(?:mlp_layer|linear)_(\d{1,9})\.", lambda m: f"{3 * int(m[1])}.", new)
        renamed[name] = new
    return renamed


def read_original_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any], Kind]:
    """Read a checkpoint of one of the kinds.

    Returns the state dict of a `DiffusionNet`, the arguments that build it, and the kind. Raises CheckpointError, a
    ValueError, for any other file.
    """
    content = read_checkpoint_file(path)
    kind = kind_of(content)
    if kind is None:
        raise CheckpointError(
            f"{path}: not a checkpoint of the original implementation, it has no first_lin.weight, "
            f"{PREFIX}first_lin.weight or networks of unsupervised functional maps"
        )
    weights = _weights(path, content, kind)
    names = our_names(list(weights))
    state = {names[name]: tensor.float() for name, tensor in weights.items()}
    missing = [name for name in ("last.weight", "blocks.0.diffusion.time") if name not in state]
    if missing:
        raise CheckpointError(f"{path}: a checkpoint of the kind {kind!r} without {missing[0]}")
    layers = sorted(
        int(m[1]) for m in (re.fullmatch(r"blocks\.0\.mlp\.(\d{1,9})\.weight", name) for name in state) if m
    )
    for name in ("first.weight", "last.weight", *(f"blocks.0.mlp.{i}.weight" for i in layers)):
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
    normalize = "radius" if kind == "original" else "area"
    return {"kind": kind, **features, "k": 128, "normalize": normalize, "operators": "original"}


def _weights(path: str | os.PathLike[str], content: Mapping[str, Any], kind: Kind) -> dict[str, Tensor]:
    """The weights of the network with its own names. Raises CheckpointError for other weights beside them."""
    if kind == "unsupervised correspondence":
        return check_named_tensors(path, content["networks"]["feature_extractor"])
    weights = check_named_tensors(path, content)
    if kind == "original":
        return weights
    others = [name for name in weights if not name.startswith(PREFIX)]
    if others:
        raise CheckpointError(f"{path}: weights of a correspondence network start with {PREFIX}, but not {others[0]}")
    return {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
