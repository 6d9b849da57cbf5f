"""Checkpoints of the original implementation (https://github.com/nmwsharp/diffusion-net)."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any

import torch
from torch import Tensor

_RENAMED = (
    (r"^first_lin\.", "first."),
    (r"^last_lin\.", "last."),
    (r"^block_(\d+)\.", r"blocks.\1."),
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
        new = re.sub(r"miniMLP_mlp_layer_(\d+)\.", lambda m: f"{3 * int(m[1])}.", new)
        renamed[name] = new
    return renamed


def read_original_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint of the original implementation.

    Returns the state dict of a `DiffusionNet` and the arguments that build it. Raises ValueError for any other file.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as e:
        raise ValueError(f"{path}: not a checkpoint that can be read safely ({e})") from e
    required = ("first_lin.weight", "last_lin.weight", "block_0.diffusion.diffusion_time")
    missing = [name for name in required if name not in loaded]
    if missing:
        raise ValueError(f"{path}: not a checkpoint of the original implementation, it has no {missing[0]}")
    names = our_names(list(loaded))
    state = {names[name]: tensor for name, tensor in loaded.items()}
    width, in_channels = state["first.weight"].shape
    layers = sorted(int(m[1]) for m in (re.match(r"blocks\.0\.mlp\.(\d+)\.weight", name) for name in state) if m)
    arguments = {
        "in_channels": in_channels,
        "out_channels": len(state["last.weight"]),
        "width": width,
        "blocks": 1 + max(int(m[1]) for m in (re.match(r"blocks\.(\d+)\.", name) for name in state) if m),
        "mlp_hidden": [len(state[f"blocks.0.mlp.{i}.weight"]) for i in layers[:-1]],
        "gradient_features": "blocks.0.gradient_features.a_re" in state,
        "gradient_rotation": "blocks.0.gradient_features.a_im" in state,
    }
    return state, arguments
