"""The options of a network that its weights show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffnet.checkpoints.files import kind_of

SIZES = ("in_channels", "out_channels", "width", "blocks")
ABOVE_0 = "above 0"  # the value of an option of which weights show only this


def visible_options(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DiffusionNet` that can be read off the names and shapes of its weights.

    An argument is left out if the weights don't show it. Any dictionary is allowed.
    """
    shapes = {name: tuple(w.shape) for name, w in weights.items() if isinstance(name, str) and isinstance(w, Tensor)}
    options: dict[str, Any] = {}
    if len(shapes.get("first.weight", ())) == 2:
        options["width"], options["in_channels"] = shapes["first.weight"]
    if len(shapes.get("last.weight", ())) == 2:
        options["out_channels"] = shapes["last.weight"][0]
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
    # The name of a layer counts the ReLU before it, and the dropout layer if there is one.
    matches = (re.fullmatch(r"blocks\.0\.mlp\.(\d{1,9})\.weight", name) for name in shapes)
    layers = sorted(int(m[1]) for m in matches if m)
    if layers and all(len(shapes[f"blocks.0.mlp.{i}.weight"]) == 2 for i in layers):
        options["mlp_hidden"] = [shapes[f"blocks.0.mlp.{i}.weight"][0] for i in layers[:-1]]
        if len(layers) > 1:
            options["dropout"] = ABOVE_0 if layers[1] == 3 else 0
    return options


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
    if kind_of(state) is not None:
        raise RuntimeError(
            "the state dict is of the original implementation; write DiffusionNet.from_original_state_dict(state_dict)"
        )
    if "options" in state and "model" in state:
        raise RuntimeError("this is a checkpoint of `diffnet train`, not a state dict; write DiffusionNet.load(path)")
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
