"""The loss of a classification."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int = -1, backend: Backend = "auto") -> Tensor:
    """−log softmax(z)[label] of each row, in float32 at least; 0, without a gradient, where the label is `ignored`.

    logits (N, C) of any float dtype, labels (N,) int64 from 0 to C − 1 → (N,)

    Any other label is an error on the CPU, as with PyTorch's loss; with the kernel the loss is NaN there.
    The kernel reads logits once for the losses and once for their gradients, and keeps nothing between.
    """
    if use_kernels(backend, logits):
        out: Tensor = _cross_entropy(logits, labels, ignored)
        return out
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise), labels, ignore_index=ignored, reduction="none")


def _kernel(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    from diffnet.ops.cross_entropy.kernels import cross_entropy

    return cross_entropy(logits, labels, ignored)


def _fake(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _backward_kernel(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    from diffnet.ops.cross_entropy.kernels import cross_entropy_backward

    return cross_entropy_backward(grad, logits, labels, ignored)


def _backward_fake(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    logits, labels, ctx.ignored = inputs
    ctx.save_for_backward(logits, labels)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels = ctx.saved_tensors
    return _gradient(grad, logits, labels, ctx.ignored), None, None


_gradient = opaque("diffnet::cross_entropy_backward", _backward_kernel, _backward_fake)
_cross_entropy = differentiable("diffnet::cross_entropy", _kernel, _fake, _setup, _backward)
