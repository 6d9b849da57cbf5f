"""Tokens that carry information across a whole mesh, also between components that don't touch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.arguments import as_weights, is_plain
from diffnet.geometry import Operators
from diffnet.ops import Backend, from_spectral, to_spectral
from diffnet.ops.common.checks import check_count
from diffnet.ops.global_tokens.op import tokens_and_modulation
from diffnet.ops.global_tokens.parameters import Parameters


class GlobalTokens(nn.Module):
    """N tokens of each mesh, which gather from all vertices, attend to each other, and give back.

    With the areas m and the weights w = softmax(S x + s) of the N tokens at each vertex:

        gather      z_n = Σ_v m_v w_vn x_v / Σ_v m_v w_vn
        exchange    y = softmax(Q Kᵀ / √C) V, where Q, K and V are linear in z
        give back   x_v + Σ_n w_vn A y_n

    A is 0 at first, so a new layer changes nothing. The means are integrals over the surface, so they hardly depend on
    its triangles.

    Source: the attention of Wu et al. 2024, "Transolver", with areas as weights.

    Args:
        channels: C.
        tokens: N.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.
    """

    def __init__(self, channels: int, tokens: int, backend: Backend = "auto") -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("tokens", tokens, 1)
        self.backend: Backend = backend
        self.share = nn.Linear(channels, tokens)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.out = nn.Parameter(torch.zeros(channels, channels))

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)"""
        mass, meshes = operators.mass, (operators.ptr, operators.lengths, self.backend)
        parameters = self.plain_parameters()
        node = parameters and tokens_and_modulation(x, mass, meshes[0], parameters, None, self.backend)
        if node is not None:
            return node
        weights = self.share(as_weights(x, self.share)).softmax(1).to(x.dtype)
        areas = to_spectral(x.new_ones(x.shape[0], 1), weights, mass, *meshes)
        # A mesh without area has empty tokens.
        tokens = to_spectral(x, weights, mass, *meshes) / torch.where(areas > 0, areas, 1.0)
        query, key, value = self.query_key_value(tokens.to(self.out.dtype)).chunk(3, -1)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return x + from_spectral(F.linear(scores.softmax(-1) @ value, self.out), weights, *meshes)

    def plain_parameters(self) -> Parameters | None:
        """The parameters for kernels, or None if a layer inside has to be called."""
        share, projection = self.share, self.query_key_value
        if not (is_plain(share, nn.Linear) and is_plain(projection, nn.Linear)):
            return None
        if share.bias is None or projection.bias is None:
            return None
        return Parameters(share.weight, share.bias, projection.weight, projection.bias, self.out)
