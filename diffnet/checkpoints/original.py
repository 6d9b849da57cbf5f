"""Checkpoints of the original implementation (https://github.com/nmwsharp/diffusion-net)."""

from __future__ import annotations

import os
import re
from typing import Any

from torch import Tensor

from diffnet.checkpoints.architecture import visible_options
from diffnet.checkpoints.files import CheckpointError, check_named_tensors, read_checkpoint_file

_RENAMED = (
    (r"^first_lin\.", "first."),
    (r"^last_lin\.", "last."),
    (r"^block_(\d{1,9})\.", r"blocks.\1."),
    (r"\.diffusion\.diffusion_time$", ".diffusion.time"),
    (r"\.gradient_features\.A_re\.weight$", ".gradient_features.a_re"),
    (r"\.gradient_features\.A_im\.weight$", ".gradient_features.a_im"),
    (r"\.gradient_features\.A\.weight$", ".gradient_features.a_re"),
)


def our_names(names: list[str]) -> dict[str, str]:
    """Map each of the original's parameter names to the name in `DiffusionNet`."""
    renamed = {}
    for name in names:
        new = name
        for pattern, replacement in _RENAMED:
            new = re.sub(pattern, replacement, new)
        # The original numbers linear layers. Here a layer's number also counts the ReLU and the dropout before it.
        new = re.sub(r"miniMLP_mlp_layer_(\d{1,9})\.", lambda m: f"{3 * int(m[1])}.", new)
        renamed[name] = new
    return renamed


def read_original_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint of the original implementation.

    Returns the state dict of a `DiffusionNet` and the arguments that build it. Raises CheckpointError, a ValueError,
    for any other file.
    """
    loaded = read_checkpoint_file(path)
    required = ("first_lin.weight", "last_lin.weight", "block_0.diffusion.diffusion_time")
    missing = [name for name in required if not isinstance(loaded, dict) or name not in loaded]
    if missing:
        raise CheckpointError(f"{path}: not a checkpoint of the original implementation, it has no {missing[0]}")
    loaded = check_named_tensors(path, loaded)
    names = our_names(list(loaded))
    state = {names[name]: tensor.float() for name, tensor in loaded.items()}
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
    return state, options
