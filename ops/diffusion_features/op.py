"""A block in the eigenbasis: the definition, one node of autograd on kernels, or its two halves one after the other.

The first half is learned diffusion with the gradient features of its result, the second half the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, use_cpu_form, use_definition, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor, nonnegative
from diffnet.ops.common.dispatch import applied, differentiable_once, is_traced, without_base
from diffnet.ops.common.precision import allows_tf32, compute_dtype, in_dtype, without_autocast
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features import cpu
from diffnet.ops.gradient_features.op import check_matrices, gradient_features, values_and_gradient_features
from diffnet.ops.mlp.op import NOTHING, Shared, check_mlp, drawn_seeds, kept_layers, mlp_forward, mlp_with
from diffnet.ops.sparse.op import spmm
from diffnet.ops.spectral.op import decay, from_spectral, to_spectral


def diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
    *,
    swapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `to_spectral`, `diffuse` and `values_and_gradient_features` one after the other.

    It is differentiable in all floating-point arguments.

    Args:
        x: (V, C) floating point
        mass, evals, evecs, gradient_evecs: (V,), (B, K), (V, K) and (2, V, K) floating point, the operators
        time: (C,) floating point, in squared units of the positions, refused as in `diffuse`
        a_re, a_im, swapped: see `gradient_features`
        ptr, lengths, backend: see `to_spectral`

    Returns x, and the diffused function and its gradient features, (V, C) each. The latter two have the promoted dtype
    of x and evecs, or autocast's dtype. Errors are those of `to_spectral`.
    """
    arguments = BlockArguments(
        mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr, lengths=lengths, swapped=swapped
    )
    checked = check_arguments(x, arguments)
    return diffused_with_features(x, checked._replace(time=nonnegative("time", checked.time)), backend)


def diffusion_block(
    x: Tensor,
    o: BlockArguments,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dropout: float,
    backend: Backend,
    shared: Shared = NOTHING,
) -> Tensor:
    """Compute x + MLP([x, x_d, f]) for the diffused x and its gradient features, see `definition.block`.

    As one node, it has fewer launches and less Python than `diffused_with_features` and `mlp` one after the other, and
    can be differentiated once.

    Raises TypeError and ValueError as these operations do.
    """
    o, plain = check_arguments(x, o), use_definition(backend)
    if not (plain or _is_one_node(backend, x, o, weights)):
        inputs = diffused_with_features(x, o, backend)
        return mlp_with(inputs, weights, biases, dropout, inputs[0], backend, shared)
    check_mlp([x] * 3, weights, biases, dropout, x)
    if plain:
        return definition.block(x, o, weights, biases, dropout)
    seeds = drawn_seeds(shared.seeds, len(weights) - 1, dropout, x.device)
    tensors = x, *o.tensors, *weights, *biases
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return one_node(keep, dropout, seeds, o.swapped, shared.matrices, *tensors)


def _is_one_node(backend: Backend, x: Tensor, o: BlockArguments, weights: Sequence[Tensor]) -> bool:
    """Whether one node computes as the two halves do.

    It doesn't under torch.compile, in plain PyTorch, with sparse gradients, for operators with a gradient, and if
    tensors have to be converted first.
    """
    operators = o.operators
    if o.pattern is not None or any(operator.requires_grad for operator in operators):
        return False
    if is_traced((x, *o.tensors, *weights)):
        return False
    if not x.dtype == o.evecs.dtype == o.gradient.dtype == compute_dtype(x, o.evecs, *weights):
        return False
    return use_kernels(backend, x, *operators, *weights, matrix=True)


def diffused_with_features(x: Tensor, o: BlockArguments, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """x, x_d and f from checked arguments, in the form that `backend` asks for. Use the returned x.

    On a CPU, the gradients of both uses of x are then summed in one pass.
    """
    kernels = use_kernels(backend, x, *o.operators, matrix=True)
    if use_definition(backend) or (o.pattern is None and not kernels):
        return x, *definition.diffusion_and_gradient_features(x, o)
    if _fast_on_cpu(backend, x, o):
        return cpu.diffused_with_features(x, o._replace(evecs=in_dtype(o.evecs, compute_dtype(x, o.evecs))))
    d = decay(to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, backend), o.evals, o.time.clamp(min=0), backend)
    if o.pattern is None:
        dtype = compute_dtype(x, o.evecs)
        basis, learned = (in_dtype(o.evecs, dtype), in_dtype(o.gradient, dtype)), (o.a_re, o.a_im)
        return x, *values_and_gradient_features(d, *basis, *learned, o.ptr, o.lengths, backend, swapped=o.swapped)
    diffused = from_spectral(d, o.evecs, o.ptr, o.lengths, backend)
    with without_autocast(x):
        gradients = spmm(o.pattern, o.gradient, diffused, backend=backend)
    return x, diffused, gradient_features(gradients, o.a_re, o.a_im, backend, swapped=o.swapped)


def _fast_on_cpu(backend: Backend, x: Tensor, o: BlockArguments) -> bool:
    """Whether `cpu` computes this: sparse gradients in float32, perhaps under autocast to bfloat16."""
    if o.pattern is None or o.pattern.row_order is not None or o.a_im is None or o.swapped:
        return False
    if any(operator.requires_grad for operator in o.operators):
        return False
    always = o.mass, o.evals, o.gradient, o.time, o.a_re, o.a_im
    if not use_cpu_form(backend, x, o.evecs, *always):
        return False
    allowed = [torch.float32, torch.bfloat16] if torch.is_autocast_enabled("cpu") else [torch.float32]
    return x.dtype in allowed and o.evecs.dtype in allowed and all(t.dtype == torch.float32 for t in always)


def check_arguments(x: Tensor, o: BlockArguments) -> BlockArguments:
    """Check the arguments of `diffusion_and_gradient_features`, and return them with contiguous ptr."""
    check_tensor("x", x, ("V", "C"))
    (rows, channels), device = x.shape, x.device
    check_tensor("evecs", o.evecs, (rows, "K"), device)
    k = o.evecs.shape[1]
    check_tensor("mass", o.mass, (rows,), device)
    if o.pattern is None:
        check_tensor("gradient_evecs", o.gradient, (2, rows, k), device)
    else:
        check_tensor("gradient", o.gradient, (2, o.pattern.nnz), device)
    ptr = check_ptr(o.ptr, rows, o.lengths, device)
    check_tensor("evals", o.evals, (ptr.shape[0] - 1, k), device)
    check_tensor("time", o.time, (channels,), device)
    check_matrices(o.a_re, o.a_im, channels, device, o.swapped)
    return o._replace(ptr=ptr)


class _Block(torch.autograd.Function):
    """The forward and the backward of a block on kernels, see docs/kernels.md."""

    @staticmethod
    def forward(
        ctx: Any,
        keep: bool,
        dropout: float,
        seeds: Tensor | None,
        swapped: bool,
        operands: Sequence[Tensor],
        x: Tensor,
        *tensors: Any,
    ) -> Tensor:
        from diffnet.ops.gradient_features.coefficient_kernels import table
        from diffnet.ops.gradient_features.kernels import forward
        from diffnet.ops.spectral.kernels import project_spans, sum_and_diffuse

        (mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr), parameters = tensors[:8], tensors[8:]
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        spectrum, d = sum_and_diffuse(*project_spans(x, evecs, mass, ptr), ptr, evals, time)
        coefficients = table(d, a_re, a_im, gradient_evecs)
        diffused, features = forward(coefficients, evecs, gradient_evecs, ptr, swapped=swapped)
        out, *layers = mlp_forward([x, diffused, features], weights, operands, biases, None, True, dropout, seeds, keep)
        ctx.layers, ctx.dropout, ctx.swapped = len(weights), dropout, swapped
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        if keep:
            kept = kept_layers([x, diffused, features], weights)
            hidden, matrices = layers[:kept], layers[kept:] or operands or weights
            matrices = [matrix.contiguous() for matrix in matrices]
            bias = biases[-2] if hidden else None
            computed: list[Tensor | None] = [diffused, *hidden]  # None if the backward computes it again
            if x.dtype == torch.float32 and not allows_tf32():  # a step takes 5 % more time and a fifth less memory
                computed[0] = None
                if len(hidden) > 1:
                    computed[-1] = None
            ctx.save_for_backward(
                x, features, *matrices, *computed, bias, seeds, *tensors[:8], spectrum, d, coefficients
            )
        return without_base(out)

    @staticmethod
    @differentiable_once("a block")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from diffnet.ops.gradient_features.coefficient_kernels import backward as coefficients_backward
        from diffnet.ops.gradient_features.kernels import backward
        from diffnet.ops.mlp.kernels import backward as mlp_backward
        from diffnet.ops.mlp.linear_kernels import linear
        from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients
        from diffnet.ops.spectral.kernels import evaluate

        saved, layers = ctx.saved_tensors, ctx.layers
        (x, features), matrices = saved[:2], saved[2 : 2 + layers]
        diffused, *hidden = saved[2 + layers : -13]  # behind the signs for Hopper are 13 others
        bias, seeds, *rest = saved[-13:]
        (mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr), (spectrum, d, table) = rest[:8], rest[8:]
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
            inputs, hidden[: layers - 1], layer_grads, leave_sum=True, projection=projection
        )
        # The rest doesn't read the MLP's tensors. Unless the graph is kept, this memory serves the other gradients.
        del saved, x, diffused, features, inputs, matrices, hidden, layer_grads
        ctx.maybe_clear_saved_tensors()
        sums = backward(
            features_grad,
            table,
            gradient_evecs,
            ptr,
            swapped=ctx.swapped,
            values_grad=diffused_grad,
            evecs=evecs,
            projected=projected,
            unsummed=unsummed,
        )
        spectrum_grad, re_grad, im_grad, time_grad = coefficients_backward(sums, d, a_re, a_im, (spectrum, evals, time))
        x_grad = evaluate(spectrum_grad, evecs, mass, ptr, added=x_grad)
        im_grad = None if im_grad is None or a_im is None else in_dtype(im_grad, a_im.dtype)
        of_features = in_dtype(time_grad, time.dtype), in_dtype(re_grad, a_re.dtype), im_grad
        of_layers = zip((*weight_grads, *bias_grads), ctx.dtypes, strict=True)
        parameter_grads = [in_dtype(g, dtype) for g, dtype in of_layers]
        return None, None, None, None, None, x_grad, None, None, None, None, *of_features, None, *parameter_grads


one_node = applied(_Block)
