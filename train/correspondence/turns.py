"""The orientation of meshes: the test for a common one, and turns of meshes that face different directions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from diffnet.data import rotate_vectors, vector_channels
from diffnet.data.folders.files import listing
from diffnet.geometry import Mesh, Operators
from diffnet.geometry.positions.alignment import is_common_orientation
from diffnet.train.correspondence.maps import solved_maps, structure_loss
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import mesh_axes


def upright_axis(meshes: Iterable[Mesh]) -> tuple[float, ...]:
    """The mean of the first principal axes, three numbers, if the meshes stand and look the same way.

    Otherwise empty, see `is_common_orientation`.
    """
    axes = torch.stack([mesh_axes(mesh) for mesh in meshes])
    return tuple(axes[:, 0].mean(0).tolist()) if is_common_orientation(axes) else ()


def warn_if_tilted(meshes: Mapping[str, Mesh], options: TrainOptions) -> None:
    """Warn of meshes that stand in another direction than the training meshes, if the network gets them as they are.

    The first principal axis of these meshes is more than 60° from the mean of those of the training meshes.
    """
    upright = torch.tensor(options.upright, dtype=torch.float64)
    if len(upright) == 0:
        return
    cosines = {name: mesh_axes(mesh)[0].double() @ upright / upright.norm() for name, mesh in meshes.items()}
    tilted = [name for name, cosine in cosines.items() if cosine < 0.5]
    if tilted:
        warnings.warn(
            f"{listing(tilted)}: the first principal axis is more than 60° from that of the training meshes. The "
            "network expects their orientation, so maps are probably wrong. Turn the meshes, or train with "
            "--features wks.",
            stacklevel=3,
        )


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
