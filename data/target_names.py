"""The text that says where targets are, such as "file:curvature". The command line checks it, so this loads fast."""

from __future__ import annotations

from diffnet.data.feature_names import FILE_PREFIX, feature_parts
from diffnet.geometry.errors import OptionError

TABLE = "targets.csv"  # the name of a table of targets in a folder


def target_parts(targets: str) -> list[str]:
    """The names of targets such as "file:u+file:v", in the order of the text.

    Raises OptionError for text of another form.

    >>> target_parts("file:v + file:u")
    ['v', 'u']
    """
    try:
        names = [part.array for part in feature_parts(targets)]
    except OptionError:
        names = [None]
    if None in names:
        raise OptionError(f"targets should be file:NAME, one or several joined by +, got {targets!r:.200}")
    return [part.strip().removeprefix(FILE_PREFIX) for part in targets.split("+")]
