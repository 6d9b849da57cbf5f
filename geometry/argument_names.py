"""Errors for the names that the original implementation gives arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def refuses(
    advice: str = "pass the others by name", /, **replacements: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function refuse arguments that the original implementation has (https://github.com/nmwsharp/diffusion-net).

    advice: what to do instead of passing more arguments by position than the function has
    replacements: for each of the original's names, what to write instead

    The decorated function raises TypeError that names the replacement.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        most = len(positional)
        listed = ", ".join(p for p in positional if p != "self")

        @functools.wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            for option in options:
                if option in replacements:
                    raise TypeError(
                        f"{name} has no argument {option}, which is the original's name; write {replacements[option]}"
                    )
            if len(arguments) > most:
                more = len(arguments) - most
                raise TypeError(f"{name} takes {listed} by position, got {more} more; {advice}")
            return function(*arguments, **options)

        return checked

    return decorate
