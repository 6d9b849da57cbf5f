"""A multilayer perceptron on several inputs that are concatenated channel by channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, use_cpu_form, use_kernels
from diffnet.ops.common.checks import check_dropout, check_tensor
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.common.limits import check_matrix
from diffnet.ops.common.precision import compute_dtype, dot_precision, empty_operand, in_dtype, part_count
from diffnet.ops.mlp import cpu

MAX_INPUTS = 3  # that the kernel of the first layer reads without concatenation


class Shared(NamedTuple):
    """What a few launches have computed for all layers and blocks of a network, see `diffnet.shared_launches`.

    matrices: the weights as `matmul.operands` converts them, or empty to convert them
    seeds: of dropout in the hidden layers (n − 1, 2) int64, or None to draw them
    clamped: whether negative times have been set to 0
    """

    matrices: Sequence[Tensor] = ()
    seeds: Tensor | None = None
    clamped: bool = False


NOTHING = Shared()


def mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute residual + Wₙ a(… W₂ a(W₁ [x₁ … xₘ] + b₁) + b₂ …) + bₙ with a = dropout ∘ ReLU.

    One weight gives a linear layer. It is differentiable in all tensors. For the backward, the kernels keep the hidden
    layers and no masks: a unit that is 0 was dropped or cut off by ReLU.

    Args:
        inputs: (V, C₁), (V, C₂), … floating point
        weights: (H₁, Σ Cᵢ), (H₂, H₁), … floating point
        biases: (H₁,), (H₂,), … floating point, or None
        dropout: the probability that a hidden unit is set to 0, at least 0 and below 1. Random numbers come from
            PyTorch's generators. The kernels draw a seed from these. Kernels and the CPU path round the probability to
            a multiple of 2⁻¹⁶.
        residual: (V, Hₙ) floating point, or None
        backend: see `ops.common.backend.use_kernels`

    Returns:
        (V, Hₙ) in the promoted dtype of inputs and weights, or in autocast's dtype. In plain PyTorch under autocast, a
        residual promotes it.

    Raises:
        TypeError: for tensors that are not floating point, for a tensor in place of a list of tensors, and for a bool
            as dropout.
        ValueError: for other shapes or devices, a dropout out of range, no inputs, no weights, or another number of
            biases than of weights.

    >>> x = torch.tensor([[1.0, -2.0]])
    >>> mlp([x], [torch.eye(2), torch.ones(1, 2)], [torch.zeros(2), torch.ones(1)])
    tensor([[2.]])
    """
    return mlp_with(inputs, weights, biases, dropout, residual, backend)


def mlp_with(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    backend: Backend = "auto",
    shared: Shared = NOTHING,
) -> Tensor:
    """Compute `mlp`. Kernels take the converted weights and the seeds of dropout that are shared."""
    check_mlp(inputs, weights, biases, dropout, residual)
    if not use_kernels(backend, *inputs, *weights, matrix=True):
        rest = [] if residual is None else [residual]
        on_cpu = use_cpu_form(backend, *inputs, *weights, *(biases or []), *rest)
        function = cpu.mlp if on_cpu else definition.mlp
        return function(inputs, weights, biases, dropout=dropout, residual=residual)
    dtype = compute_dtype(*inputs, *weights)
    alike = len(inputs) <= MAX_INPUTS and len({x.shape[-1] for x in inputs}) == 1
    parts = [in_dtype(x, dtype) for x in (inputs if alike else [torch.cat(list(inputs), dim=-1)])]
    hidden = len(weights) - 1
    seeds = drawn_seeds(shared.seeds, hidden, dropout, parts[0].device)
    skip = residual is inputs[0] and alike
    added = None if skip or residual is None else in_dtype(residual, dtype)
    tensors = [*parts, *weights, *(biases or []), *([] if added is None else [added])]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    lists = parts, list(weights), list(shared.matrices), list(biases or [])
    return _operator(*lists, added, skip, dropout, seeds, keep)[0]


def new_seeds(layers: int, device: torch.device) -> Tensor:
    """Draw the seeds of dropout in hidden layers, (layers, 2)."""
    return torch.randint(2**31, (layers, 2), device=device)


def drawn_seeds(seeds: Tensor | None, layers: int, dropout: float, device: torch.device) -> Tensor | None:
    """Return the seeds of dropout in hidden layers, which are drawn if they are not given. None for no dropout."""
    if dropout == 0 or layers == 0:
        return None
    return new_seeds(layers, device) if seeds is None or len(seeds) != layers else seeds


def check_mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    dropout: float,
    residual: Tensor | None,
) -> None:
    check_dropout(dropout)
    for name, tensors in (("inputs", inputs), ("weights", weights), ("biases", biases)):
        if isinstance(tensors, Tensor):
            raise TypeError(f"{name} should be a list of tensors, got a tensor; write [{name}]")
    if not weights or (biases is not None and len(biases) != len(weights)):
        bias_count = "none" if biases is None else len(biases)
        raise ValueError(f"weights should be one or more, biases as many or none, got {len(weights)} and {bias_count}")
    if len(inputs) == 0:
        raise ValueError("inputs should be one tensor or more, got none")
    check_tensor("inputs[0]", inputs[0], ("V", "C"))
    (rows, width), device = inputs[0].shape, inputs[0].device
    for i, x in enumerate(inputs[1:], 1):
        check_tensor(f"inputs[{i}]", x, (rows, "C"), device)
        width += x.shape[1]
    for i, weight in enumerate(weights):
        check_tensor(f"weights[{i}]", weight, ("H", width), device)
        width = weight.shape[0]
        if biases is not None:
            check_tensor(f"biases[{i}]", biases[i], (width,), device)
    if residual is not None:
        check_tensor("residual", residual, (rows, width), device)


def mlp_forward(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    skip: bool,
    dropout: float,
    seeds: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """The output and, if `keep`, what `kept_layers` counts, and the converted weights, see `_converts`.

    matrices: the converted weights, or empty to convert them. If they are given, they are not returned.
    skip: the first input is the residual
    seeds: (n − 1, 2) with dropout, else None
    """
    from diffnet.ops.common.matmul import operands
    from diffnet.ops.mlp.kernels import forward

    x = inputs[0]
    for weight in weights:  # before they are copied
        check_matrix("mlp", *weight.shape)
    used = matrices or operands(weights, x.dtype, dot_precision(x))
    outs = forward(inputs, used, biases, x if skip else residual, dropout, seeds, keep)
    if keep and not matrices and _converts(x, weights):  # an operator returns none of its arguments
        outs += [matrix.clone() if matrix is weight else matrix for matrix, weight in zip(used, weights, strict=True)]
    return outs


def kept_layers(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    """How many tensors the forward keeps: each hidden layer, and the signs of the kernels for Hopper."""
    from diffnet.ops.mlp.kernels import fits_hopper

    return len(weights) - 1 + fits_hopper(inputs, weights)


def _converts(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels multiply with weights in another form. The backward gets these, and converts nothing."""
    return part_count(dot_precision(x)) > 1 or any(weight.dtype != x.dtype for weight in weights)


def _fake(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], matrices: Sequence[Tensor], *arguments: Any
) -> list[Tensor]:
    x, *_, keep = inputs[0], *arguments
    outs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    if not keep:
        return outs[-1:]
    converted = [empty_operand(x, w.shape, x.dtype, dot_precision(x)) for w in weights]
    signs = [x.new_empty(x.shape[0], 8, dtype=torch.int32)] * (kept_layers(inputs, weights) - len(weights) + 1)
    return [outs[-1], *outs[:-1], *signs, *(converted if not matrices and _converts(x, weights) else [])]


def _gradients(
    grad: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    skip: bool,
    dropout: float,
    need_inputs: bool,
) -> list[Tensor]:
    """The gradients of the inputs (n, V, C), empty if not needed, then of weights, then of biases in float32

    weights: as `matmul.operands` returns them
    """
    from diffnet.ops.mlp.kernels import backward
    from diffnet.ops.mlp.weight_gradient_kernels import weight_gradients

    input_grads, grads = backward(grad, inputs, weights, hidden, skip, dropout, need_inputs)
    weight_grads, bias_grads, *_ = weight_gradients(inputs, hidden[: len(weights) - 1], grads)
    return [input_grads, *weight_grads, *bias_grads]


def _gradients_fake(grad: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    *_, need_inputs = arguments
    rows, c = inputs[0].shape
    input_grads = grad.new_empty(len(inputs), rows if need_inputs else 0, c)
    weight_grads = [w.new_empty(w.shape[-2:], dtype=torch.float32) for w in weights]
    return [input_grads, *weight_grads, *(w.new_empty(w.shape[-2], dtype=torch.float32) for w in weights)]


_gradients_operator = opaque("diffnet::mlp_backward", _gradients, _gradients_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    parts, weights, shared, biases, residual, ctx.skip, ctx.dropout, _, _ = inputs
    kept = kept_layers(parts, weights) + 1
    hidden, matrices = output[1:kept], output[kept:] or shared or [w.contiguous() for w in weights]
    ctx.save_for_backward(*parts, *matrices, *hidden)
    ctx.counts = len(parts), len(weights), len(shared)
    ctx.weight_dtypes = [weight.dtype for weight in weights]
    ctx.need_inputs = any(x.requires_grad for x in parts)
    ctx.bias_dtypes = [bias.dtype for bias in biases]
    ctx.residual = residual is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    grad = grads[0]
    parts, layers, shared = ctx.counts
    saved = ctx.saved_tensors  # each access unpacks all of them, and a checkpoint allows one
    inputs, weights, hidden = saved[:parts], saved[parts : parts + layers], saved[parts + layers :]
    assert grad is not None  # callers get the first output only
    input_grads, *sums = _gradients_operator(
        in_dtype(grad, inputs[0].dtype), inputs, weights, hidden, ctx.skip, ctx.dropout, ctx.need_inputs
    )
    weight_grads = [in_dtype(g, dtype) for g, dtype in zip(sums[:layers], ctx.weight_dtypes, strict=True)]
    bias_grads = [in_dtype(g, dtype) for g, dtype in zip(sums[layers:], ctx.bias_dtypes, strict=False)]
    by_input = list(input_grads.unbind()) if ctx.need_inputs else [None] * parts
    residual_grad = grad if ctx.residual else None
    return by_input, weight_grads, [None] * shared, bias_grads, residual_grad, None, None, None, None


_operator = differentiable("diffnet::mlp", mlp_forward, _fake, _save, _backward, tensor_lists=True)
