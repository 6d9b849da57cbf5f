"""Which training meshes the option `validation` holds out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffnet.data.folders.division import drawn, groups_of
from diffnet.data.labeled import counted
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions


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
