"""Checks of the arguments of modules. The messages say what to write instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffnet.geometry import Operators
from diffnet.geometry.argument_names import refuses
from diffnet.ops.common.checks import not_a_tensor
from diffnet.plain import is_plain

# The arguments of `forward` in the original implementation that are fields of `Operators`.
_FIELDS = ("mass", "L", "evals", "evecs", "gradX", "gradY", "edges", "faces")
_CALL = "model(features, operators) with operators = precompute((verts, faces))"

refuses_fields = refuses(f"write {_CALL}", x_in="features", **dict.fromkeys(_FIELDS, _CALL))


def check_operators(operators: Any) -> None:
    """Check that an argument is `Operators`. Raises TypeError that says what to write instead."""
    if isinstance(operators, Operators):
        return
    several = isinstance(operators, (list, tuple)) and all(isinstance(o, Operators) for o in operators)
    hint = "collate(operators)" if several else "precompute(mesh)"
    raise TypeError(f"operators should be Operators, got {type(operators).__name__}; write {hint}")


def check_eigenpairs(operators: Operators) -> None:
    """Check that operators hold eigenpairs, which spectral diffusion needs. Without them its result is 0.

    Raises ValueError that says what to write instead.
    """
    if operators.k == 0:
        raise ValueError(
            "spectral diffusion needs eigenpairs, but the operators have k = 0; "
            'write precompute(mesh, k=128), or diffusion="implicit" in the network'
        )


def check_features(features: Any, operators: Operators, first: nn.Module) -> None:
    """Check that features (V, C_in) fit the operators and the first layer of a network.

    Another first layer than a plain `nn.Linear` checks its input itself, and hooks may change the channels.

    Raises TypeError if they are no floating-point tensor, ValueError for another shape or device.
    """
    if not isinstance(features, Tensor):
        raise not_a_tensor("features", features)
    if not features.is_floating_point():
        raise TypeError(f"features should be floating point, got {features.dtype}; write features.float()")
    rows, shape, device = operators.num_vertices, tuple(features.shape), features.device
    channels, devices = None, {"the operators": operators.device}
    if is_plain(first, nn.Linear):
        channels, devices["the network"] = first.in_features, first.weight.device
    if shape[:1] != (rows,) or (channels is not None and shape[1:] != (channels,)):
        raise ValueError(f"features should have shape ({rows}, {channels or 'C'}), shape is {shape}")
    for name, other in devices.items():
        if other != device:
            raise ValueError(f"features and {name} should be on one device, they are on {device} and {other}")
