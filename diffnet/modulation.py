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
from diffnet.ops.common.precision import without_autocast
from diffnet.ops.global_tokens.op import tokens_and_modulation


class Modulation(nn.Module):
    """Coefficients by which the conditions c of each mesh scale and shift the channels of each block of a network.

    The input x of block i becomes (1 + γ) ∘ x + β with [γ, β] = W_i c + b_i. W and b are 0 at first, so a new layer
    changes nothing. The coefficients of all blocks are computed at once.

    Source: Perez et al. 2018, "FiLM: Visual Reasoning with a General Conditioning Layer".

    Args:
        channels: C.
        condition_channels: P, numbers in the conditions of a mesh.
        blocks: N.
    """

    def __init__(self, channels: int, condition_channels: int, blocks: int) -> None:
        super().__init__()
        for name, count in {"channels": channels, "condition_channels": condition_channels, "blocks": blocks}.items():
            check_count(name, count, 1)
        self.weight = nn.Parameter(torch.zeros(blocks, 2 * channels, condition_channels))
        self.bias = nn.Parameter(torch.zeros(blocks, 2 * channels))

    def forward(self, conditions: Tensor | None, operators: Operators) -> tuple[Tensor, ...]:
        """conditions (B, P) → [γ, β] of each mesh, (B, 2C), for each of the N blocks"""
        check_conditions(conditions, operators, self.weight.shape[2])
        assert conditions is not None
        with without_autocast(conditions):
            rows = F.linear(conditions.to(self.weight.dtype), self.weight.flatten(0, 1), self.bias.flatten())
        return rows.view(-1, *self.bias.shape).unbind(1)


def modulated_after_tokens(
    x: Tensor, operators: Operators, tokens: GlobalTokens | None, coefficients: Tensor | None, backend: Backend
) -> Tensor:
    """Call the layer of tokens if there is one, and scale and shift by coefficients [γ, β] (B, 2C) if there are any.

    x (V, C) → (V, C). Kernels compute both at once.
    """
    o = operators
    parameters = tokens.plain_parameters() if tokens is not None and is_plain(tokens, GlobalTokens) else None
    if coefficients is not None and (tokens is None or (parameters is not None and tokens.backend == backend)):
        node = tokens_and_modulation(x, o.mass, o.ptr, parameters, coefficients, backend)
        if node is not None:
            return node
    x = x if tokens is None else tokens(x, operators)
    if coefficients is None:
        return x
    # The values of each mesh are coefficients of the constant function.
    rows = from_spectral(coefficients[:, None], x.new_ones(x.shape[0], 1), o.ptr, o.lengths, backend)
    scale, shift = rows.to(x.dtype).chunk(2, 1)
    return x + scale * x + shift
