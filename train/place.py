"""Which of the ranks a process is. The command line reads this, so it loads fast."""

from __future__ import annotations

import os
from typing import NamedTuple

from diffnet.geometry.errors import OptionError


class Place(NamedTuple):
    """Which of the ranks a process is: its number among all, and among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def place() -> Place:
    """The place of this process, from the variables that torchrun sets. A process without them is alone.

    Raises OptionError for variables that don't fit.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return Place()
    here = Place(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", "0"), _number("LOCAL_WORLD_SIZE", "1"))
    for name, number, count in (
        ("WORLD_SIZE", here.rank, here.world_size),
        ("LOCAL_WORLD_SIZE", here.local_rank, here.local_world_size),
    ):
        if number >= count:
            raise OptionError(f"{name} should be above the number of the rank, {number}, got {count}")
    return here


def _number(name: str, default: str = "") -> int:
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise OptionError(f"{name} should be an integer from 0, got {value!r}; torchrun sets it")
    return int(value)
