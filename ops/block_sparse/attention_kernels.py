"""The Triton kernels of block-sparse attention (Dao et al. 2022, FlashAttention; Dao 2023, FlashAttention-2).

A program has the queries of a block row, or for the gradients of keys and values the keys of a block column. It steps
through the blocks there, BLOCK_K keys or queries at a time, in a single loop.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.block_sparse.pattern import BlockArrays
from diffnet.ops.block_sparse.reference import AttentionInputs
from diffnet.ops.common.launcher import guarded
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.precision import tf32_precision
from diffnet.ops.common.tiling import (
    cdiv,
    has_large_shared_memory,
    interpreted,
    nvidia_options,
    power_of_2,
)

STEP = 64  # the keys of a step, or the queries for the gradients of keys and values
LARGE_BACKWARD_STEP = 32  # the keys of a step in the backward, see `_is_large`


def attention(arrays: BlockArrays, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute `reference.attention`."""
    batches, heads, rows, _ = inputs.query.shape
    columns = inputs.key.shape[2]
    check_rows("block_attention", rows, columns)
    check_programs("block_attention", batches * heads * max(cdiv(rows, inputs.block), cdiv(columns, inputs.block)))
    inputs = _contiguous(inputs)
    query, key, scale = inputs.query, inputs.key, inputs.scale * math.log2(math.e)
    out, sums = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)
    if out.numel() > 0:
        programs, shape, flags = _launch(arrays.indptr, inputs, 64 if key.element_size() == 2 else 128)
        if key.element_size() == 2 and key.shape[3] <= 128:  # three stages fit into shared memory
            flags["num_stages"] = 3
        block_attention_forward_kernel[programs](
            arrays.indptr, arrays.indices, *_tensors(inputs), out, sums, *shape, scale, **flags
        )
    return out, sums


def attention_backward(
    arrays: BlockArrays, inputs: AttentionInputs, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.attention_backward`."""
    inputs = _contiguous(inputs)
    query, key, value, *_ = inputs
    out, sums, grad = out.contiguous(), sums.contiguous(), grad.contiguous()
    grad_q, grad_k, grad_v = (t.new_empty(t.shape) for t in (query, key, value))
    delta = torch.empty_like(sums)
    given = (*_tensors(inputs), sums, delta, grad)
    scales = inputs.scale, inputs.scale * math.log2(math.e)
    step = LARGE_BACKWARD_STEP if _is_large(inputs, 64) else STEP
    if grad_q.numel() > 0:
        programs, shape, flags = _launch(arrays.indptr, inputs, 64)
        flags["BLOCK_K"] = min(flags["BLOCK_K"], step)
        block_attention_backward_query_kernel[programs](
            arrays.indptr, arrays.indices, *given, out, grad_q, *shape, *scales, **flags
        )
    if grad_k.numel() > 0:
        programs, shape, flags = _launch(arrays.t_indptr, inputs, 64)
        flags["BLOCK_K"] = min(flags["BLOCK_K"], step)
        if flags["BLOCK_R"] == flags["BLOCK_C"] == 64 and key.element_size() == 2:
            flags |= nvidia_options(maxnreg=168)  # three programs then fit on one multiprocessor
        block_attention_backward_key_kernel[programs](
            arrays.t_indptr, arrays.t_indices, arrays.order, *given, grad_k, grad_v, *shape, *scales, **flags
        )
    return grad_q, grad_k, grad_v


def _contiguous(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with contiguous tensors, as the kernels read them."""
    key_mask, mask = (None if t is None else t.contiguous() for t in (inputs.key_mask, inputs.mask))
    query, key, value = (t.contiguous() for t in inputs[:3])
    return AttentionInputs(query, key, value, key_mask, mask, inputs.scale, inputs.block)


def _tensors(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the tensors of the inputs. The query stands in for a missing mask, which is never read."""
    query, key, value, key_mask, mask, *_ = inputs
    return query, key, value, query if key_mask is None else key_mask, query if mask is None else mask


def _is_large(inputs: AttentionInputs, block: int = 128) -> bool:
    """Return whether tiles are so large that shared memory has room for small steps only.

    block: the size of blocks from which on they are. It is smaller in the backward.
    """
    return inputs.block >= block and inputs.query.element_size() == 4 and inputs.query.shape[3] > 64


def _launch(indptr: Tensor, inputs: AttentionInputs, most: int) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Return the grid, the sizes and the flags of a kernel whose programs have at most `most` rows of a block each."""
    block, part = inputs.block, min(inputs.block, most)
    (batches, heads, rows, channels), columns = inputs.query.shape, inputs.key.shape[2]
    block_rows, block_columns = max(cdiv(rows, block), 1), max(cdiv(columns, block), 1)
    shape = (len(indptr) - 1, rows, columns, channels, block_rows, block_columns, heads)
    lacks_memory = _is_large(inputs) and not (interpreted(inputs.query) or has_large_shared_memory(inputs.query))
    block_c = max(power_of_2(channels), 16)
    flags: dict[str, Any] = {
        "WHOLE": rows % block == 0 and columns % block == 0 and channels == block_c,
        "HAS_KEY_MASK": inputs.key_mask is not None,
        "HAS_MASK": inputs.mask is not None,
        "BLOCK": block,
        "BLOCK_R": part,
        "BLOCK_K": 16 if lacks_memory else min(block, STEP),
        "BLOCK_C": block_c,
        "PRECISION": tf32_precision(inputs.query),
        "num_warps": 8 if part == 128 else 4,
        "num_stages": 1 if lacks_memory else 2,
    }
    return (batches * (len(indptr) - 1) * (block // part),), shape, flags


@triton.jit
def _place(all_block_rows, block_rows, heads, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return a program's block row, batch, head in all batches, places in the block, and first row in the head."""
    parts: tl.constexpr = BLOCK // BLOCK_R
    block_row = tl.program_id(0) // parts % all_block_rows
    z = (tl.program_id(0) // (parts * all_block_rows)).to(tl.int64)
    first = tl.program_id(0) % parts * BLOCK_R
    head = z * heads + block_row // block_rows
    return block_row, z, head, first + tl.arange(0, BLOCK_R), (block_row % block_rows) * BLOCK + first


@triton.jit
def _tile(x, head_start, first, size, channels, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load BLOCK_N rows of one head's (size, channels), from row `first` on. Offsets in a tile are 32-bit."""
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    at = x + (head_start + first) * channels + (n[:, None] * channels + c[None, :])
    return tl.load(at, mask=((first + n < size)[:, None] & (c < channels)[None, :]) | WHOLE, other=0)


@triton.jit
def _visible(
    s, key_mask, mask, z, at, i, j, r, n, rows, columns,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the scores s of queries r and keys n to −∞ where a query doesn't see a key.

    i, j: the places of queries and keys in block `at`. Queries vary along one axis of s and keys along the other.
    """
    if not WHOLE:
        s = tl.where((r < rows) & (n < columns), s, float("-inf"))
    if HAS_KEY_MASK:
        s = tl.where(tl.load(key_mask + z * columns + n, mask=n < columns, other=0) != 0, s, float("-inf"))
    if HAS_MASK:
        s = tl.where(tl.load(mask + at * (BLOCK * BLOCK) + i * BLOCK + j) != 0, s, float("-inf"))
    return s


@guarded
@triton.jit
def block_attention_forward_kernel(
    indptr, indices, query, key, value, key_mask, mask, out, sums,
    all_block_rows, rows, columns, channels, block_rows, block_columns, heads, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale · Q Kᵀ) V and sums = log₂ Σ exp(scale · Q Kᵀ) of a block row. scale2 = scale · log₂ e."""
    block_row, z, head, place, first_row = _place(all_block_rows, block_rows, heads, BLOCK, BLOCK_R)
    r = first_row + tl.arange(0, BLOCK_R)
    q = _tile(query, head * rows, first_row, rows, channels, WHOLE, BLOCK_R, BLOCK_C)
    steps: tl.constexpr = BLOCK // BLOCK_K
    first = tl.load(indptr + block_row)
    last = tl.load(indptr + block_row + 1)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    result = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i in range(0, (last - first) * steps):
        e = first + i // steps
        start = (tl.load(indices + e) % block_columns) * BLOCK + (i % steps) * BLOCK_K
        j = (i % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        n = start + tl.arange(0, BLOCK_K)
        k = _tile(key, head * columns, start, columns, channels, WHOLE, BLOCK_K, BLOCK_C)
        v = _tile(value, head * columns, start, columns, channels, WHOLE, BLOCK_K, BLOCK_C)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        s = _visible(
            s, key_mask, mask, z, e.to(tl.int64), place[:, None], j[None, :], r[:, None], n[None, :], rows, columns,
            WHOLE, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        result = result * shrink[:, None]
        result = tl.dot(p.to(v.dtype), v, result, input_precision=PRECISION)
        top = new_top
    empty = total == 0
    result = result / tl.where(empty, 1.0, total)[:, None]
    c = tl.arange(0, BLOCK_C)
    at = (head * rows + r)[:, None] * channels + c[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < channels)[None, :])
    logarithm = tl.where(empty, 0.0, top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(sums + head * rows + r, logarithm, mask=r < rows)


@guarded
@triton.jit
def block_attention_backward_query_kernel(
    indptr, indices, query, key, value, key_mask, mask, sums, delta, grad, out, grad_q,
    all_block_rows, rows, columns, channels, block_rows, block_columns, heads, scale, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = scale · dS K, where dS = P ∘ (dO Vᵀ − δ). The inner products δ of dO and O are stored, too."""
    block_row, z, head, place, first_row = _place(all_block_rows, block_rows, heads, BLOCK, BLOCK_R)
    r = first_row + tl.arange(0, BLOCK_R)
    q = _tile(query, head * rows, first_row, rows, channels, WHOLE, BLOCK_R, BLOCK_C)
    g = _tile(grad, head * rows, first_row, rows, channels, WHOLE, BLOCK_R, BLOCK_C)
    base = tl.load(sums + head * rows + r, mask=r < rows, other=0)
    d = tl.sum(
        g.to(tl.float32) * _tile(out, head * rows, first_row, rows, channels, WHOLE, BLOCK_R, BLOCK_C).to(tl.float32), 1
    )
    tl.store(delta + head * rows + r, d, mask=r < rows)
    steps: tl.constexpr = BLOCK // BLOCK_K
    first = tl.load(indptr + block_row)
    last = tl.load(indptr + block_row + 1)
    result = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i in range(0, (last - first) * steps):
        e = first + i // steps
        start = (tl.load(indices + e) % block_columns) * BLOCK + (i % steps) * BLOCK_K
        j = (i % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        n = start + tl.arange(0, BLOCK_K)
        k = _tile(key, head * columns, start, columns, channels, WHOLE, BLOCK_K, BLOCK_C)
        v = _tile(value, head * columns, start, columns, channels, WHOLE, BLOCK_K, BLOCK_C)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        s = _visible(
            s, key_mask, mask, z, e.to(tl.int64), place[:, None], j[None, :], r[:, None], n[None, :], rows, columns,
            WHOLE, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        p = tl.exp2(s - base[:, None])
        ds = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - d[:, None])
        result = tl.dot(ds.to(k.dtype), k, result, input_precision=PRECISION)
    c = tl.arange(0, BLOCK_C)
    at = (head * rows + r)[:, None] * channels + c[None, :]
    inside = (r < rows)[:, None] & (c < channels)[None, :]
    tl.store(grad_q + at, (result * scale).to(grad_q.dtype.element_ty), mask=inside)


@guarded
@triton.jit
def block_attention_backward_key_kernel(
    t_indptr, t_indices, order, query, key, value, key_mask, mask, sums, delta, grad, grad_k, grad_v,
    all_block_columns, rows, columns, channels, block_rows, block_columns, heads, scale, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK = scale · dSᵀ Q and dV = Pᵀ dO for a block column.

    Keys vary along the first axis of the scores. The scores can then be left factors directly from registers.
    """
    block_column, z, head, place, first_row = _place(all_block_columns, block_columns, heads, BLOCK, BLOCK_R)
    n = first_row + tl.arange(0, BLOCK_R)
    k = _tile(key, head * columns, first_row, columns, channels, WHOLE, BLOCK_R, BLOCK_C)
    v = _tile(value, head * columns, first_row, columns, channels, WHOLE, BLOCK_R, BLOCK_C)
    steps: tl.constexpr = BLOCK // BLOCK_K
    first = tl.load(t_indptr + block_column)
    last = tl.load(t_indptr + block_column + 1)
    dk = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    dv = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(0, (last - first) * steps):
        e = first + step // steps
        i = (step % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        start = (tl.load(t_indices + e) % block_rows) * BLOCK + (step % steps) * BLOCK_K
        r = start + tl.arange(0, BLOCK_K)
        q = _tile(query, head * rows, start, rows, channels, WHOLE, BLOCK_K, BLOCK_C)
        g = _tile(grad, head * rows, start, rows, channels, WHOLE, BLOCK_K, BLOCK_C)
        base = tl.load(sums + head * rows + r, mask=(r < rows) | WHOLE, other=0)
        d = tl.load(delta + head * rows + r, mask=(r < rows) | WHOLE, other=0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2
        at = tl.load(order + e).to(tl.int64)
        s = _visible(
            s, key_mask, mask, z, at, i[None, :], place[:, None], r[None, :], n[:, None], rows, columns,
            WHOLE, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        p = tl.exp2(s - base[None, :])
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, tl.trans(g), input_precision=PRECISION) - d[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    c = tl.arange(0, BLOCK_C)
    at_keys = (head * columns + n)[:, None] * channels + c[None, :]
    inside = (n < columns)[:, None] & (c < channels)[None, :]
    tl.store(grad_k + at_keys, (dk * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + at_keys, dv.to(grad_v.dtype.element_ty), mask=inside)
