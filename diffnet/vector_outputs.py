"""The last layer of a network whose outputs are vectors and numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffnet.arguments import as_weights
from diffnet.geometry import Operators
from diffnet.ops import Backend
from diffnet.ops.common.precision import without_autocast
from diffnet.tangent_vectors import TangentVectors


class VectorOutputs(nn.Module):
    """P vectors by `TangentVectors` with a normal component, and numbers by a linear layer.

    It computes in float32 under autocast, so that vectors turn with a mesh as well as they do without.

    channels: C_in
    out_features: C_out, of which the first 3 P are the vectors, one after the other
    """

    def __init__(self, channels: int, out_features: int, vectors: int, backend: Backend = "auto") -> None:
        super().__init__()
        numbers = out_features - 3 * vectors
        if numbers < 0:
            raise ValueError(f"{vectors=} are {3 * vectors} channels, and out_channels is {out_features}")
        self.out_features = out_features
        self.vectors = TangentVectors(channels, vectors, normal=True, backend=backend)
        self.numbers = nn.Linear(channels, numbers) if numbers else None

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C_in) → (V, C_out)"""
        with without_autocast(x):
            x = as_weights(x, self.vectors)
            vectors: Tensor = self.vectors(x, operators).flatten(1)
            return vectors if self.numbers is None else torch.cat([vectors, self.numbers(x)], 1)
