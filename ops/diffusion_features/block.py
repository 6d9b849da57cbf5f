"""A block in the eigenbasis as one node of autograd.

It computes the same as `diffusion_and_gradient_features` and `mlp` one after the other, with fewer launches and less
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import applied, is_traced, without_base
from diffnet.ops.common.precision import allows_tf32, compute_dtype, in_dtype
from diffnet.ops.diffusion_features.op import (
    BlockArguments,
    check_arguments,
    diffusion_features_forward,
    gradients_of_sums,
)
from diffnet.ops.mlp.op import check_mlp, drawn_seeds, mlp_forward


def diffusion_block(
    x: Tensor,
    arguments: BlockArguments,
    lengths: Sequence[int] | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dropout: float,
    seeds: Tensor | None = None,
    swapped: bool = False,
    matrices: Sequence[Tensor] = (),
) -> Tensor:
    """Compute x + MLP([x, x_d, f]) for the diffused x and its gradient features. It can be differentiated once.

    Call it if `is_one_node` is true. Arguments are those of `diffusion_and_gradient_features` and `mlp`.

    seeds: of the hidden layers' dropout (n − 1, 2) int64, or None to draw them
    swapped: see `gradient_features`
    matrices: the weights as `matmul.operands` converts them, or empty to convert them

    Raises TypeError and ValueError as these operations do.
    """
    arguments = check_arguments(x, arguments, lengths, swapped)
    check_mlp([x] * 3, weights, biases, dropout, x)
    seeds = drawn_seeds(seeds, len(weights) - 1, dropout, x.device)
    tensors = x, *arguments, *weights, *biases
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    out: Tensor = _block(keep, dropout, seeds, swapped, matrices, *tensors)
    return out


def is_one_node(backend: Backend, x: Tensor, arguments: BlockArguments, weights: Sequence[Tensor]) -> bool:
    """Whether `diffusion_block` computes with these tensors as its two halves do.

    It doesn't under torch.compile and torch.func, in plain PyTorch, for operators with a gradient, and if tensors have
    to be converted first.
    """
    operators = arguments[:4]
    if is_traced((x, *arguments, *weights)) or any(operator.requires_grad for operator in operators):
        return False
    dtype = compute_dtype(x, arguments.evecs, *weights)
    if not x.dtype == arguments.evecs.dtype == arguments.gradient_evecs.dtype == dtype:
        return False
    return use_kernels(backend, x, *operators, *weights, matrix=True)


def _recomputes(x: Tensor) -> bool:
    """Whether the backward computes the diffused function and the last hidden layer again.

    It does so in exact float32. A training step then takes 5 % more time and a fifth less memory.
    """
    return x.dtype == torch.float32 and not allows_tf32()


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keep: bool,
        dropout: float,
        seeds: Tensor | None,
        swapped: bool,
        known: Sequence[Tensor],
        x: Tensor,
        *tensors: Any,
    ) -> Tensor:
        arguments = BlockArguments(*tensors[:8])
        parameters = tensors[8:]
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        diffused, features, *coefficients = diffusion_features_forward(x, *arguments, swapped)
        out, *kept = mlp_forward([x, diffused, features], weights, known, biases, None, True, dropout, seeds, keep)
        ctx.layers, ctx.dropout, ctx.swapped = len(weights), dropout, swapped
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        if keep:
            hidden, matrices = kept[: len(weights) - 1], kept[len(weights) - 1 :] or known or weights
            matrices = [matrix.contiguous() for matrix in matrices]
            bias = biases[-2] if hidden else None
            computed: list[Tensor | None] = [diffused, *hidden]  # None if the backward computes it again
            if _recomputes(x):
                computed[0] = None
                if len(hidden) > 1:
                    computed[-1] = None
            ctx.save_for_backward(x, features, *matrices, *computed, bias, seeds, *arguments, *coefficients)
        return without_base(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from diffnet.ops.gradient_features.kernels import backward
        from diffnet.ops.mlp.kernels import backward as mlp_backward
        from diffnet.ops.mlp.linear_kernels import linear
        from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients
        from diffnet.ops.spectral.kernels import evaluate

        saved, layers = ctx.saved_tensors, ctx.layers
        (x, features), matrices = saved[:2], saved[2 : 2 + layers]
        diffused, *hidden = saved[2 + layers : 2 + 2 * layers]
        bias, seeds, *rest = saved[2 + 2 * layers :]
        arguments, (spectrum, d, table) = BlockArguments(*rest[:8]), rest[8:]
        evecs, ptr, a_im = arguments.evecs, arguments.ptr, arguments.a_im
        if diffused is None:
            diffused = evaluate(d, evecs, None, ptr)
        if hidden and hidden[-1] is None:
            seed = None if seeds is None else seeds[-1]
            hidden[-1] = linear(hidden[-2:-1], matrices[-2], bias, activation=True, dropout=ctx.dropout, seed=seed)
        inputs = x, diffused, features
        grad = in_dtype(grad, evecs.dtype)
        input_grads, layer_grads = mlp_backward(grad, inputs, matrices, hidden, True, ctx.dropout, True)
        x_grad, diffused_grad, features_grad = input_grads.unbind()
        # One launch computes Φᵀ dx_d and the gradients of the weights. A later one sums their spans and others.
        projection = Projection(evecs, diffused_grad, ptr)
        weight_grads, bias_grads, unsummed, projected = weight_gradients(
            inputs, hidden, layer_grads, leave_sum=True, projection=projection
        )
        # The rest doesn't read the MLP's tensors. Unless the graph is kept, this memory serves the other gradients.
        del saved, x, diffused, features, inputs, matrices, hidden, layer_grads
        ctx.maybe_clear_saved_tensors()
        coefficient_sums = backward(
            features_grad,
            table,
            arguments.gradient_evecs,
            ptr,
            swapped=ctx.swapped,
            values_grad=diffused_grad,
            evecs=evecs,
            projected=projected,
            unsummed=unsummed,
        )
        x_grad, time_grad, re_grad, im_grad = gradients_of_sums(coefficient_sums, arguments, spectrum, d, x_grad)
        im_grad = None if im_grad is None or a_im is None else in_dtype(im_grad, a_im.dtype)
        sums = [*weight_grads, *bias_grads]
        parameter_grads = [in_dtype(g, dtype) for g, dtype in zip(sums, ctx.dtypes, strict=True)]
        of_features = in_dtype(time_grad, arguments.time.dtype), in_dtype(re_grad, arguments.a_re.dtype), im_grad
        return None, None, None, None, None, x_grad, None, None, None, None, *of_features, None, *parameter_grads


_block = applied(_Block)
