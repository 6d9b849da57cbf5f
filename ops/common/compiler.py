"""What torch.compile is told of functions. Its own decorators import the compiler, which takes a second, at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """As `torch.compiler.disable`: the function runs as it is, and the graph breaks around it."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments)  # type: ignore[no-untyped-call]
        return function(*arguments)

    return call  # type: ignore[return-value]


def constant(function: F) -> F:
    """As `torch.compiler.assume_constant_result`, of which this is the whole: the function is called while tracing."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
