"""Tokens of whole meshes and modulation by conditions, as one node of autograd on kernels.

With areas m, weights w = softmax(S x + s) of N tokens at each vertex, and conditions c of each mesh:

    gather      z_n = Σ_v m_v w_vn x_v / Σ_v m_v w_vn
    exchange    y = softmax(Q Kᵀ / √C) V, where Q, K and V are linear in z
    give back   x'_v = x_v + Σ_n w_vn A y_n
    modulate    (1 + γ) ∘ x' + β with the coefficients [γ, β] of each mesh

Shapes: V packed vertices, B meshes, N tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import applied, differentiable_once, is_traced
from diffnet.ops.common.precision import compute_dtype, in_dtype
from diffnet.ops.global_tokens.parameters import Parameters, tokens_in


def tokens_and_modulation(
    x: Tensor, mass: Tensor, ptr: Tensor, parameters: Parameters | None, coefficients: Tensor | None, backend: Backend
) -> Tensor | None:
    """Compute the layers that there are on kernels: x (V, C), coefficients (B, 2C) → (V, C).

    As one node, they have few launches and can be differentiated once. Returns None where the layers have to be
    computed as operations: under torch.compile, in plain PyTorch, for areas that have a gradient, for mixed dtypes, and
    for sizes that the kernels don't take.
    """
    tensors = [*(parameters or ()), *([] if coefficients is None else [coefficients])]
    if mass.requires_grad or is_traced((x, mass, *tensors)) or not use_kernels(backend, x, *tensors, matrix=True):
        return None
    from diffnet.ops.global_tokens.kernels import fits

    if x.dtype != compute_dtype(x, *tensors) or not fits(x, tokens_in(parameters)):
        return None
    node: Tensor = _one_node(x, mass, ptr, coefficients, *(parameters or ()))
    return node


class _Node(torch.autograd.Function):
    """Both layers on kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, ptr: Tensor, coefficients: Tensor | None, *tokens: Tensor) -> Tensor:
        from diffnet.ops.global_tokens.kernels import forward

        x, mass, ptr, *parameters = [tensor.contiguous() for tensor in (x, mass, ptr, *tokens)]
        coefficients = None if coefficients is None else coefficients.contiguous()
        out, results = forward(x, mass, ptr, coefficients, Parameters(*parameters) if parameters else None)
        ctx.save_for_backward(x, mass, ptr, coefficients, *parameters, *results)
        return out

    @staticmethod
    @differentiable_once("tokens and conditions")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from diffnet.ops.global_tokens.kernels import backward

        (x, mass, ptr, coefficients, *saved) = ctx.saved_tensors
        tokens = Parameters(*saved[:5]) if saved else None
        grad = in_dtype(grad, x.dtype).contiguous()
        x_grad, of_coefficients, grads = backward(grad, x, mass, ptr, coefficients, tokens, saved[5:])
        of_tokens = (in_dtype(g, p.dtype) for g, p in zip(grads, tokens or (), strict=True))
        first = None if coefficients is None else in_dtype(of_coefficients, coefficients.dtype)
        return x_grad, None, None, first, *of_tokens


_one_node = applied(_Node)
