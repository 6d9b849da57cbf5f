"""Softmax over the entries of each row, and the scale and the bias of attention scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_operand
from diffnet.ops.common.dispatch import differentiable, empty_like, opaque
from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.sparse import reference
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.op import MatrixLike, pattern_and_values, pattern_of
from diffnet.ops.sparse.pattern import Pattern, csr_arrays


def sparse_softmax(
    pattern: Pattern | MatrixLike,
    scores: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the softmax of scale · scores + bias over the entries of each row, as attention does.

    Low precision is computed in float32. Differentiable in scores, bias, and scale if it is a tensor.

    The kernel multiplies by a number. A tensor as scale, or a bias, is applied by PyTorch operations before the kernel,
    which write one or two float32 tensors of the shape of the scores.

    A visible score that is NaN or +∞ makes all visible entries of its row NaN, and their gradients.

    Args:
        pattern: (rows, columns), a `Pattern`, or a matrix as in `spmm`
        scores: (…, nnz) floating point. By default the values of the matrix.
        scale: multiplies the scores: a number, or a floating-point tensor that broadcasts to the sets (…), such as
            (H,) for scores (…, H, nnz)
        bias: (…, nnz) floating point, of the shape of the scores or broadcastable to it, such as (H, 1, nnz) or (nnz,).
            −∞ leaves an entry out.
        mask: bool, of the shape of the scores or broadcastable to it. Entries with False are left out and get 0.
        backend: see `use_kernels`

    Returns:
        The shape and dtype of the scores. A row without a visible entry is 0.

    Raises:
        TypeError: if scores, bias or a tensor as scale are not floating point, if scale is no number, and for a pattern
            that is none of these.
        ValueError: if shapes or devices don't match, or if the mask isn't bool.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> sparse_softmax(pattern, torch.tensor([1.0, 1.0, 5.0]))
    tensor([0.5000, 0.5000, 1.0000])
    """
    if scores is None:
        if isinstance(pattern, Pattern):
            raise TypeError("a Pattern holds no values; write sparse_softmax(pattern, scores)")
        pattern, scores = pattern_and_values(pattern)
    pattern = pattern_of(pattern)
    device = pattern.device
    check_operand("scores", scores, (pattern.nnz,), device, floating=True)
    if mask is not None:
        mask = _flat_mask(mask, scores)
    triton = use_kernels(backend, scores)
    shape, dtype = scores.shape, scores.dtype
    if isinstance(scale, Tensor):
        check_operand("scale", scale, (), device, floating=True)
        check_broadcast("scale", scale.shape, shape[:-1])
        scale = scale[..., None]
    else:
        scale = checked_number("scale", scale)
    if bias is not None:
        check_operand("bias", bias, shape[-1:], device, floating=True)
        check_broadcast("bias", bias.shape, shape)
    if isinstance(scale, Tensor) or bias is not None:
        scores, scale = scaled_and_biased(scores, scale, bias), 1.0
    flat = scores.reshape(math.prod(shape[:-1]), pattern.nnz)
    out: Tensor
    if triton:
        out = _operator(list(csr_arrays(pattern, triton)), flat, mask, scale)
    else:
        out = reference.softmax(pattern.row_indices, pattern.shape[0], flat, mask, scale)
    return out.to(dtype).reshape(shape)


def checked_number(name: str, number: Any) -> float:
    """Return an argument that isn't a tensor if it is a real number, also of NumPy, or a bool. Raises TypeError."""
    if isinstance(number, torch.SymFloat):
        return number  # type: ignore[return-value]
    if not isinstance(number, Real):
        raise TypeError(f"{name} should be a number or a tensor, got {type(number).__name__}")
    return float(number)


def check_broadcast(name: str, dims: Sequence[int], shape: Sequence[int]) -> None:
    """Check that a tensor of the given shape broadcasts to this shape. Raises ValueError."""
    if not _broadcasts(dims, shape):
        raise ValueError(f"{name} should broadcast to {tuple(shape)}, shape is {tuple(dims)}")


def _broadcasts(dims: Sequence[int], shape: Sequence[int]) -> bool:
    pairs = zip(reversed(dims), reversed(shape), strict=False)
    return len(dims) <= len(shape) and all(n in (1, m) for n, m in pairs)


def scaled_and_biased(scores: Tensor, scale: float | Tensor, bias: Tensor | None) -> Tensor:
    """Return scale · scores + bias in float32 or wider, by PyTorch operations, which differentiate for all three."""
    dtype = sum_dtype(scores)
    scores = scores.to(dtype) * (scale.to(dtype) if isinstance(scale, Tensor) else scale)
    return scores if bias is None else scores + bias.to(dtype)


def _flat_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Return a mask for scores (…, nnz) as (S, nnz), or as (1, nnz) if all sets share it."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask should be a tensor of dtype bool, got {kind}")
    if mask.device != scores.device:
        raise ValueError(f"mask should be on {scores.device}, where the scores are; it is on {mask.device}")
    shared = math.prod(mask.shape[:-1]) == 1
    shape = scores.shape[-1:] if shared else scores.shape
    mask_shape = mask.shape[-1:] if shared else mask.shape
    if mask.ndim == 0 or not _broadcasts(mask_shape, shape):
        raise ValueError(f"mask should broadcast to {tuple(scores.shape)}, shape is {tuple(mask.shape)}")
    return mask.reshape(mask_shape).expand(shape).reshape(math.prod(shape[:-1]), scores.shape[-1])


def _forward(structure: Sequence[Tensor], scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    from diffnet.ops.sparse.softmax_kernels import softmax

    return softmax(CsrArrays(*structure), scores, mask, scale)


def _gradients(structure: Sequence[Tensor], out: Tensor, grad: Tensor, scale: float) -> Tensor:
    from diffnet.ops.sparse.softmax_kernels import softmax_backward

    return softmax_backward(CsrArrays(*structure), out, grad, scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, _, _, ctx.scale = inputs
    ctx.save_for_backward(*structure, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, out = ctx.saved_tensors
    grad_scores = _gradients_operator(structure, out, grad.to(out.dtype), ctx.scale)
    return [None] * len(structure), grad_scores, None, None


_gradients_operator = opaque("diffnet::sparse_softmax_backward", _gradients, empty_like(1), reference.softmax_gradients)
_operator = differentiable("diffnet::sparse_softmax", _forward, empty_like(1), _save, _backward)
