"""Conditions of meshes, such as a speed or a time, that scale and shift the channels of a network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.arguments import check_conditions, is_plain
from diffnet.geometry import Operators
from diffnet.global_tokens import GlobalTokens
from diffnet.ops import Backend, from_spectral
from diffnet.ops.common.checks import check_count
from diffnet.ops.global_tokens.op import tokens_and_modulation
from diffnet.ops.global_tokens.parameters import Parameters


class Modulation(nn.Module):
    """Scale and shift channels by the conditions c of each mesh: (1 + γ) ∘ x + β with [γ, β] = W c + b.

    W and b are 0 at first, so a new layer changes nothing.

    Source: Perez et al. 2018, "FiLM: Visual Reasoning with a General Conditioning Layer".

    Args:
        channels: C.
        condition_channels: numbers in the conditions of a mesh.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.
    """

    def __init__(self, channels: int, condition_channels: int, backend: Backend = "auto") -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("condition_channels", condition_channels, 1)
        self.backend: Backend = backend
        self.weight = nn.Parameter(torch.zeros(2 * channels, condition_channels))
        self.bias = nn.Parameter(torch.zeros(2 * channels))

    def forward(self, x: Tensor, conditions: Tensor | None, operators: Operators) -> Tensor:
        """x (V, C), conditions (B, condition_channels) → (V, C)"""
        check_conditions(conditions, operators, self.weight.shape[1])
        assert conditions is not None
        parameters = Parameters(modulation=self.weight, modulation_bias=self.bias)
        node = tokens_and_modulation(x, operators.mass, operators.ptr, parameters, conditions, self.backend)
        if node is not None:
            return node
        coefficients = F.linear(conditions.to(self.weight.dtype), self.weight, self.bias)
        # The values of each mesh are coefficients of the constant function.
        constant, o = x.new_ones(x.shape[0], 1), operators
        rows = from_spectral(coefficients[:, None], constant, o.ptr, o.lengths, self.backend)
        scale, shift = rows.chunk(2, 1)
        return x + scale * x + shift


def modulated_after_tokens(
    x: Tensor,
    operators: Operators,
    tokens: GlobalTokens | None,
    modulation: Modulation | None,
    conditions: Tensor | None,
) -> Tensor:
    """Call the layers that there are, x (V, C) → (V, C). Kernels compute both at once."""
    if tokens is not None and is_plain(tokens, GlobalTokens) and is_plain(modulation, Modulation):
        check_conditions(conditions, operators, modulation.weight.shape[1])
        both = tokens.plain_parameters()
        if both is not None and tokens.backend == modulation.backend:
            both = both._replace(modulation=modulation.weight, modulation_bias=modulation.bias)
            node = tokens_and_modulation(x, operators.mass, operators.ptr, both, conditions, tokens.backend)
            if node is not None:
                return node
    x = x if tokens is None else tokens(x, operators)
    return x if modulation is None else modulation(x, conditions, operators)
