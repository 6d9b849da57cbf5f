"""The orientation of shapes: whether those of a set share it, and the turn that their axes leave open."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from diffnet.data import rotate_vectors, vector_channels
from diffnet.geometry import Mesh, Operators
from diffnet.geometry.elements.elements import element_areas
from diffnet.geometry.positions.alignment import is_common_orientation, principal_axes
from diffnet.train.correspondence.maps import solved_maps, structure_loss
from diffnet.train.options import TrainOptions


def oriented_alike(meshes: Iterable[Mesh]) -> bool:
    """Whether meshes stand and look the same way, see `is_common_orientation`."""
    axes = []
    for mesh in meshes:
        areas = element_areas(mesh, "vertices") if len(mesh.faces) else np.ones(len(mesh.verts))
        axes.append(principal_axes(torch.from_numpy(mesh.verts), torch.from_numpy(areas)))
    return is_common_orientation(torch.stack(axes))


def facing_alike(network: nn.Module, features: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
    """Turn the second mesh of a pair by 180° about its first axis if bijectivity and orthogonality are better then.

    Principal axes tell reliably where the head of a figure is, but not its front. If two figures look different
    ways, their functional maps are less orthogonal.

    features: (V, C) in principal axes, see `principal_axes`
    operators: meshes a and b of each pair in turn, as `collate_pairs` packs them

    Returns (V, C). The network runs twice, in eval mode and without gradients.
    """
    half_turn = torch.diag(features.new_tensor([1.0, -1.0, -1.0]))
    turns = torch.stack([torch.eye(3, device=features.device, dtype=features.dtype), half_turn])
    rotations = turns.repeat(len(operators) // 2, 1, 1)
    turned = rotate_vectors(features, vector_channels(options.features), rotations, operators.ptr)
    was_training = network.training
    network.eval()
    with torch.no_grad():
        before, after = (_losses(network(x, operators), operators, options) for x in (features, turned))
    network.train(was_training)
    rows = (after < before).repeat_interleave(2).repeat_interleave(operators.ptr.diff(), output_size=len(features))
    return torch.where(rows[:, None], turned, features)


def _losses(outputs: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
    """The loss (P,) of each pair."""
    maps = solved_maps(outputs, operators, "unsupervised", options.map_k, options.feature_scale)
    there, back = maps.unbind(1)
    return torch.stack([structure_loss(there[p : p + 1], back[p : p + 1]) for p in range(len(maps))])
