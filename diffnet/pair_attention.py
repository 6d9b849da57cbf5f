"""Attention between the two meshes of a pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffnet.arguments import as_weights
from diffnet.geometry import Operators

# Without cuDNN, which plans each pair of sizes anew. With it, a step on pairs of bodies took about a second, not 0.04.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PairAttention(nn.Module):
    """Multi-head attention of each vertex to all vertices of the other mesh of its pair.

    A pair is two consecutive meshes of a batch. With y, the normalized x, and its H heads of queries q, keys k and
    values v, each vertex i reads from the vertices j of the other mesh:

        r_i = Σ_j softmax_j(q_i · k_j / √(C/H)) v_j
        x_i + MLP([y_i, r_i])

    The MLP sees both, so it can tell whether what it reads fits. Its last layer is 0 at first, so a new layer changes
    nothing. On a GPU, the scores of all vertices are never in memory at once.

    Source of the attention: Vaswani et al. 2017, section 3.2.

    Args:
        channels: C, divided among the heads.
        heads: H.
    """

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        if channels % heads != 0:
            raise ValueError(f"heads should divide the {channels} channels, got {heads}")
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.mlp = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels))
        for parameter in self.mlp[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)

        Raises ValueError for an odd number of meshes.
        """
        if len(operators) % 2:
            raise ValueError(f"attention in pairs needs an even number of meshes, got {len(operators)}")
        y = self.norm(as_weights(x, self.norm))
        heads = self.query_key_value(y).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        meshes = torch.split(heads, list(operators.lengths), 2)  # (3, H, V_b, C/H) each
        # The other mesh of mesh 2p is 2p + 1, and that of 2p + 1 is 2p.
        with sdpa_kernel(_BACKENDS):
            read = [
                F.scaled_dot_product_attention(q[None], *meshes[b ^ 1][1:, None]) for b, (q, _, _) in enumerate(meshes)
            ]
        return x + self.mlp(torch.cat([y, torch.cat(read, 2)[0].transpose(0, 1).flatten(1)], 1))
