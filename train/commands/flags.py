"""Errors on the command line name the flags of options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from diffnet.geometry.errors import OptionError


@contextmanager
def flags_in_errors(context: typer.Context) -> Iterator[None]:
    """Make errors name flags: "--lr should be above 0" instead of "learning_rate should be above 0".

    Only the first word changes, and only if it is the name of an option of the command. The messages of `TrainOptions`
    begin with the name of the option.
    """
    try:
        yield
    except OptionError as e:
        name, space, rest = str(e).partition(" ")
        flags = {option.name: option.opts[0] for option in context.command.params}
        raise OptionError(flags.get(name, name) + space + rest) from e
