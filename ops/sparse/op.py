"""`spmm` and `sddmm`: each is the other's derivative, so both can be differentiated any number of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable
from diffnet.ops.sparse import reference
from diffnet.ops.sparse.pattern import CsrArrays, Pattern, balanced_arrays


def spmm(pattern: Pattern, values: Tensor, x: Tensor, *, transpose: bool = False, backend: Backend = "auto") -> Tensor:
    """Sparse times dense, for every set of values on the pattern, in one pass over its indices.

    values (…, nnz) and x (columns, C) for all sets, or (…, columns, C) with one for each → (…, rows, C)
    transpose: multiply by the transposed matrices: x (…, rows, C) → (…, columns, C)

    The result has the dtype of the values (as sparse products have under autocast); low precision is added up in
    float32. Differentiable in values and x. Deterministic, on a GPU too.

    Raises ValueError where the shapes don't fit.
    """
    rows, columns = reversed(pattern.shape) if transpose else pattern.shape
    if values.ndim == 0 or values.shape[-1] != pattern.nnz:
        raise ValueError(f"values should have shape (…, {pattern.nnz}), shape is {tuple(values.shape)}")
    if x.ndim < 2 or x.shape[-2] != columns:
        raise ValueError(f"the dense factor should have shape (…, {columns}, C), shape is {tuple(x.shape)}")
    batch = torch.broadcast_shapes(values.shape[:-1], x.shape[:-2])  # type: ignore[no-untyped-call]
    flat = values.expand(*batch, pattern.nnz).reshape(math.prod(batch), pattern.nnz)
    dense = _flat_sets(x.to(values.dtype), batch)
    triton = use_kernels(backend, flat, dense)
    out: Tensor = _spmm(_structure(pattern, triton), flat, dense, transpose, False, triton)
    return out.reshape(*batch, rows, x.shape[-1])


def sddmm(pattern: Pattern, a: Tensor, b: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Dense times dense, A Bᵀ, computed at the entries of the pattern only, in one pass over its indices.

    a (…, rows, C) and b (…, columns, C), batches as in broadcasting, in one dtype → (…, nnz)

    Low precision is added up in float32. Differentiable in a and b. Raises ValueError where the shapes don't fit.
    """
    rows, columns = pattern.shape
    if a.ndim < 2 or b.ndim < 2 or (a.shape[-2], b.shape[-2]) != (rows, columns) or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"the dense factors should have shapes (…, {rows}, C) and (…, {columns}, C), "
            f"shapes are {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"the dense factors should have one dtype, got {a.dtype} and {b.dtype}")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    flat = [_flat_sets(t, batch) for t in (a, b)]
    triton = use_kernels(backend, *flat)
    out: Tensor = _sddmm(_structure(pattern, triton), *flat, triton)
    return out.reshape(*batch, pattern.nnz)


def row_sum(pattern: Pattern, values: Tensor, *, backend: Backend = "auto") -> Tensor:
    """The sum of each row: values (…, nnz) → (…, rows). Differentiable."""
    ones = torch.ones(pattern.columns, 1, dtype=values.dtype, device=values.device)
    return spmm(pattern, values, ones, backend=backend)[..., 0]


def diagonal(pattern: Pattern, values: Tensor) -> Tensor:
    """The diagonal, 0 where there is no entry: values (…, nnz) → (…, min(rows, columns)). Differentiable."""
    rows = pattern.row_indices
    on_diagonal = torch.where(rows == pattern.indices, values, 0)
    # Each row has one such entry at most, so that atomics add in no particular order nothing but zeros.
    sums = values.new_zeros(*values.shape[:-1], pattern.shape[0]).index_add(-1, rows, on_diagonal)
    return sums[..., : pattern.columns]


def _flat_sets(x: Tensor, batch: torch.Size) -> Tensor:
    """A dense factor (…, N, C) as (S, N, C) for the S sets of a batch, or (1, N, C) where it is the same for all."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    return x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])


def _structure(pattern: Pattern, triton: bool) -> list[Tensor]:
    """What the operators below take of a pattern: its arrays, those of its transpose, and where entries are in it."""
    transposed, order = pattern.transpose
    return [*balanced_arrays(pattern, triton), *balanced_arrays(transposed, triton), order]


def _pattern_and_transpose(structure: Sequence[Tensor]) -> tuple[CsrArrays, CsrArrays, Tensor]:
    return CsrArrays(*structure[:5]), CsrArrays(*structure[5:10]), structure[10]


def _spmm_kernel(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, transpose: bool, reduce: bool, triton: bool
) -> Tensor:
    """Aₛ xₛ or Aₛᵀ xₛ for values (S, nnz) and x (S or 1, …, C) → (S, …, C), summed over the sets (1, …, C)."""
    own, transposed, order = _pattern_and_transpose(structure)
    if triton:
        from diffnet.ops.sparse import kernels

        return kernels.spmm(transposed, values, x, reduce, order) if transpose else kernels.spmm(own, values, x, reduce)
    if transpose:
        return reference.spmm(transposed, values[:, order], x, reduce)
    return reference.spmm(own, values, x, reduce)


def _spmm_fake(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, transpose: bool, reduce: bool, triton: bool
) -> Tensor:
    own, transposed, _ = _pattern_and_transpose(structure)
    rows = len(transposed.indptr if transpose else own.indptr) - 1
    return x.new_empty(1 if reduce else len(values), rows, x.shape[2])


def _sddmm_kernel(structure: Sequence[Tensor], a: Tensor, b: Tensor, triton: bool) -> Tensor:
    """Aₛ Bₛᵀ at the entries, for a (S or 1, rows, C) and b (S or 1, columns, C) → (S, nnz)."""
    own = _pattern_and_transpose(structure)[0]
    if triton:
        from diffnet.ops.sparse import kernels

        return kernels.sddmm(own, a, b)
    return reference.sddmm(own, a, b)


def _sddmm_fake(structure: Sequence[Tensor], a: Tensor, b: Tensor, triton: bool) -> Tensor:
    return a.new_empty(max(len(a), len(b)), len(structure[1]))


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, values, x, ctx.transpose, ctx.reduce, ctx.triton = inputs
    ctx.save_for_backward(*structure, values, x)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, values, x = ctx.saved_tensors
    need_values, need_x = ctx.needs_input_grad[1:3]
    grad = grad.to(values.dtype)  # autocast may hand back a narrower one
    grad_values = grad_x = None
    if need_values:
        a, b = (x, grad) if ctx.transpose else (grad, x)
        grad_values = _sddmm(structure, a, b, ctx.triton)
    if need_x:
        # What all sets read, all sets give a gradient to.
        grad_x = _spmm(structure, values, grad, not ctx.transpose, len(x) < len(values), ctx.triton)
    return [None] * len(structure), grad_values, grad_x, None, None, None


def _save_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, a, b, ctx.triton = inputs
    ctx.save_for_backward(*structure, a, b)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[1:3]
    grad = grad.to(a.dtype)
    grad_a = _spmm(structure, grad, b, False, len(a) < len(grad), ctx.triton) if need_a else None
    grad_b = _spmm(structure, grad, a, True, len(b) < len(grad), ctx.triton) if need_b else None
    return [None] * len(structure), grad_a, grad_b, None


# Custom operators keep torch.compile from tracing into sparse tensors and kernels.
_spmm = differentiable("diffnet::spmm", _spmm_kernel, _spmm_fake, _save_spmm, _spmm_backward)
_sddmm = differentiable("diffnet::sddmm", _sddmm_kernel, _sddmm_fake, _save_sddmm, _sddmm_backward)
