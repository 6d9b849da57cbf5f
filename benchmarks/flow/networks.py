"""The networks of the flow set. All return (V, 4): the pressure, and the three coordinates of the velocity."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import DiffusionNet, TangentVectors
from diffnet.geometry import Operators, from_padded, to_padded

FEATURES, CONDITIONS = 6, 2  # positions with normals; speed and angle
FIELDS = 32  # functions whose gradients make the velocity
HEADS, SLICES = 8, 32  # of the peer, as in its paper
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


class TransolverBlock(nn.Module):
    """Attention between slices of the points, and an MLP, both on normalized features and with a skip connection.

    With the features x and y of a head at the points, and the weights w = softmax(W y / τ) over the slices:

        z_s = Σ_n w_ns x_n / Σ_n w_ns,   z' = softmax(Q Kᵀ / √d) V,   x'_n = Σ_s w_ns z'_s
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        size = width // HEADS
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.features, self.places, self.out = (nn.Linear(width, width) for _ in range(3))
        self.slices, self.temperature = nn.Linear(size, SLICES), nn.Parameter(torch.full((HEADS, 1, 1), 0.5))
        nn.init.orthogonal_(self.slices.weight)
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, N, C) → (B, N, C). mask: (B, N), 1 at points and 0 elsewhere"""
        y = self.first_norm(x)
        features, places = (
            layer(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.features, self.places)
        )
        weights = (self.slices(places) / self.temperature.clamp(0.1, 5)).softmax(-1) * mask[:, None, :, None]
        tokens = weights.mT @ features / (weights.sum(2)[..., None] + 1e-5)
        tokens = F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))
        x = x + self.out((weights @ tokens).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second_norm(x))


class Transolver(nn.Module):
    """A plain peer, which sees points: an MLP at each, blocks, and a linear layer.

    Source: Wu et al. 2024, "Transolver: A Fast Transformer Solver for PDEs on General Geometries"
    """

    def __init__(self, in_channels: int, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(in_channels, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(TransolverBlock(width) for _ in range(blocks))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, features: Tensor, operators: Operators) -> Tensor:
        x, mask = to_padded(features, operators)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return from_padded(self.last(x), operators)


def make_network(name: NetworkName, size: tuple[int, int], tokens: int) -> nn.Module:
    """A new network. "diffnet" has conditions and tokens. The others get the conditions as constant features: "plain",
    which is diffnet without both, and "transolver", the peer. size: width and blocks
    """
    if name == "diffnet":
        return SurfaceNetwork(FEATURES, *size, condition_channels=CONDITIONS, global_tokens=tokens)
    return (SurfaceNetwork if name == "plain" else Transolver)(FEATURES + CONDITIONS, *size)
