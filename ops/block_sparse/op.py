"""Products with block-sparse matrices: dense times dense at the blocks, and block-sparse times dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from diffnet.ops.block_sparse import reference
from diffnet.ops.block_sparse.pattern import BlockPattern, block_arrays
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import broadcast_shapes, check_operand
from diffnet.ops.common.dispatch import differentiable, save_settings
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
    """Multiply A B for each head, where one of A, B and the product is block-sparse (s) and the others are dense (d).

    - "sdd": A (…, H, rows, K), B (…, H, K, columns) → values (…, number of blocks, block, block)
    - "dsd": values of A, B (…, H, columns, C) → (…, H, rows, C)
    - "dds": A (…, H, N, rows), values of B → (…, H, N, columns)

    Computed in the promoted dtype of both factors, or in autocast's, as dense products are. Low precision is added up
    in float32. Differentiable in a and b. Deterministic, also on a GPU.

    Args:
        pattern: of the block-sparse matrix
        a, b: the factors. Batches broadcast. At least one is floating point; integers and bools are promoted.
        mode: which matrix is block-sparse, see above
        transpose_a: whether a holds Aᵀ. The last two dimensions of a dense a are then exchanged. Values of a are on the
            pattern of Aᵀ; rows and columns then change places above.
        transpose_b: the same for b
        backend: see `use_kernels`

    Raises:
        TypeError: for complex factors, and if neither factor is floating point.
        ValueError: for an unknown mode, and if shapes or devices don't match.

    >>> import torch
    >>> pattern = BlockPattern.from_mask(torch.tensor([[True, False], [True, True]]), 16)
    >>> x = torch.ones(1, 32, 4)
    >>> values = block_matmul(pattern, x, x, "sdd", transpose_b=True)
    >>> values.shape
    torch.Size([3, 16, 16])
    >>> block_matmul(pattern, values, x, "dsd")[0, [0, 31], 0]
    tensor([ 64., 128.])
    """
    if mode not in get_args(MatmulMode):
        raise ValueError(f"mode should be one of {', '.join(get_args(MatmulMode))}, got {mode!r}")
    for name, factor in (("a", a), ("b", b)):
        check_operand(f"the factor {name}", factor, (), pattern.device)
    if not (a.is_floating_point() or b.is_floating_point()):
        raise TypeError(f"one factor at least should be floating point, got {a.dtype} and {b.dtype}")
    dtype = compute_dtype(a, b)
    a, b = a.to(dtype), b.to(dtype)
    if mode == "sdd":
        return _at_blocks(pattern, a.mT if transpose_a else a, b if transpose_b else b.mT, backend)
    if mode == "dsd":
        return _times_dense(pattern, a, b.mT if transpose_b else b, transpose_a, backend)
    # A S = (Sᵀ Aᵀ)ᵀ
    return _times_dense(pattern, b, a if transpose_a else a.mT, not transpose_b, backend).mT


def _at_blocks(pattern: BlockPattern, a: Tensor, b: Tensor, backend: Backend) -> Tensor:
    """Multiply A Bᵀ at the blocks."""
    heads, rows, columns = pattern.shape
    for x, size in ((a, rows), (b, columns)):
        if x.ndim < 3 or x.shape[-3] != heads or x.shape[-2] != size or x.shape[-1] != a.shape[-1]:
            raise ValueError(
                f"the dense factors should be (…, {heads}, {rows}, K) and (…, {heads}, K, {columns}) after the "
                f"transposes asked for, they are {tuple(a.shape)} and {tuple(b.mT.shape)}"
            )
    batch = broadcast_shapes(a.shape[:-3], b.shape[:-3])
    flat = [x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]) for x in (a, b)]
    if use_kernels(backend, *flat):
        out: Tensor = sdd_operator(block_arrays(pattern), *flat, pattern.block, rows, columns)
    else:
        out = reference.sdd(pattern.blocks.indptr, pattern.blocks.indices, flat[0], flat[1], pattern.block)
    return out.reshape(*batch, *pattern.values_shape)


def _times_dense(pattern: BlockPattern, values: Tensor, x: Tensor, transpose: bool, backend: Backend) -> Tensor:
    """Multiply S X or Sᵀ X."""
    pattern.expect_values(values)
    heads, rows, columns = pattern.shape
    result, size = (columns, rows) if transpose else (rows, columns)
    if x.ndim < 3 or x.shape[-3:-1] != (heads, size):
        raise ValueError(
            f"the dense factor should be (…, {heads}, {size}, C) after the transposes asked for, it is {tuple(x.shape)}"
        )
    batch = broadcast_shapes(values.shape[:-3], x.shape[:-3])
    flat = [t.expand(*batch, *t.shape[-3:]).reshape(math.prod(batch), *t.shape[-3:]) for t in (values, x)]
    if use_kernels(backend, *flat):
        out: Tensor = dsd_operator(block_arrays(pattern), *flat, pattern.block, rows, columns, transpose)
    else:
        blocks, (s, dense) = pattern.blocks, flat
        if transpose:
            blocks, order = blocks.transpose
            s = s.index_select(1, order).mT
        out = reference.dsd(blocks.indptr, blocks.indices, s, dense, result)
    return out.reshape(*batch, heads, result, x.shape[-1])


def _sdd_forward(structure: Sequence[Tensor], a: Tensor, b: Tensor, block: int, rows: int, columns: int) -> Tensor:
    """Multiply A Bᵀ at the blocks: a (Z, H, rows, K), b (Z, H, columns, K) → (Z, number of blocks, block, block)."""
    from diffnet.ops.block_sparse import kernels

    return kernels.sdd(structure[0], structure[1], a, b, block)


def _sdd_fake(structure: Sequence[Tensor], a: Tensor, b: Tensor, block: int, *_: Any) -> Tensor:
    return a.new_empty(len(a), len(structure[1]), block, block)


def _dsd_forward(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, block: int, rows: int, columns: int, transpose: bool
) -> Tensor:
    """Multiply S X or Sᵀ X: values (Z, number of blocks, block, block), x (Z, H, …, C) → (Z, H, …, C)."""
    from diffnet.ops.block_sparse import kernels

    indptr, indices, t_indptr, t_indices, order = structure
    places, size = ((t_indptr, t_indices), columns) if transpose else ((indptr, indices), rows)
    return kernels.dsd(*places, values, x, size, order if transpose else None)


def _dsd_fake(structure: Sequence[Tensor], values: Tensor, x: Tensor, *sizes: Any) -> Tensor:
    _, rows, columns, transpose = sizes
    return x.new_empty(*x.shape[:2], columns if transpose else rows, x.shape[3])


def _sdd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[1:3]
    grad = grad.to(a.dtype)
    grad_a = dsd_operator(structure, grad, b, *ctx.settings, False) if need_a else None
    grad_b = dsd_operator(structure, grad, a, *ctx.settings, True) if need_b else None
    return [None] * len(structure), grad_a, grad_b, *[None] * 3


def _dsd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, values, x = ctx.saved_tensors
    *sizes, transpose = ctx.settings
    need_values, need_x = ctx.needs_input_grad[1:3]
    grad = grad.to(values.dtype)
    grad_values = grad_x = None
    if need_values:
        a, b = (x, grad) if transpose else (grad, x)
        grad_values = sdd_operator(structure, a, b, *sizes)
    if need_x:
        grad_x = dsd_operator(structure, values, grad, *sizes, not transpose)
    return [None] * len(structure), grad_values, grad_x, *[None] * 4


sdd_operator = differentiable("diffnet::block_sdd", _sdd_forward, _sdd_fake, save_settings, _sdd_backward)
dsd_operator = differentiable("diffnet::block_dsd", _dsd_forward, _dsd_fake, save_settings, _dsd_backward)
