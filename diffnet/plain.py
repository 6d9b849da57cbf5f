"""Modules that need no call, because kernels compute what their `forward` does."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

M = TypeVar("M", bound=nn.Module)


def is_plain(module: object, cls: type[M]) -> TypeGuard[M]:
    """Return whether a call of the module runs `forward` of this class on ordinary parameters, and nothing else.

    A module of a subclass is not plain, nor is one with a parametrization (its class is another one), with hooks, with
    a `forward` of its own, or after `module.compile()`. Nor is one whose parameters are quantized or distributed
    tensors, because they bring operations of their own. No module is plain while there are global hooks.
    """
    if type(module) is not cls:
        return False
    state = module.__dict__  # attributes of modules of several types take twice the time
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
