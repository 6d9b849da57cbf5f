"""A plain peer, written from Wu et al. 2024, "Transolver: A Fast Transformer Solver for PDEs on General Geometries".

It sees points, and attends to slices of them: https://arxiv.org/abs/2402.02366, sections 3.2 and 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PhysicsAttention(nn.Module):
    """Each head puts points into slices by soft weights, and its slices attend to each other.

    With the features x of a head at the points, and w = softmax(W x' / τ) over the slices:

        z_s = Σ_n w_ns x_n / Σ_n w_ns,   z' = softmax(Q Kᵀ / √d) V,   x'_n = Σ_s w_ns z'_s
    """

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.features, self.places = nn.Linear(width, width), nn.Linear(width, width)
        self.slices = nn.Linear(size, slices)
        nn.init.orthogonal_(self.slices.weight)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 0.5))
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, N, C) → (B, N, C). mask: (B, N), 1 at points and 0 elsewhere"""
        features, places = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.features, self.places)
        )
        weights = (self.slices(places) / self.temperature.clamp(0.1, 5)).softmax(-1) * mask[:, None, :, None]
        tokens = weights.mT @ features / (weights.sum(2)[..., None] + 1e-5)
        tokens = F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))
        return self.out((weights.to(tokens.dtype) @ tokens).transpose(1, 2).flatten(2))


class TransolverBlock(nn.Module):
    """Attention and an MLP, both on normalized features and with a skip connection."""

    def __init__(self, width: int, heads: int, slices: int, ratio: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = PhysicsAttention(width, heads, slices)
        self.mlp = nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, N, C) → (B, N, C)"""
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.mlp(self.norms[1](x))


class Transolver(nn.Module):
    """The network: an MLP at each point, blocks, and a linear layer. Its defaults are those of the paper for cars."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int = 256,
        blocks: int = 8,
        *,
        heads: int = 8,
        slices: int = 32,
        ratio: int = 2,
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(in_channels, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(TransolverBlock(width, heads, slices, ratio) for _ in range(blocks))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, out_channels)
        self.apply(_initialize)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, N, C_in), mask (B, N) → (B, N, C_out)"""
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(self.norm(x))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
