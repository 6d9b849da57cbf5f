"""Turns of meshes that face different directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffnet.data import rotate_vectors, vector_channels
from diffnet.geometry import Operators
from diffnet.train.correspondence.maps import solved_maps, structure_loss
from diffnet.train.options import TrainOptions


def facing_alike(network: nn.Module, features: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
    """Turn the second mesh of a pair by 180° about its first axis if bijectivity and orthogonality are better then.

    Principal axes tell reliably where the head of a figure is, but not its front. If two figures face different
    directions, their functional maps are less orthogonal. Features stay as they are if the options don't align them.

    features: (V, C) in principal axes, see `principal_axes`
    operators: meshes a and b of each pair in turn, as `collate_pairs` packs them

    Returns (V, C). The network runs twice, in eval mode and without gradients.
    """
    if not options.aligns:
        return features
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
