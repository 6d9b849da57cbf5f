"""Errors that a user can fix. This module imports nothing, so every room above `ops` can use it.

It is not in `ops`, because importing `diffnet.ops` loads PyTorch, and worker processes that preprocess meshes do
without it.
"""


class DiffnetError(Exception):
    """Base class of the errors that a user of this library can fix. The message says what to change.

    The command line prints such an error as one line. Every other error is a bug, and shows its traceback.
    """


class MeshError(DiffnetError, ValueError):
    """A mesh or a mesh file can't be used. The message names it and says what is wrong."""


class OptionError(DiffnetError, ValueError):
    """An option has a value that is not allowed. The message names the option and the value."""


class ConvergenceError(DiffnetError, RuntimeError):
    """An iterative solver did not converge."""


MAX_REASONS = 5  # in one error message, and names of what has the same reason


def some_reasons(reasons: list[str]) -> str:
    """The first reasons why meshes or files can't be used, for one error message. Each stands there once.

    >>> some_reasons(["a.obj: no labels", "b.obj: no labels", "c.obj: no such file"])
    'a.obj, b.obj: no labels; c.obj: no such file'
    """
    places: dict[str, list[str]] = {}
    for message in dict.fromkeys(reasons):
        place, colon, reason = message.partition(": ")
        places.setdefault(colon + reason, []).append(place)
    shown = [", ".join(own[:MAX_REASONS]) + ", …" * (len(own) > MAX_REASONS) + why for why, own in places.items()]
    return "; ".join(shown[:MAX_REASONS]) + "; …" * (len(shown) > MAX_REASONS)


class WorkerError(DiffnetError, RuntimeError):
    """Worker processes can't start."""
