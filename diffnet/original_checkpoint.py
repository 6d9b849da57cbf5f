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


def rename_reference(names: list[str]) -> dict[str, str]:
    """The parameter of `DiffusionNet` for each of the original's."""
    renamed = {}
    for name in names:
        new = name
        for pattern, replacement in _RENAMED:
            new = re.sub(pattern, replacement, new)
        # Layer i of the MLP stands behind i pairs of ReLU and dropout.
        new = re.sub(r"miniMLP_mlp_layer_(\d+)\.", lambda m: f"{3 * int(m[1])}.", new)
        renamed[name] = new
    return renamed


def convert_reference(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a `DiffusionNet` and the arguments to build it, from a checkpoint of the original.

    Raises ValueError where the file is no such checkpoint.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as e:
        raise ValueError(f"{path}: not a checkpoint that can be read safely ({e})") from e
    missing = [
        n for n in ("first_lin.weight", "last_lin.weight", "block_0.diffusion.diffusion_time") if n not in loaded
    ]
    if missing:
        raise ValueError(f"{path}: not a checkpoint of the original implementation, it has no {missing[0]}")
    names = rename_reference(list(loaded))
    state = {names[name]: tensor for name, tensor in loaded.items()}
    width, in_channels = state["first.weight"].shape
    hidden = sorted(int(m[1]) for m in (re.match(r"blocks\.0\.mlp\.(\d+)\.weight", name) for name in state) if m)
    shape = {
        "in_channels": in_channels,
        "out_channels": len(state["last.weight"]),
        "width": width,
        "blocks": 1 + max(int(m[1]) for m in (re.match(r"blocks\.(\d+)\.", name) for name in state) if m),
        "mlp_hidden": [len(state[f"blocks.0.mlp.{i}.weight"]) for i in hidden[:-1]],
        "gradient_features": "blocks.0.gradient_features.a_re" in state,
        "gradient_rotation": "blocks.0.gradient_features.a_im" in state,
    }
    return state, shape
