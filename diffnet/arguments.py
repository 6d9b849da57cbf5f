"""Checks of modules and of their arguments. The messages say what to write instead."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from diffnet.geometry import Operators
from diffnet.geometry.batches.functional import with_eigenpairs
from diffnet.geometry.errors import refuses
from diffnet.ops.common.checks import check_is_tensor, check_tensor

M = TypeVar("M", bound=nn.Module)

# The arguments of `forward` in the original implementation that are fields of `Operators`.
_FIELDS = ("mass", "L", "evals", "evecs", "gradX", "gradY", "edges", "faces")
_CALL = "model(features, operators) with operators = precompute((verts, faces))"

refuses_fields = refuses(f"write {_CALL}", x_in="features", **dict.fromkeys(_FIELDS, _CALL))


def check_eigenpairs(operators: Operators) -> None:
    """Check that operators hold eigenpairs, which spectral diffusion needs. Without them its result is 0.

    Raises ValueError that says what to write instead.
    """
    with_eigenpairs("spectral diffusion", operators, ', or diffusion="implicit" in the network')


def as_weights(x: Tensor, layer: nn.Module) -> Tensor:
    """Return x as a layer of plain PyTorch takes it: in the dtype of its weights. Autocast converts all but float64."""
    is_left = x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type)
    return x.to(next(layer.parameters(), x).dtype) if is_left else x


def check_features(features: Any, operators: Operators, first: nn.Module) -> None:
    """Check that features (V, C_in) fit the operators and the first layer of a network.

    Another first layer than a plain `nn.Linear` checks its input itself, and hooks may change the channels.

    Raises TypeError if they are no floating-point tensor, ValueError for another shape or device.
    """
    check_is_tensor("features", features)
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


def check_conditions(conditions: Tensor | None, operators: Operators, channels: int) -> None:
    """Check that conditions (B, channels) fit the operators and a network. It takes None if it has no channels.

    Raises ValueError for another shape or device, and if there are conditions for a network without channels or none
    for one with them, TypeError if they are no floating-point tensor.
    """
    if conditions is None and channels == 0:
        return
    shape = len(operators), channels
    if conditions is None:
        raise ValueError(f"the network has conditions; write model(features, operators, conditions) of shape {shape}")
    if channels == 0:
        raise ValueError("the network takes no conditions; write DiffusionNet(…, condition_channels=C)")
    check_tensor("conditions", conditions, shape, operators.device)


def is_plain(module: object, cls: type[M]) -> TypeGuard[M]:
    """Return whether a call of the module runs `forward` of this class on ordinary parameters, and nothing else.

    Kernels may compute such a module together with others, from its parameters. Any other module is called.

    These modules are not plain: a module of a subclass, or with a parametrization, which makes a subclass; with hooks,
    or with a `forward` of its own; after `module.compile()`; with quantized or distributed tensors as parameters,
    because these have operations of their own. No module is plain while there are global hooks.
    """
    if type(module) is not cls:
        return False
    state = module.__dict__  # reading attributes of modules of several types takes twice the time
    for parameter in state["_parameters"].values():
        if type(parameter) is not nn.Parameter and hasattr(type(parameter), "__tensor_flatten__"):
            return False
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or "_compiled_call_impl" in state
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def has_plain_modules(network: nn.Module) -> bool:
    """Return whether each module inside a network is plain, so that hooks neither see nor change what it computes."""
    return not is_sharded(network) and all(is_plain(m, type(m)) for m in network.modules() if m is not network)


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP manages a module, so that its parameters are copies of shares during a pass."""
    return "_is_fsdp_managed_module" in module.__dict__  # PyTorch marks what `fully_shard` takes


def in_features_dtype(y: Tensor, features: Tensor) -> Tensor:
    """Return outputs in the dtype of the features, whatever that of the operators is. Autocast decides for itself."""
    if y.dtype == features.dtype or torch.is_autocast_enabled(features.device.type):
        return y
    return y.to(features.dtype)
