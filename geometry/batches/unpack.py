"""Packed outputs of a network as one tensor per mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from diffnet.ops.common.checks import not_a_tensor

if TYPE_CHECKING:
    from diffnet.geometry.operators import Operators

UnpackAt: TypeAlias = Literal["vertices", "faces", "edges", "mesh", "global_mean"]

_LENGTHS: dict[str, Callable[[Operators], tuple[int, ...]]] = {
    "vertices": lambda operators: operators.lengths,
    "faces": lambda operators: operators.face_lengths,
    "edges": lambda operators: operators.edge_lengths,
    "mesh": lambda operators: (1,) * len(operators),
    "global_mean": lambda operators: (1,) * len(operators),
}


def unpack(operators: Operators, y: Tensor, at: UnpackAt, dim: int) -> list[Tensor]:
    """See `Operators.unpack`."""
    if at not in get_args(UnpackAt):
        raise ValueError(f"at should be one of {', '.join(get_args(UnpackAt))}, got {at!r}")
    if not isinstance(y, Tensor):
        raise not_a_tensor("y", y)
    lengths, per_mesh = _LENGTHS[at](operators), at in ("mesh", "global_mean")
    if not -y.ndim <= dim < y.ndim or y.shape[dim] != sum(lengths):
        rows = "meshes" if per_mesh else at
        raise ValueError(f"y should have {sum(lengths)} {rows} in dimension {dim}, shape is {tuple(y.shape)}")
    return list(y.unbind(dim) if per_mesh else torch.split(y, list(lengths), dim))
