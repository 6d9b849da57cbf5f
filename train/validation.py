"""The meshes that a run holds out of training, to choose an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from diffnet.data import LabeledMeshes
from diffnet.data.counts import counted
from diffnet.data.folders.division import AT_RANDOM, BY_FOLDERS, BY_LISTS, drawn, groups_of
from diffnet.data.stored import joined, names_of
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions

D = TypeVar("D", bound=LabeledMeshes)


def with_held_out(data: D, options: TrainOptions) -> tuple[D, list[int]]:
    """The data set with its meshes for validation behind the training meshes, and the numbers of the held-out meshes.

    A set without such meshes holds out a random share of the training meshes, see `held_out`.

    Raises OptionError if the set has such meshes and `validation` is given, and for options of a division that is not
    made.
    """
    by = f": the set is divided {data.source}" if data.source else ""
    if options.split is not None and BY_LISTS not in data.source and BY_FOLDERS not in data.source:
        raise OptionError(f"split is {options.split!r}, but no lists or folders divide the set{by}")
    if options.group_by is not None and not options.validation and AT_RANDOM not in data.source:
        raise OptionError(f"group_by is {options.group_by!r}, but nothing is divided at random{by}")
    if not len(data.validation):
        return data, held_out(names_of(data.train) if options.validation else [""] * len(data.train), options)
    if options.validation > 0:
        raise OptionError(
            f"validation is {options.validation}, but the set has {counted(len(data.validation), 'mesh', 'meshes')} "
            f"for validation; it is divided {data.source}"
        )
    numbers = range(len(data.train), len(data.train) + len(data.validation))
    return replace(data, train=joined([data.train, data.validation]), validation=()), list(numbers)


def held_out(names: Sequence[str], options: TrainOptions) -> list[int]:
    """The numbers of the training meshes that `validation` holds out, in whole groups. Only the seed decides which.

    Raises OptionError if none is left to train on.
    """
    count = round(options.validation * len(names))
    if options.validation > 0:
        count = max(count, 1)
    if count >= len(names):
        raise OptionError(
            f"validation should leave a mesh to train on, got {options.validation} of "
            + counted(len(names), "training mesh", "training meshes")
        )
    if not count:
        return []
    generator = torch.Generator().manual_seed(options.seed)
    return sorted(
        drawn(groups_of(names, options.group_by), count, lambda n: torch.randperm(n, generator=generator).tolist())
    )
