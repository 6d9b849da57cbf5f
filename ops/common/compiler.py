"""Marks for torch.compile. PyTorch's own decorators import the compiler at once, which takes a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # subclasses stand in for tensors while a tracer runs, without values


def not_compiled(function: F, advice: str = "") -> F:
    """Like `torch.compiler.disable`: the function runs uncompiled, and the graph breaks around it.

    advice: what the error says if no break is allowed (`fullgraph=True`)
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=advice)  # type: ignore[no-untyped-call]
            return torch.compiler.disable(function)(*arguments)  # type: ignore[no-untyped-call]
        return function(*arguments)

    return call  # type: ignore[return-value]


def under_transforms() -> bool:
    """Return whether vmap or another transform of torch.func runs. PyTorch has no public function that tells."""
    return bool(torch._C._are_functorch_transforms_active())


def is_batched(*tensors: torch.Tensor) -> bool:
    """Return whether a gradient is one of several that are computed at once, by torch.func or `is_grads_batched`."""
    return under_transforms() or any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


def is_stand_in(value: object) -> bool:
    """Return whether the value stands for a tensor in an object that torch.compile makes while it traces.

    torch.compile constructs dataclasses from such values to rebuild its results.
    """
    return isinstance(value, torch.fx.Proxy)


def constant(function: F) -> F:
    """Like `torch.compiler.assume_constant_result`: the function is called once, while torch.compile traces.

    Setting this attribute is all that PyTorch's decorator does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
