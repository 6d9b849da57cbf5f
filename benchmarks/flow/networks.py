"""The networks of the flow set. All return (V, 4): the pressure, and the three coordinates of the velocity."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffnet import DiffusionNet, TangentVectors
from diffnet.benchmarks.flow.transolver import Transolver
from diffnet.geometry import Operators, from_padded, to_padded

FEATURES, CONDITIONS = 6, 2  # positions with normals; speed and angle
FIELDS = 32  # functions whose gradients make the velocity
NetworkName = Literal["diffnet", "plain", "transolver"]


class SurfaceNetwork(nn.Module):
    """A `DiffusionNet` whose velocity is made of gradients, by `TangentVectors`, and is tangent to the surface."""

    def __init__(self, in_channels: int, width: int, blocks: int, **options: Any) -> None:
        super().__init__()
        self.trunk = DiffusionNet(in_channels, 1 + FIELDS, width=width, blocks=blocks, dropout=0.0, **options)
        self.velocity = TangentVectors(FIELDS)

    def forward(self, features: Tensor, operators: Operators, *conditions: Tensor) -> Tensor:
        x = self.trunk(features, operators, *conditions)
        return torch.cat([x[:, :1], self.velocity(x[:, 1:], operators)[:, 0].to(x.dtype)], 1)


class PointNetwork(nn.Module):
    """A `Transolver`, which pads meshes to one size and knows nothing of their surfaces."""

    def __init__(self, in_channels: int, width: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Transolver(in_channels, 4, width, blocks)

    def forward(self, features: Tensor, operators: Operators) -> Tensor:
        x, mask = to_padded(features, operators)
        return from_padded(self.trunk(x, mask.to(x.dtype)), operators)


def make_network(name: NetworkName, width: int, blocks: int, tokens: int) -> nn.Module:
    """A new network of the default random stream.

    "diffnet" has conditions and tokens. "plain" is diffnet without both, and "transolver" the peer: both get the
    conditions as constant features.
    """
    if name == "diffnet":
        options = {"condition_channels": CONDITIONS, "global_tokens": tokens}
        return SurfaceNetwork(FEATURES, width, blocks, **options)
    kind = SurfaceNetwork if name == "plain" else PointNetwork
    return kind(FEATURES + CONDITIONS, width, blocks)
