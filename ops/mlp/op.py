"""A multilayer perceptron on several inputs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.common.precision import compute_dtype

MOST_INPUTS = 3


def mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """residual + Wₙ a(… W₂ a(W₁ [x₁ … xₘ] + b₁) + b₂ …) + bₙ with a = dropout ∘ ReLU; one layer is a linear one.

    inputs: (V, Cᵢ) each, weights: (H₁, Σ Cᵢ), (H₂, H₁), …, biases: (H₁,), (H₂,), …, residual: (V, Hₙ) → (V, Hₙ)
    dropout: the probability of a zero, from PyTorch's random numbers (the kernels draw a seed from them, and round
        it to a multiple of 2⁻¹⁶)

    For the backward, the kernels keep the hidden layers, and no masks: what is 0 in these was dropped or cut off.
    Raises ValueError for a dropout outside 0 ≤ p < 1, and where there are no weights, or not as many biases.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout should be at least 0 and below 1, got {dropout}")
    if not weights or (biases is not None and len(biases) != len(weights)):
        found = "none" if biases is None else len(biases)
        raise ValueError(f"weights should be one or more, biases as many or none, got {len(weights)} and {found}")
    if use_kernels(backend, *inputs, *weights, matrix=True):
        dtype = compute_dtype(*inputs)
        # The first layer's kernel takes a few inputs of one width as they are.
        alike = len(inputs) <= MOST_INPUTS and len({x.shape[-1] for x in inputs}) == 1
        parts = [x.to(dtype) for x in (inputs if alike else [torch.cat(list(inputs), dim=-1)])]
        hidden = len(weights) - 1
        seeds = torch.randint(2**31, (hidden, 2), device=parts[0].device) if dropout > 0 and hidden else None
        skip = residual is inputs[0] and alike
        added = None if skip or residual is None else residual.to(dtype)
        tensors = [*parts, *weights, *(biases or []), *([] if added is None else [added])]
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        out: Tensor = _mlp(parts, list(weights), list(biases or []), added, skip, dropout, seeds, keep)[0]
        return out
    x = torch.cat(list(inputs), dim=-1) if len(inputs) > 1 else inputs[0]
    for i, weight in enumerate(weights):
        if i > 0:
            x = F.relu(x)
            if dropout > 0:
                x = F.dropout(x, dropout)
        x = F.linear(x, weight, None if biases is None else biases[i])
    return x if residual is None else residual + x


def _mlp_kernel(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    skip: bool,
    dropout: float,
    seeds: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """The output and, where they are to be kept, the hidden layers, in the inputs' dtype, which weights are rounded to.

    skip: the residual is the first input; seeds: (n − 1, 2) where there is dropout
    """
    from diffnet.ops.mlp.kernels import forward

    return forward(inputs, weights, biases, inputs[0] if skip else residual, dropout, seeds, keep)


def _mlp_fake(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    skip: bool,
    dropout: float,
    seeds: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    outs = [inputs[0].new_empty(inputs[0].shape[0], weight.shape[0]) for weight in weights]
    return [outs[-1], *(outs[:-1] if keep else [])]


def _mlp_backward_kernel(
    grad: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    skip: bool,
    dropout: float,
    need_inputs: bool,
) -> list[Tensor]:
    """The gradient of the inputs (n, V, C), empty where it isn't needed, then of weights, then of biases, float32."""
    from diffnet.ops.mlp.kernels import backward
    from diffnet.ops.mlp.weight_gradient_kernels import weight_gradients

    parts = len(inputs)
    input_grads, grads = backward(grad, inputs, weights, hidden, skip, dropout, need_inputs)
    sums = weight_gradients([*((grads[0], x) for x in inputs), *zip(grads[1:], hidden, strict=True)])
    first = [weight_grad for weight_grad, _ in sums[:parts]]
    weight_grads = [torch.cat(first, dim=1) if parts > 1 else first[0], *(w for w, _ in sums[parts:])]
    return [input_grads, *weight_grads, sums[0][1], *(b for _, b in sums[parts:])]


def _mlp_backward_fake(
    grad: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    skip: bool,
    dropout: float,
    need_inputs: bool,
) -> list[Tensor]:
    rows, c = inputs[0].shape
    input_grads = grad.new_empty(len(inputs), rows if need_inputs else 0, c)
    weight_grads = [torch.empty_like(w, dtype=torch.float32, memory_format=torch.contiguous_format) for w in weights]
    return [input_grads, *weight_grads, *(w.new_empty(w.shape[0], dtype=torch.float32) for w in weights)]


_mlp_gradients = opaque("diffnet::mlp_backward", _mlp_backward_kernel, _mlp_backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    parts, weights, biases, residual, skip, dropout, *_ = inputs
    ctx.save_for_backward(*parts, *weights, *output[1:])
    ctx.counts = len(parts), len(weights)
    ctx.need_inputs = any(x.requires_grad for x in parts)
    ctx.bias_dtypes = [bias.dtype for bias in biases]
    ctx.residual, ctx.skip, ctx.dropout = residual is not None, skip, dropout
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    grad = grads[0]
    parts, layers = ctx.counts
    inputs, weights = ctx.saved_tensors[:parts], ctx.saved_tensors[parts : parts + layers]
    hidden = ctx.saved_tensors[parts + layers :]
    assert grad is not None  # of all outputs, callers are given the first
    input_grads, *sums = _mlp_gradients(
        grad.to(inputs[0].dtype), inputs, weights, hidden, ctx.skip, ctx.dropout, ctx.need_inputs
    )
    weight_grads = [g.to(w.dtype) for g, w in zip(sums[:layers], weights, strict=True)]
    bias_grads = [g.to(dtype) for g, dtype in zip(sums[layers:], ctx.bias_dtypes, strict=False)]
    by_input = list(input_grads.unbind()) if ctx.need_inputs else [None] * parts
    return by_input, weight_grads, bias_grads, grad if ctx.residual else None, None, None, None, None


_mlp = differentiable("diffnet::mlp", _mlp_kernel, _mlp_fake, _setup, _backward, lists=True)
