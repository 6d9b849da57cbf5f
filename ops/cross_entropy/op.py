"""The loss of a classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_finite, check_index, check_tensor, readable
from diffnet.ops.common.dispatch import derivatives, differentiable, empty_like, opaque, save_settings
from diffnet.ops.common.precision import sum_dtype


def cross_entropy(
    logits: Tensor, labels: Tensor, ignored: int = -1, backend: Backend = "auto", *, weights: Tensor | None = None
) -> Tensor:
    """Compute −log softmax(z)[label] of each row, times the weight of its class.

    The kernel reads the logits once for the losses and once for their gradients, and keeps nothing in between. It
    takes a gradient for each row, so weights need no kernel of their own.

    Args:
        logits: (N, C) floating point
        labels: (N,) int64 or int32 from 0 to C − 1
        ignored: a label whose rows have loss 0 and no gradient
        backend: see `ops.common.backend.use_kernels`
        weights: (C,) floating point, the weight of each class, finite and at least 0, which gets no gradient. None
            means 1 for all.

    Returns:
        (N,) in float32, or in float64 for float64 logits

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes or devices. For a weight that is negative, NaN or infinite on the CPU or with
            DIFFNET_DEBUG=1; on a GPU, check weights before you copy them there.
        IndexError: for a label out of range, on the CPU or with DIFFNET_DEBUG=1. On a GPU its loss and its gradients
            are NaN otherwise, because a check would wait for the GPU.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -1]))
    tensor([1.3863, 0.0000])
    """
    check_classes(logits, labels, ignored, weights)
    if use_kernels(backend, logits):
        losses: Tensor = _operator(logits, labels, ignored)
    else:
        losses = _plain(logits, labels, ignored)
    return losses if weights is None else losses * row_weights(weights, labels).to(losses.dtype)


def row_weights(weights: Tensor, labels: Tensor) -> Tensor:
    """The weight (N,) of each row's class. A label out of range gets that of the nearest class, and no gradient."""
    if not len(weights):  # every row is ignored or NaN
        return weights.new_ones(len(labels))
    return weights.detach()[labels.long().clamp(0, len(weights) - 1)]


def counted_weight(labels: Tensor, ignored: int, weights: Tensor | None) -> Tensor:
    """The sum () of the weights of the rows that count."""
    counted = labels != ignored
    return (counted if weights is None else torch.where(counted, row_weights(weights, labels), 0)).sum()


def total_weight(labels: Tensor, ignored: int, weights: Tensor | None = None) -> Tensor:
    """`counted_weight`, by which a mean divides. 1 if it is 0, so that means are 0."""
    total = counted_weight(labels, ignored, weights)
    return torch.where(total > 0, total, 1)


def check_classes(logits: Tensor, labels: Tensor, ignored: int, weights: Tensor | None) -> None:
    """Check the arguments of a loss of classes. It raises what `cross_entropy` says, and never waits for a GPU."""
    check_tensor("logits", logits, ("N", "C"))
    check_index("labels", labels, logits.shape[:1], logits.device)
    if weights is not None:
        check_tensor("weights", weights, logits.shape[1:], logits.device)
        check_finite("weights", weights, least=0)
    if not readable(labels):
        return
    classes = logits.shape[1]
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if wrong.any():
        raise IndexError(f"labels should be from 0 to {classes - 1}, or {ignored}, got {labels[wrong][0].item()}")


def _plain(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The loss of each row in plain PyTorch. On a GPU, a label out of range gives NaN and no device error."""
    precise = logits.to(sum_dtype(logits))
    labels = labels.long()
    if logits.device.type == "cpu":
        return F.cross_entropy(precise, labels, ignore_index=ignored, reduction="none")
    if logits.shape[1] == 0:  # PyTorch would stop the GPU
        return precise.sum(1) + torch.where(labels == ignored, 0.0, float("nan"))
    is_label = ((labels >= 0) & (labels < logits.shape[1])) | (labels == ignored)
    losses = F.cross_entropy(precise, torch.where(is_label, labels, 0), ignore_index=ignored, reduction="none")
    # A product also makes the gradient NaN.
    return losses * torch.where(is_label, 1.0, float("nan"))


def _forward(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    from diffnet.ops.cross_entropy.kernels import cross_entropy

    return cross_entropy(logits, labels, ignored)


def _fake(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _gradients(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    from diffnet.ops.cross_entropy.kernels import cross_entropy_backward

    return cross_entropy_backward(grad, logits, labels, ignored)


def _plain_gradients(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor | None:
    return derivatives(lambda x: _plain(x, labels, ignored), [logits], grad)[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients_operator(grad, *ctx.saved_tensors, *ctx.settings), None, None


_gradients_operator = opaque("diffnet::cross_entropy_backward", _gradients, empty_like(1), _plain_gradients)
_operator = differentiable("diffnet::cross_entropy", _forward, _fake, save_settings, _backward)
