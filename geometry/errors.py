"""Errors that a user can fix. Worker processes use this module, and importing `diffnet.ops` would load PyTorch."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

MAX_REASONS = 5  # in one error message, and names of what has the same reason
IN_BRACKETS = "{} ({})"  # a form of messages, see `raised_as`
P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="DiffnetError")


class DiffnetError(Exception):
    """Base class of the errors that a user of this library can fix. The message says what to change.

    The command line prints such an error as one line. Every other error is a bug, and shows its traceback.

    reasons: what is wrong with files of a data set that cause the error, by their paths. By default, the message, by
        the path with which it begins.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reasons: Mapping[str, str] = {str(self).partition(": ")[0]: str(self)}

    def about(self: E, files: Any) -> E:
        """The error with other `reasons`. files: these, or the file that the message is about"""
        entries = files if isinstance(files, Mapping) else {files: str(self)}
        self.reasons = {os.fspath(file): reason for file, reason in entries.items()}
        return self


class MeshError(DiffnetError, ValueError):
    """A mesh or a mesh file can't be used. The message names it and says what is wrong."""


class OptionError(DiffnetError, ValueError):
    """An option has a value that is not allowed. The message names the option and the value."""


@contextmanager
def raised_as(kind: type[Exception], place: Any, *caught: type[Exception], form: str = "{}: {}") -> Iterator[None]:
    """Here, errors of the kinds `caught` become errors of another kind. The messages begin with a place.

    form: of a message, with the place and the message of the caught error
    """
    try:
        yield
    except caught as e:
        raise kind(form.format(place, e)) from e


class ConvergenceError(DiffnetError, RuntimeError):
    """An iterative solver did not converge."""


def some_reasons(reasons: list[str]) -> str:
    """The first reasons why meshes or files can't be used, for one error message. Each stands there once.

    >>> some_reasons(["a.obj: no labels", "b.obj: no labels", "c.obj: no such file"])
    'a.obj, b.obj: no labels; c.obj: no such file'
    """
    places: dict[str, list[str]] = {}
    for message in dict.fromkeys(reasons):
        place, colon, reason = message.partition(": ")
        places.setdefault(colon + reason, []).append(place)
    shown = [", ".join(names[:MAX_REASONS]) + ", …" * (len(names) > MAX_REASONS) + why for why, names in places.items()]
    return "; ".join(shown[:MAX_REASONS]) + "; …" * (len(shown) > MAX_REASONS)


class WorkerError(DiffnetError, RuntimeError):
    """Worker processes can't start."""


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
