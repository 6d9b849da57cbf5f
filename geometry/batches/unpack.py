"""Packed outputs of a network as one tensor per mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from diffnet.ops.common.checks import not_a_tensor

UnpackAt: TypeAlias = Literal["vertices", "faces", "edges", "mesh", "global_mean"]


def unpack(y: Tensor, lengths: Sequence[int], at: UnpackAt, dim: int) -> list[Tensor]:
    """See `Operators.unpack`. The lengths are the number of rows of each mesh."""
    if at not in get_args(UnpackAt):
        raise ValueError(f"at should be one of {', '.join(get_args(UnpackAt))}, got {at!r}")
    if not isinstance(y, Tensor):
        raise not_a_tensor("y", y)
    per_mesh = at in ("mesh", "global_mean")
    if not -y.ndim <= dim < y.ndim or y.shape[dim] != sum(lengths):
        rows = "meshes" if per_mesh else at
        raise ValueError(f"y should have {sum(lengths)} {rows} in dimension {dim}, shape is {tuple(y.shape)}")
    return list(y.unbind(dim) if per_mesh else torch.split(y, list(lengths), dim))
