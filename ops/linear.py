"""A layer of an MLP on several inputs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.backend import Backend
from diffnet.ops.dispatch import differentiable, opaque
from diffnet.ops.precision import compute_dtype, use_matrix_kernels

MOST_INPUTS = 3


def linear(
    inputs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    relu: bool = False,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """residual + dropout(relu([x₁ … xₙ] Wᵀ + b)), each part where it is asked for.

    inputs: (V, Cᵢ) each, weight (H, Σ Cᵢ), bias (H,), residual (V, H) → (V, H)
    dropout: the probability of a zero, from PyTorch's random numbers (the kernel draws a seed from them)

    The kernel takes up to three inputs of one width, doesn't put them side by side, and keeps no mask: its output shows
    what ReLU and dropout did. So dropout without ReLU, or ReLU with a residual, is left to PyTorch.
    Raises ValueError for a dropout outside 0 ≤ p < 1.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout should be at least 0 and below 1, got {dropout}")
    alike = len(inputs) <= MOST_INPUTS and len({x.shape[-1] for x in inputs}) == 1
    # What the kernel keeps for its backward is its output, which shows ReLU's and dropout's zeros if nothing is added.
    shown = residual is None if relu else dropout == 0
    if alike and shown and use_matrix_kernels(backend, *inputs, weight):
        dtype = compute_dtype(*inputs)
        first, second, third = ([x.to(dtype) for x in inputs] + [None, None])[:3]
        seed = torch.randint(2**31, (2,), device=weight.device) if dropout > 0 else None
        residual = residual if residual is None else residual.to(dtype)
        out: Tensor = _linear(first, second, third, weight, bias, residual, relu, dropout, seed)
        return out
    y = F.linear(torch.cat(list(inputs), dim=-1), weight, bias)
    if relu:
        y = F.relu(y)
    if dropout > 0:
        y = F.dropout(y, dropout)
    return y if residual is None else residual + y


def _linear_kernel(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """In the inputs' dtype, which the weight is rounded to; dropout takes a seed of two words."""
    from diffnet.ops.kernels.linear import linear

    return linear(_present(first, second, third), weight.to(first.dtype), bias, residual, relu, dropout, seed)


def _linear_fake(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    return first.new_empty(first.shape[0], weight.shape[0])


def _activation_backward_kernel(grad: Tensor, out: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """dy (V, H) and its column sums (H,) float32, see `kernels.linear`."""
    from diffnet.ops.kernels.linear import activation_backward

    return activation_backward(grad, out, dropout)


def _activation_backward_fake(grad: Tensor, out: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out, memory_format=torch.contiguous_format), out.new_empty(
        out.shape[1], dtype=torch.float32
    )


_activation_backward = opaque("diffnet::activation_backward", _activation_backward_kernel, _activation_backward_fake)


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, third, weight, _, _, relu, dropout, _ = inputs
    ctx.save_for_backward(first, second, third, weight, output if relu else None)
    ctx.relu, ctx.dropout = relu, dropout


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, weight, out = ctx.saved_tensors
    present = _present(*inputs)
    need_inputs = ctx.needs_input_grad[: len(present)]
    need_weight, need_bias, need_residual = ctx.needs_input_grad[3:6]
    residual_grad = grad if need_residual else None
    grad = grad.to(present[0].dtype)
    bias_grad: Tensor | None = None
    if ctx.relu:
        grad, bias_grad = _activation_backward(grad, out, ctx.dropout)
    elif need_bias:
        bias_grad = grad.sum(0, dtype=torch.float32)
    input_grads: list[Tensor | None] = [None] * MOST_INPUTS
    if any(need_inputs):
        # One product for all, so that dy is read once; each input takes its columns.
        side_by_side = grad @ weight.to(grad.dtype)
        input_grads[: len(present)] = side_by_side.split(present[0].shape[1], dim=1)
    weight_grad = torch.cat([grad.mT @ x for x in present], dim=1) if need_weight else None
    return (*input_grads, weight_grad, bias_grad if need_bias else None, residual_grad, None, None, None)


_linear = differentiable("diffnet::linear", _linear_kernel, _linear_fake, _setup, _backward)
