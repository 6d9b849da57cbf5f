"""The multilayer perceptron in plain PyTorch: the reference for the kernels and for `cpu.py`.

Arguments are as in `ops.mlp.op`. Mixed dtypes are promoted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.precision import compute_dtype, promoted_dtype


def mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    dropout: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + Wₙ a(… W₂ a(W₁ [x₁ … xₘ] + b₁) + b₂ …) + bₙ with a = dropout ∘ ReLU"""
    dtype = promoted_dtype(*inputs, *weights)
    x = (torch.cat(list(inputs), dim=-1) if len(inputs) > 1 else inputs[0]).to(dtype)
    for i, weight in enumerate(weights):
        if i > 0:
            x = F.relu(x)
            if dropout > 0:
                x = F.dropout(x, dropout)
        x = F.linear(x, weight.to(dtype), None if biases is None else biases[i].to(dtype))
    if residual is None:
        return x
    out = residual + x
    return out if residual.dtype == dtype else out.to(compute_dtype(*inputs, *weights))
