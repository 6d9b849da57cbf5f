"""Modules that need no call, because kernels compute what their `forward` does."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

M = TypeVar("M", bound=nn.Module)


def is_plain(module: object, cls: type[M]) -> TypeGuard[M]:
    """Return whether a call of the module runs `forward` of this class and nothing else.

    A module of a subclass is not plain, nor is one with a parametrization (its class is another one), with hooks, with
    a `forward` of its own, or after `module.compile()`. No module is plain while there are global hooks.
    """
    return (
        type(module) is cls
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
    )
