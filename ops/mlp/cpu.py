"""The multilayer perceptron on a CPU: the reference with fewer passes over memory and a cheaper dropout.

Layers are computed in place for a few thousand vertices at a time, so each operation finds its input in the cache.
Inputs are never concatenated: the first weight is split instead. Of each hidden layer only the result of ReLU and
dropout is kept. A unit that is 0 was dropped or cut off, so the backward needs no mask.

Arguments are as in `ops.mlp.op`. Second derivatives, and several gradients at once, are those of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.compiler import is_batched
from diffnet.ops.common.cpu import add_product, keep_freed_memory, largest_chunk, row_chunks
from diffnet.ops.common.dispatch import derivatives
from diffnet.ops.common.precision import compute_dtype, in_dtype, promoted_dtype, without_autocast

LEVELS = 2**16  # of the probability of dropout


def mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    dropout: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + Wₙ a(… W₂ a(W₁ [x₁ … xₘ] + b₁) + b₂ …) + bₙ with a = dropout ∘ ReLU

    The probability of dropout is rounded to a multiple of 2⁻¹⁶.
    """
    keep_freed_memory()
    dtype = compute_dtype(*inputs, *weights)
    fused = residual is not None and residual.dtype == dtype
    skip = fused and residual is inputs[0]
    added = [residual] if residual is not None and fused and not skip else []
    tensors = [in_dtype(t, dtype) for t in (*inputs, *weights, *(biases or []), *added)]
    layout = _Layout(len(inputs), len(weights), biases is not None, skip, dropout)
    with without_autocast(inputs[0]):
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            out: Tensor = _MLP.apply(layout, *tensors)  # type: ignore[no-untyped-call]
        else:
            out = _forward(layout, tensors, None)
    if residual is None or fused:
        return out
    out = residual + out
    return out if residual.dtype == promoted_dtype(*inputs, *weights) else out.to(dtype)


class _Layout:
    """The order of the flat list of tensors: inputs, weights, biases and a residual."""

    def __init__(self, inputs: int, layers: int, biased: bool, skip: bool, dropout: float) -> None:
        self.inputs, self.layers, self.biased, self.dropout = inputs, layers, biased, dropout
        self.skip = skip  # whether the first input is the residual
        self.scale = LEVELS / (LEVELS - _dropped_levels(dropout))

    def parts(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None]:
        """The inputs, weights, biases (none, or one per layer) and the residual."""
        n, m = self.inputs, self.inputs + self.layers
        end = m + self.layers if self.biased else m
        inputs, rest = list(tensors[:n]), tensors[end:]
        residual = inputs[0] if self.skip else rest[0] if rest else None
        return inputs, list(tensors[n:m]), list(tensors[m:end]), residual


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: _Layout, *tensors: Tensor) -> Tensor:
        inputs, weights, _, _ = layout.parts(tensors)
        hidden = [inputs[0].new_empty(len(inputs[0]), len(weight)) for weight in weights[:-1]]
        ctx.layout = layout
        ctx.save_for_backward(*tensors, *hidden)
        return _forward(layout, tensors, hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: _Layout = ctx.layout
        saved = ctx.saved_tensors
        count = len(saved) - (layout.layers - 1)
        tensors, hidden = saved[:count], saved[count:]
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or is_batched(grad):  # in place, nothing is differentiated or batched
            return None, *derivatives(lambda *t: _plain(layout, t, hidden), tensors, grad, needed=needed)
        with without_autocast(grad):
            return None, *_backward(layout, tensors, hidden, needed, grad)


def _forward(layout: _Layout, tensors: Sequence[Tensor], hidden: Sequence[Tensor] | None) -> Tensor:
    """The output. Hidden layers are written to `hidden`, without the factor 1/(1 − p) of dropout."""
    inputs, weights, biases, residual = layout.parts(tensors)
    rows = len(inputs[0])
    first = list(torch.split(weights[0].mT, [x.shape[1] for x in inputs]))
    out = inputs[0].new_empty(rows, len(weights[-1]))
    scratch = [] if hidden else [out.new_empty(largest_chunk(rows), len(weight)) for weight in weights[:-1]]
    for chunk in row_chunks(rows):
        x, matrices, scale = [each[chunk] for each in inputs], first, 1.0
        for i in range(layout.layers):
            last = i == layout.layers - 1
            y = out[chunk] if last else hidden[i][chunk] if hidden else scratch[i][: chunk.stop - chunk.start]
            bias = biases[i] if biases else None
            _linear(x, matrices, bias, residual[chunk] if last and residual is not None else None, scale, y)
            if not last:
                _activate(y, layout.dropout)
                x, matrices, scale = [y], [weights[i + 1].mT], layout.scale
    return out


def _linear(
    inputs: Sequence[Tensor],
    matrices: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    """Write residual + bias + scale · Σ xᵢ Wᵢ to `out`."""
    (x, *more), (matrix, *matrices) = inputs, matrices
    added = bias if residual is None else residual
    if added is None:
        torch.addmm(out, x, matrix, beta=0, alpha=scale, out=out)
    elif bias is None or residual is None:
        torch.addmm(added, x, matrix, alpha=scale, out=out)
    else:
        torch.add(residual, bias, out=out).addmm_(x, matrix, alpha=scale)
    for x, matrix in zip(more, matrices, strict=True):
        out.addmm_(x, matrix, alpha=scale)


def _activate(x: Tensor, dropout: float) -> None:
    """ReLU, and zeros at random, in place.

    PyTorch's dropout draws a number for each unit. Here, a draw of 64 bits serves 4 units, or 8 if the probability is a
    multiple of 2⁻⁸.
    """
    F.relu_(x)
    if dropout > 0:
        dropped, dtype = _dropped_levels(dropout), torch.int16
        if dropped % 256 == 0:
            dropped, dtype = dropped // 256, torch.int8
        size = torch.iinfo(dtype).bits // 8
        draws = torch.empty(-(-x.numel() * size // 8), dtype=torch.int64).random_(-(2**63), None)
        numbers = draws.view(dtype)[: x.numel()].view(x.shape)
        x.mul_(torch.ge(numbers, dropped + torch.iinfo(dtype).min, out=torch.empty_like(x)))


def _dropped_levels(dropout: float) -> int:
    return min(round(dropout * LEVELS), LEVELS - 1)


def _backward(
    layout: _Layout, tensors: Sequence[Tensor], hidden: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    inputs, weights, biases, _ = layout.parts(tensors)
    need_inputs, need_weights, need_biases, _ = layout.parts(needed)  # type: ignore[arg-type]
    sum_dtype = torch.promote_types(grad.dtype, torch.float32)
    input_grads = [torch.empty_like(x) if need else None for x, need in zip(inputs, need_inputs, strict=True)]
    weight_grads, bias_grads = (
        [t.new_zeros(t.shape, dtype=sum_dtype) if need else None for t, need in zip(tensors, needs, strict=True)]
        for tensors, needs in ((weights, need_weights), (biases, need_biases))
    )
    widths = [x.shape[1] for x in inputs]
    first = torch.split(weights[0], widths, dim=1)
    scratch = [h.new_empty(largest_chunk(len(h)), h.shape[1]) for h in hidden]
    for chunk in row_chunks(len(grad)):
        g = grad[chunk]
        for i in range(layout.layers - 1, -1, -1):
            if bias_grads and (bias_grad := bias_grads[i]) is not None:
                bias_grad.add_(g.sum(0))
            if (weight_grad := weight_grads[i]) is not None:
                if i == 0:
                    for part, x in zip(torch.split(weight_grad, widths, dim=1), inputs, strict=True):
                        add_product(part, g.mT, x[chunk])
                else:
                    add_product(weight_grad, g.mT, hidden[i - 1][chunk], layout.scale)
            if i > 0:
                below, h = scratch[i - 1][: chunk.stop - chunk.start], hidden[i - 1][chunk]
                torch.addmm(below, g, weights[i], beta=0, alpha=layout.scale, out=below)
                g = torch.ops.aten.threshold_backward.grad_input(below, h, 0, grad_input=below)
        for j, (input_grad, matrix) in enumerate(zip(input_grads, first, strict=True)):
            if input_grad is None:
                continue
            if j == 0 and layout.skip:
                torch.addmm(grad[chunk], g, matrix, out=input_grad[chunk])
            else:
                torch.mm(g, matrix, out=input_grad[chunk])
    sums = [None if s is None else s.to(grad.dtype) for s in (*weight_grads, *bias_grads)]
    has_residual = len(tensors) > len(input_grads) + len(sums)
    return [*input_grads, *sums, *([grad] if has_residual else [])]


def _plain(layout: _Layout, tensors: Sequence[Tensor], hidden: Sequence[Tensor]) -> Tensor:
    """The output, with the units dropped and cut off that are 0 in `hidden`."""
    inputs, weights, biases, residual = layout.parts(tensors)
    x = torch.cat(inputs, dim=1)
    for i, weight in enumerate(weights):
        if i > 0:
            x = x * (hidden[i - 1] > 0) * layout.scale
        x = F.linear(x, weight, biases[i] if biases else None)
    return x if residual is None else residual + x
