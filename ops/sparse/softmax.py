"""Softmax over the entries of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.sparse import reference
from diffnet.ops.sparse.pattern import CsrArrays, Pattern, csr_arrays


def sparse_softmax(
    pattern: Pattern,
    scores: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax of scale · scores over the entries of each row, as attention needs it.

    scores (…, nnz); mask (…, nnz) bool, or one that broadcasts to it: entries where it is False take no part and get 0
    → (…, nnz). A row in which nothing takes part is 0. Low precision is computed in float32. Differentiable in scores.

    Raises ValueError where the shapes don't fit.
    """
    if scores.ndim == 0 or scores.shape[-1] != pattern.nnz:
        raise ValueError(f"scores should have shape (…, {pattern.nnz}), shape is {tuple(scores.shape)}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask should be of dtype bool, got {mask.dtype}")
        shape = (1, pattern.nnz) if math.prod(mask.shape[:-1]) == 1 else scores.shape
        mask = mask.expand(shape).reshape(math.prod(shape[:-1]), pattern.nnz)
    flat = scores.reshape(math.prod(scores.shape[:-1]), pattern.nnz)
    triton = use_kernels(backend, flat)
    out: Tensor = _softmax(list(csr_arrays(pattern, triton)), flat, mask, scale, triton)
    return out.reshape(scores.shape)


def _softmax_kernel(
    structure: Sequence[Tensor], scores: Tensor, mask: Tensor | None, scale: float, triton: bool
) -> Tensor:
    csr = CsrArrays(*structure)
    if triton:
        from diffnet.ops.sparse import kernels

        return kernels.softmax(csr, scores, mask, scale)
    return reference.softmax(csr, scores, mask, scale)


def _softmax_fake(
    structure: Sequence[Tensor], scores: Tensor, mask: Tensor | None, scale: float, triton: bool
) -> Tensor:
    return scores.new_empty(scores.shape)


def _softmax_backward_kernel(
    structure: Sequence[Tensor], out: Tensor, grad: Tensor, scale: float, triton: bool
) -> Tensor:
    csr = CsrArrays(*structure)
    if triton:
        from diffnet.ops.sparse import kernels

        return kernels.softmax_backward(csr, out, grad, scale)
    return reference.softmax_backward(csr, out, grad, scale)


def _softmax_backward_fake(
    structure: Sequence[Tensor], out: Tensor, grad: Tensor, scale: float, triton: bool
) -> Tensor:
    return out.new_empty(out.shape)


_softmax_backward = opaque("diffnet::sparse_softmax_backward", _softmax_backward_kernel, _softmax_backward_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, _, _, ctx.scale, ctx.triton = inputs
    ctx.save_for_backward(*structure, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, out = ctx.saved_tensors
    grad_scores = _softmax_backward(structure, out, grad.to(out.dtype), ctx.scale, ctx.triton)
    return [None] * len(structure), grad_scores, None, None, None


_softmax = differentiable("diffnet::sparse_softmax", _softmax_kernel, _softmax_fake, _save, _backward)
