"""Products with block-sparse matrices: of two dense ones at the blocks, and of a block-sparse with a dense one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.pattern import BlockPattern
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable
from diffnet.ops.common.precision import compute_dtype

MatmulMode: TypeAlias = Literal["sdd", "dsd", "dds"]


def block_matmul(
    pattern: BlockPattern,
    a: Tensor,
    b: Tensor,
    mode: MatmulMode,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """A B for each head, where one of A, B and the product is block-sparse (s) and the others are dense (d).

    "sdd": A (…, H, rows, K), B (…, H, K, columns) → values (…, number of blocks, block, block)
    "dsd": values of A, and B (…, H, columns, C) → (…, H, rows, C)
    "dds": A (…, H, N, rows), and values of B → (…, H, N, columns)

    With transpose_a, a holds Aᵀ: a dense one with its last two dimensions exchanged, or values on the pattern of Aᵀ, so
    that in "dsd" rows and columns change places above; so does transpose_b for b. Batches broadcast.

    Computed in the wider dtype of both, or in autocast's, as dense products are; low precision is added up in float32.
    Differentiable, deterministic. Raises ValueError where shapes don't fit.
    """
    if mode not in get_args(MatmulMode):
        raise ValueError(f"mode should be one of {', '.join(get_args(MatmulMode))}, got {mode!r}")
    dtype = compute_dtype(a, b)
    a, b = a.to(dtype), b.to(dtype)
    if mode == "sdd":
        return _at_blocks(pattern, a.mT if transpose_a else a, b if transpose_b else b.mT, backend)
    if mode == "dsd":
        return _times_dense(pattern, a, b.mT if transpose_b else b, transpose_a, backend)
    # A S = (Sᵀ Aᵀ)ᵀ
    return _times_dense(pattern, b, a if transpose_a else a.mT, not transpose_b, backend).mT


def _at_blocks(pattern: BlockPattern, a: Tensor, b: Tensor, backend: Backend) -> Tensor:
    """A Bᵀ."""
    heads, rows, columns = pattern.shape
    for x, size in ((a, rows), (b, columns)):
        if x.ndim < 3 or x.shape[-3] != heads or x.shape[-2] != size or x.shape[-1] != a.shape[-1]:
            raise ValueError(
                f"the dense factors should be (…, {heads}, {rows}, K) and (…, {heads}, K, {columns}), or these "
                f"transposed; as used they are {tuple(a.shape)} and {tuple(b.mT.shape)}"
            )
    batch = torch.broadcast_shapes(a.shape[:-3], b.shape[:-3])  # type: ignore[no-untyped-call]
    flat = [x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]) for x in (a, b)]
    out: Tensor = _sdd(_structure(pattern), *flat, pattern.block, rows, columns, use_kernels(backend, *flat))
    return out.reshape(*batch, *pattern.values_shape)


def _times_dense(pattern: BlockPattern, values: Tensor, x: Tensor, transpose: bool, backend: Backend) -> Tensor:
    """S X or Sᵀ X."""
    pattern.expect_values(values)
    heads, rows, columns = pattern.shape
    result, size = (columns, rows) if transpose else (rows, columns)
    if x.ndim < 3 or x.shape[-3:-1] != (heads, size):
        raise ValueError(f"the dense factor should multiply as (…, {heads}, {size}, C), as used it is {tuple(x.shape)}")
    batch = torch.broadcast_shapes(values.shape[:-3], x.shape[:-3])  # type: ignore[no-untyped-call]
    flat = [t.expand(*batch, *t.shape[-3:]).reshape(math.prod(batch), *t.shape[-3:]) for t in (values, x)]
    triton = use_kernels(backend, *flat)
    out: Tensor = _dsd(_structure(pattern), *flat, pattern.block, rows, columns, transpose, triton)
    return out.reshape(*batch, heads, result, x.shape[-1])


def _structure(pattern: BlockPattern) -> list[Tensor]:
    """What operators take of a pattern: indptr and indices, those of its transpose, and where blocks are in it."""
    transposed, order = pattern.blocks.transpose
    return [pattern.blocks.indptr, pattern.blocks.indices, transposed.indptr, transposed.indices, order]


def _sdd_kernel(
    structure: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    block: int,
    rows: int,
    columns: int,
    triton: bool,
) -> Tensor:
    """A Bᵀ at the blocks, a (Z, H, rows, K), b (Z, H, columns, K) → (Z, number of blocks, block, block)."""
    indptr, indices, *_ = structure
    if triton:
        from diffnet.ops.block_sparse import kernels

        return kernels.sdd(indptr, indices, a, b, block)
    return reference.sdd(indptr, indices, a, b, block)


def _sdd_fake(
    structure: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    block: int,
    rows: int,
    columns: int,
    triton: bool,
) -> Tensor:
    return a.new_empty(len(a), len(structure[1]), block, block)


def _dsd_kernel(
    structure: Sequence[Tensor],
    values: Tensor,
    x: Tensor,
    block: int,
    rows: int,
    columns: int,
    transpose: bool,
    triton: bool,
) -> Tensor:
    """S X or Sᵀ X, values (Z, number of blocks, block, block), x (Z, H, …, C) → (Z, H, …, C)."""
    indptr, indices, t_indptr, t_indices, order = structure
    if triton:
        from diffnet.ops.block_sparse import kernels

        if transpose:
            return kernels.dsd(t_indptr, t_indices, values, x, columns, order)
        return kernels.dsd(indptr, indices, values, x, rows)
    if transpose:
        return reference.dsd(t_indptr, t_indices, values[:, order].mT, x, columns)
    return reference.dsd(indptr, indices, values, x, rows)


def _dsd_fake(
    structure: Sequence[Tensor],
    values: Tensor,
    x: Tensor,
    block: int,
    rows: int,
    columns: int,
    transpose: bool,
    triton: bool,
) -> Tensor:
    return x.new_empty(*x.shape[:2], columns if transpose else rows, x.shape[3])


def _save_sdd(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, a, b, ctx.block, ctx.rows, ctx.columns, ctx.triton = inputs
    ctx.save_for_backward(*structure, a, b)


def _sdd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, a, b = ctx.saved_tensors
    sizes = ctx.block, ctx.rows, ctx.columns
    need_a, need_b = ctx.needs_input_grad[1:3]
    grad = grad.to(a.dtype)
    grad_a = _dsd(structure, grad, b, *sizes, False, ctx.triton) if need_a else None
    grad_b = _dsd(structure, grad, a, *sizes, True, ctx.triton) if need_b else None
    return [None] * len(structure), grad_a, grad_b, *[None] * 4


def _save_dsd(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, values, x, ctx.block, ctx.rows, ctx.columns, ctx.transpose, ctx.triton = inputs
    ctx.save_for_backward(*structure, values, x)


def _dsd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, values, x = ctx.saved_tensors
    sizes = ctx.block, ctx.rows, ctx.columns
    need_values, need_x = ctx.needs_input_grad[1:3]
    grad = grad.to(values.dtype)
    grad_values = grad_x = None
    if need_values:
        a, b = (x, grad) if ctx.transpose else (grad, x)
        grad_values = _sdd(structure, a, b, *sizes, ctx.triton)
    if need_x:
        grad_x = _dsd(structure, values, grad, *sizes, not ctx.transpose, ctx.triton)
    return [None] * len(structure), grad_values, grad_x, *[None] * 5


_sdd = differentiable("diffnet::block_sdd", _sdd_kernel, _sdd_fake, _save_sdd, _sdd_backward)
_dsd = differentiable("diffnet::block_dsd", _dsd_kernel, _dsd_fake, _save_dsd, _dsd_backward)
