"""Tokens of whole meshes and modulation by conditions, as one node of autograd on kernels.

With areas m, weights w = softmax(S x + s) of N tokens at each vertex, and conditions c of each mesh:

    gather      z_n = Σ_v m_v w_vn x_v / Σ_v m_v w_vn
    exchange    y = softmax(Q Kᵀ / √C) V, where Q, K and V are linear in z
    give back   x'_v = x_v + Σ_n w_vn A y_n
    modulate    (1 + γ) ∘ x' + β with [γ, β] = W c + b

Shapes: V packed vertices, B meshes, N tokens, C channels, P conditions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import applied, differentiable_once, is_traced
from diffnet.ops.common.precision import compute_dtype, in_dtype, without_autocast
from diffnet.ops.global_tokens.parameters import Parameters


def tokens_and_modulation(
    x: Tensor, mass: Tensor, ptr: Tensor, parameters: Parameters, conditions: Tensor | None, backend: Backend
) -> Tensor | None:
    """Compute the layers that have parameters on kernels: x (V, C), conditions (B, P) of the modulation → (V, C).

    As one node, they have few launches and can be differentiated once. Returns None where the layers have to be
    computed as operations: under torch.compile, in plain PyTorch, for areas that have a gradient, for mixed dtypes, and
    for sizes that the kernels don't take.
    """
    if not _is_one_node(x, mass, parameters, backend):
        return None
    node: Tensor = _one_node(x, mass, ptr, conditions, *parameters)
    return node


def _is_one_node(x: Tensor, mass: Tensor, parameters: Parameters, backend: Backend) -> bool:
    tensors = [p for p in parameters if p is not None]
    if mass.requires_grad or is_traced((x, mass, *tensors)) or not use_kernels(backend, x, *tensors, matrix=True):
        return False
    from diffnet.ops.global_tokens.kernels import fits

    return x.dtype == compute_dtype(x, *tensors) and fits(x, parameters.tokens)


class _Node(torch.autograd.Function):
    """Both layers on kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, ptr: Tensor, conditions: Tensor | None, *parameters: Any) -> Tensor:
        from diffnet.ops.global_tokens.kernels import forward

        tensors: list[Any] = [x, mass, ptr, conditions, *parameters]
        tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        (x, mass, ptr, conditions), layers = tensors[:4], Parameters(*tensors[4:])
        out, results = forward(x, mass, ptr, conditions, layers)
        ctx.save_for_backward(*tensors, *results)
        return out

    @staticmethod
    @differentiable_once("tokens and conditions")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from diffnet.ops.global_tokens.kernels import Results, backward

        (x, mass, ptr, conditions, *saved) = ctx.saved_tensors
        parameters, results = Parameters(*saved[:7]), Results(*saved[7:])
        grad = in_dtype(grad, x.dtype).contiguous()
        x_grad, coefficients, grads = backward(grad, x, mass, ptr, parameters, results)
        of_conditions = None
        if parameters.modulation is not None:
            with without_autocast(x):
                grads[5:] = coefficients.mT @ conditions.float(), coefficients.sum(0)
                if ctx.needs_input_grad[3]:
                    of_conditions = in_dtype(coefficients @ parameters.modulation.float(), conditions.dtype)
        pairs = zip(parameters, grads, strict=True)
        return x_grad, None, None, of_conditions, *(None if p is None else in_dtype(g, p.dtype) for p, g in pairs)


_one_node = applied(_Node)
