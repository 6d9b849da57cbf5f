"""The Triton kernels of block-sparse attention (Dao et al. 2022, FlashAttention; Dao 2023, FlashAttention-2).

A program has the queries of a block row, or in the backward of keys and values the keys of a block column, and steps
through the blocks there, STEP keys or queries at a time, all in one loop.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import cdiv, power_of_2
from diffnet.ops.common.precision import tf32_precision

# Keys, and in the backward of keys and values queries, of a step: as many as registers hold.
STEP = 64
KEY_BACKWARD_STEP = 32


def attention(
    indptr: Tensor,
    indices: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor]:
    """See `attention._attention`."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, sums = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)
    if out.numel() > 0:
        programs, shape, flags = _launch(indptr, query, key, key_mask, mask, block)
        if key.element_size() == 2 and key.shape[3] <= 128:  # three stages fit
            flags["num_stages"] = 3
        _attend[programs](
            indptr, indices, query, key, value, *_masks(query, key_mask, mask), out, sums, *shape,
            scale * math.log2(math.e), **flags,
        )  # fmt: skip
    return out, sums


def attention_backward(
    indptr: Tensor,
    indices: Tensor,
    t_indptr: Tensor,
    t_indices: Tensor,
    order: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention._attention_backward`."""
    query, key, value, grad = query.contiguous(), key.contiguous(), value.contiguous(), grad.contiguous()
    grad_q, grad_k, grad_v = (t.new_empty(t.shape) for t in (query, key, value))
    delta = torch.empty_like(sums)
    given = (query, key, value, *_masks(query, key_mask, mask), sums, delta, grad)
    if grad_q.numel() > 0:
        programs, shape, flags = _launch(indptr, query, key, key_mask, mask, block)
        _query_backward[programs](
            indptr, indices, *given, out.contiguous(), grad_q, *shape, scale, scale * math.log2(math.e), **flags
        )
    if grad_k.numel() > 0:
        programs, shape, flags = _launch(t_indptr, query, key, key_mask, mask, block)
        flags["STEP"] = min(block, KEY_BACKWARD_STEP)
        if block == 128 and key.element_size() == 2:
            flags["maxnreg"] = 128  # so that two programs share a multiprocessor
        _key_backward[programs](
            t_indptr, t_indices, order, *given, grad_k, grad_v, *shape, scale, scale * math.log2(math.e), **flags
        )
    return grad_q, grad_k, grad_v


def _masks(query: Tensor, key_mask: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What isn't there is never read."""
    return (
        query if key_mask is None else key_mask.contiguous(),
        query if mask is None else mask.contiguous(),
    )


def _launch(
    indptr: Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None, mask: Tensor | None, block: int
) -> tuple[tuple[int], tuple[int, ...], dict[str, object]]:
    (batches, heads, rows, channels), columns = query.shape, key.shape[2]
    block_rows, block_columns = max(cdiv(rows, block), 1), max(cdiv(columns, block), 1)
    shape = (len(indptr) - 1, rows, columns, channels, block_rows, block_columns, heads)
    flags: dict[str, object] = {
        "WHOLE": rows % block == 0 and columns % block == 0,
        "HAS_KEY_MASK": key_mask is not None,
        "HAS_MASK": mask is not None,
        "BLOCK": block,
        "STEP": min(block, STEP),
        "WIDTH": max(power_of_2(channels), 16),
        "PRECISION": tf32_precision(query),
        "num_warps": 8 if block == 128 else 4,
        "num_stages": 2,
    }
    return (batches * (len(indptr) - 1),), shape, flags


@triton.jit
def _tile(x, head_start, n, size, channels, WIDTH: tl.constexpr):
    """Rows n of one head's (size, channels)."""
    c = tl.arange(0, WIDTH)
    at = x + (head_start + n)[:, None] * channels + c[None, :]
    return tl.load(at, mask=(n < size)[:, None] & (c < channels)[None, :], other=0)


@triton.jit
def _visible(
    s, key_mask, mask, z, at, i, j, r, n, rows, columns,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores s, of which those of queries r that don't see keys n are −∞: places i and j in block `at`. The queries go
    along one of the axes, with 1 in place of the other, and the keys along the other."""
    if not WHOLE:
        s = tl.where((r < rows) & (n < columns), s, float("-inf"))
    if HAS_KEY_MASK:
        s = tl.where(tl.load(key_mask + z * columns + n, mask=n < columns, other=0) != 0, s, float("-inf"))
    if HAS_MASK:
        s = tl.where(tl.load(mask + at * (BLOCK * BLOCK) + i * BLOCK + j) != 0, s, float("-inf"))
    return s


@triton.jit
def _attend(
    indptr, indices, query, key, value, key_mask, mask, out, sums,
    all_block_rows, rows, columns, channels, block_rows, block_columns, heads, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block_row = tl.program_id(0) % all_block_rows
    z = (tl.program_id(0) // all_block_rows).to(tl.int64)
    head = z * heads + block_row // block_rows
    place = tl.arange(0, BLOCK)
    r = (block_row % block_rows) * BLOCK + place
    q = _tile(query, head * rows, r, rows, channels, WIDTH)
    steps: tl.constexpr = BLOCK // STEP
    first = tl.load(indptr + block_row)
    last = tl.load(indptr + block_row + 1)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    result = tl.zeros((BLOCK, WIDTH), tl.float32)
    for i in range(0, (last - first) * steps):
        e = first + i // steps
        j = (i % steps) * STEP + tl.arange(0, STEP)
        n = (tl.load(indices + e) % block_columns) * BLOCK + j
        k = _tile(key, head * columns, n, columns, channels, WIDTH)
        v = _tile(value, head * columns, n, columns, channels, WIDTH)
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
    there = total > 0
    result = result / tl.where(there, total, 1.0)[:, None]
    c = tl.arange(0, WIDTH)
    at = (head * rows + r)[:, None] * channels + c[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < channels)[None, :])
    logarithm = tl.where(there, top + tl.log2(tl.where(there, total, 1.0)), 0.0)
    tl.store(sums + head * rows + r, logarithm, mask=r < rows)


@triton.jit
def _query_backward(
    indptr, indices, query, key, value, key_mask, mask, sums, delta, grad, out, grad_q,
    all_block_rows, rows, columns, channels, block_rows, block_columns, heads, scale, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = scale · dS K, with dS = P ∘ (dO Vᵀ − δ), and δ, the inner products of dO and O, which is kept."""
    block_row = tl.program_id(0) % all_block_rows
    z = (tl.program_id(0) // all_block_rows).to(tl.int64)
    head = z * heads + block_row // block_rows
    place = tl.arange(0, BLOCK)
    r = (block_row % block_rows) * BLOCK + place
    q = _tile(query, head * rows, r, rows, channels, WIDTH)
    g = _tile(grad, head * rows, r, rows, channels, WIDTH)
    base = tl.load(sums + head * rows + r, mask=r < rows, other=0)
    d = tl.sum(g.to(tl.float32) * _tile(out, head * rows, r, rows, channels, WIDTH).to(tl.float32), 1)
    tl.store(delta + head * rows + r, d, mask=r < rows)
    steps: tl.constexpr = BLOCK // STEP
    first = tl.load(indptr + block_row)
    last = tl.load(indptr + block_row + 1)
    result = tl.zeros((BLOCK, WIDTH), tl.float32)
    for i in range(0, (last - first) * steps):
        e = first + i // steps
        j = (i % steps) * STEP + tl.arange(0, STEP)
        n = (tl.load(indices + e) % block_columns) * BLOCK + j
        k = _tile(key, head * columns, n, columns, channels, WIDTH)
        v = _tile(value, head * columns, n, columns, channels, WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        s = _visible(
            s, key_mask, mask, z, e.to(tl.int64), place[:, None], j[None, :], r[:, None], n[None, :], rows, columns,
            WHOLE, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        p = tl.exp2(s - base[:, None])
        ds = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - d[:, None])
        result = tl.dot(ds.to(k.dtype), k, result, input_precision=PRECISION)
    c = tl.arange(0, WIDTH)
    at = (head * rows + r)[:, None] * channels + c[None, :]
    inside = (r < rows)[:, None] & (c < channels)[None, :]
    tl.store(grad_q + at, (result * scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _key_backward(
    t_indptr, t_indices, order, query, key, value, key_mask, mask, sums, delta, grad, grad_k, grad_v,
    all_block_columns, rows, columns, channels, block_rows, block_columns, heads, scale, scale2,
    WHOLE: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK = scale · dSᵀ Q and dV = Pᵀ dO, block column by block column. Scores have the keys along their first axis, so
    that they are left factors as they are, in registers."""
    block_column = tl.program_id(0) % all_block_columns
    z = (tl.program_id(0) // all_block_columns).to(tl.int64)
    head = z * heads + block_column // block_columns
    place = tl.arange(0, BLOCK)
    n = (block_column % block_columns) * BLOCK + place
    k = _tile(key, head * columns, n, columns, channels, WIDTH)
    v = _tile(value, head * columns, n, columns, channels, WIDTH)
    steps: tl.constexpr = BLOCK // STEP
    first = tl.load(t_indptr + block_column)
    last = tl.load(t_indptr + block_column + 1)
    dk = tl.zeros((BLOCK, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK, WIDTH), tl.float32)
    for step in range(0, (last - first) * steps):
        e = first + step // steps
        i = (step % steps) * STEP + tl.arange(0, STEP)
        r = (tl.load(t_indices + e) % block_rows) * BLOCK + i
        q = _tile(query, head * rows, r, rows, channels, WIDTH)
        g = _tile(grad, head * rows, r, rows, channels, WIDTH)
        base = tl.load(sums + head * rows + r, mask=r < rows, other=0)
        d = tl.load(delta + head * rows + r, mask=r < rows, other=0)
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
    c = tl.arange(0, WIDTH)
    at_keys = (head * columns + n)[:, None] * channels + c[None, :]
    inside = (n < columns)[:, None] & (c < channels)[None, :]
    tl.store(grad_k + at_keys, (dk * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + at_keys, dv.to(grad_v.dtype.element_ty), mask=inside)
