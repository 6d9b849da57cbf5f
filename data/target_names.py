"""The text that says where targets are, such as "file:curvature". The command line checks it, so this loads fast."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
        parts = [part.name for part in feature_parts(targets)]
    except OptionError:
        parts = [""]
    if not all(part.startswith(FILE_PREFIX) for part in parts):
        raise OptionError(f"targets should be file:NAME, one or several joined by +, got {targets!r:.200}")
    return [part.strip().removeprefix(FILE_PREFIX) for part in targets.split("+")]


def vector_columns(names: Sequence[str]) -> list[list[str]]:
    """The columns of targets whose names look like those of a vector in space, in threes.

    Their names are alike but for the end, which is x, y, z, or 0, 1, 2, or 1, 2, 3.

    >>> vector_columns(["Ux", "Uy", "Uz", "stress_0", "stress_1", "p"])
    [['Ux', 'Uy', 'Uz']]
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        end = re.search(r"([xyz]|\d+)$", name.lower())
        if end is not None:
            groups.setdefault(name[: end.start()].lower(), {})[end[1]] = name
    return [list(own.values()) for own in groups.values() if set(own) in ({*"xyz"}, {*"012"}, {*"123"})]
