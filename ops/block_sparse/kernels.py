"""The Triton kernels for block-sparse matrices. They are imported at first use, as Triton may be missing.

A block of the pattern is a tile of a matrix product, so every product runs on the tensor cores. Sums are in float32 and
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import guarded
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.precision import tf32_precision
from diffnet.ops.common.tiling import cdiv, power_of_2
from diffnet.ops.sparse.csr import row_of_each

# The tile of a program is a block by at most MAX_CHANNELS channels, in steps of at most MAX_STEP.
MAX_CHANNELS = 128
MAX_STEP = 64
SOFTMAX_TILE = 2048  # elements


def sdd(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor, block: int) -> Tensor:
    """Compute `reference.sdd`. a and b may have any strides."""
    (batches, _, rows, inner), columns = a.shape, b.shape[2]
    check_rows("block_matmul", rows, columns)
    check_programs("block_matmul", batches * len(indices))
    out = a.new_empty(batches, len(indices), block, block)
    if out.numel() == 0:
        return out
    step = min(max(power_of_2(inner), 16), MAX_STEP)
    block_sdd_forward_kernel[(batches * len(indices),)](
        row_of_each(indptr, indices), indices, a, b, out, len(indices), rows, columns, inner,
        max(cdiv(rows, block), 1), max(cdiv(columns, block), 1), *a.stride(), *b.stride(),
        BLOCK=block, BLOCK_K=step, PRECISION=tf32_precision(a), num_warps=_warps(block * block), num_stages=_stages(a),
    )  # fmt: skip
    return out


def dsd(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, rows: int, order: Tensor | None = None) -> Tensor:
    """Compute `reference.dsd`. x may have any strides.

    order: (number of blocks,) for a transposed pattern, the position in `values` of each block. Each block is then
        applied transposed.
    """
    (batches, heads, columns, channels), block = x.shape, values.shape[3]
    check_rows("block_matmul", rows, columns)
    tile = min(max(power_of_2(channels), 16), MAX_CHANNELS)
    check_programs("block_matmul", batches * (len(indptr) - 1), cdiv(channels, tile))
    out = x.new_empty(batches, heads, rows, channels)
    if out.numel() == 0:
        return out
    values = values.contiguous()
    block_dsd_forward_kernel[(batches * (len(indptr) - 1), cdiv(channels, tile))](
        indptr, indices, indices if order is None else order, values, x, out,
        len(indptr) - 1, len(indices), rows, columns, channels,
        max(cdiv(rows, block), 1), max(cdiv(columns, block), 1), *x.stride(), heads,
        TRANSPOSED=order is not None, BLOCK=block, BLOCK_K=min(block, MAX_STEP), BLOCK_C=tile,
        PRECISION=tf32_precision(x), num_warps=_warps(block * tile), num_stages=_stages(x),
    )  # fmt: skip
    return out


def softmax(
    indptr: Tensor,
    indices: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    scale: float,
    rows: int,
    columns: int,
) -> Tensor:
    """Compute `reference.softmax` within the matrix and where both masks allow, see `reference.mask_inside`."""
    batches, count, block, _ = scores.shape
    group = min(block, SOFTMAX_TILE // block)
    check_rows("block_softmax", rows, columns)
    check_programs("block_softmax", batches * (len(indptr) - 1) * (block // group))
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    if out.numel() == 0:
        return out
    given = [scores if t is None else t.contiguous() for t in (bias, key_mask, mask)]
    block_softmax_forward_kernel[(batches * (len(indptr) - 1) * (block // group),)](
        indptr, indices, scores, *given, out, len(indptr) - 1, count, rows, columns,
        max(cdiv(rows, block), 1), max(cdiv(columns, block), 1), scale,
        HAS_BIAS=bias is not None, HAS_KEY_MASK=key_mask is not None, HAS_MASK=mask is not None,
        BLOCK=block, BLOCK_R=group,
    )  # fmt: skip
    return out


def softmax_backward(indptr: Tensor, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Compute `reference.softmax_backward`."""
    out, grad = out.contiguous(), grad.contiguous()
    result = torch.empty_like(out)
    if result.numel() == 0:
        return result
    batches, count, block, _ = out.shape
    group = min(block, SOFTMAX_TILE // block)
    block_softmax_backward_kernel[(batches * (len(indptr) - 1) * (block // group),)](
        indptr, out, grad, result, len(indptr) - 1, count, scale, BLOCK=block, BLOCK_R=group
    )
    return result


def _stages(dense: Tensor) -> int:
    """Return how many steps are loaded ahead. Shared memory has room for two programs with this many."""
    return 3 if dense.element_size() == 2 else 2


def _warps(tile: int) -> int:
    return 8 if tile >= 128 * 128 else 4


@guarded
@triton.jit
def block_sdd_forward_kernel(
    block_rows_of, indices, a, b, out, count, rows, columns, inner, block_rows, block_columns,
    az, ah, am, ak, bz, bh, bn, bk,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[z, e] = a[z, head, rows of the block] · b[z, head, columns of the block]ᵀ"""
    e = tl.program_id(0) % count
    z = (tl.program_id(0) // count).to(tl.int64)
    block_row = tl.load(block_rows_of + e)
    head = (block_row // block_rows).to(tl.int64)
    place = tl.arange(0, BLOCK)
    r = ((block_row % block_rows) * BLOCK + place).to(tl.int64)
    c = ((tl.load(indices + e) % block_columns) * BLOCK + place).to(tl.int64)
    step = tl.arange(0, BLOCK_K)
    a_tile = a + z * az + head * ah + r[:, None] * am
    b_tile = b + z * bz + head * bh + c[None, :] * bn
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k0 in range(0, inner, BLOCK_K):
        k = (k0 + step).to(tl.int64)
        left = tl.load(a_tile + k[None, :] * ak, mask=(r < rows)[:, None] & (k < inner)[None, :], other=0)
        right = tl.load(b_tile + k[:, None] * bk, mask=(k < inner)[:, None] & (c < columns)[None, :], other=0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    place_out = (z * count + e) * (BLOCK * BLOCK) + place[:, None] * BLOCK + place[None, :]
    tl.store(out + place_out, total.to(out.dtype.element_ty))


@guarded
@triton.jit
def block_dsd_forward_kernel(
    indptr, indices, order, values, x, out, all_block_rows, count, rows, columns, channels,
    block_rows, block_columns, xz, xh, xn, xc, heads,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[z, head, rows of a block row] = Σ block · x[z, head, columns of the block].

    All steps of all blocks, of BLOCK_K columns each, form one loop. The loads of a step then overlap with the product
    of the step before.
    """
    block_row = tl.program_id(0) % all_block_rows
    z = (tl.program_id(0) // all_block_rows).to(tl.int64)
    head = (block_row // block_rows).to(tl.int64)
    place = tl.arange(0, BLOCK)
    r = (block_row % block_rows) * BLOCK + place
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    x_tile = x + z * xz + head * xh + c[None, :] * xc
    steps: tl.constexpr = BLOCK // BLOCK_K
    first = tl.load(indptr + block_row)
    last = tl.load(indptr + block_row + 1)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for i in range(0, (last - first) * steps):
        e = first + i // steps
        k = (i % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        n = (tl.load(indices + e) % block_columns) * BLOCK + k
        if TRANSPOSED:
            at = tl.load(order + e).to(tl.int64)
            inside = k[None, :] * BLOCK + place[:, None]
        else:
            at = e.to(tl.int64)
            inside = place[:, None] * BLOCK + k[None, :]
        # Without a mask, loads are vectorized. Values beyond the edge are multiplied by 0 or not stored.
        left = tl.load(values + (z * count + at) * (BLOCK * BLOCK) + inside)
        right = tl.load(
            x_tile + n.to(tl.int64)[:, None] * xn, mask=(n < columns)[:, None] & (c < channels)[None, :], other=0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    place_out = ((z * heads + head) * rows + r)[:, None] * channels + c[None, :]
    tl.store(out + place_out, total.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < channels)[None, :])


@triton.jit
def _block_softmax_rows(indptr, all_block_rows, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the batch and the block row of a program, the block row's first block and end, and the program's rows."""
    groups: tl.constexpr = BLOCK // BLOCK_R
    program = tl.program_id(0)
    block_row = (program // groups) % all_block_rows
    z = (program // groups // all_block_rows).to(tl.int64)
    row = (program % groups) * BLOCK_R + tl.arange(0, BLOCK_R)
    return z, block_row, tl.load(indptr + block_row), tl.load(indptr + block_row + 1), row


@triton.jit
def _scores(
    indices, scores, bias, key_mask, mask, z, e, r, row, count, rows, columns, block_columns, scale,
    HAS_BIAS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return scale · scores + bias of some rows of block e, −∞ where hidden, which are visible, and their offsets."""
    place = tl.arange(0, BLOCK)
    c = (tl.load(indices + e) % block_columns) * BLOCK + place
    here = (r < rows)[:, None] & (c < columns)[None, :]
    inside = tl.cast(e, tl.int64) * (BLOCK * BLOCK) + row[:, None] * BLOCK + place[None, :]
    if HAS_KEY_MASK:
        here = here & (tl.load(key_mask + z * columns + c, mask=c < columns, other=0) != 0)[None, :]
    if HAS_MASK:
        here = here & (tl.load(mask + inside) != 0)
    # Without a mask, loads are vectorized.
    s = tl.load(scores + z * count * (BLOCK * BLOCK) + inside).to(tl.float32) * scale
    if HAS_BIAS:
        s += tl.load(bias + inside).to(tl.float32)
    return tl.where(here, s, float("-inf")), here, inside


@guarded
@triton.jit
def block_softmax_forward_kernel(
    indptr, indices, scores, bias, key_mask, mask, out, all_block_rows, count, rows, columns,
    block_rows, block_columns, scale,
    HAS_BIAS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute the softmax in two passes over the blocks of a block row.

    The first pass keeps the largest score and the sum of exponentials relative to it, block by block. The second pass
    computes the quotients.
    """
    z, block_row, first, last, row = _block_softmax_rows(indptr, all_block_rows, BLOCK, BLOCK_R)
    r = (block_row % block_rows) * BLOCK + row
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    base = tl.zeros((BLOCK_R,), tl.float32)  # the largest score, or 0 if there is none yet
    total = tl.zeros((BLOCK_R,), tl.float32)
    for e in range(first, last):
        s, _, _ = _scores(
            indices, scores, bias, key_mask, mask, z, e, r, row, count, rows, columns, block_columns, scale,
            HAS_BIAS, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        top = new_top
    inverse = 1 / tl.where(total == 0, 1.0, total)  # NaN if a visible score is NaN or +∞
    for e in range(first, last):
        s, here, inside = _scores(
            indices, scores, bias, key_mask, mask, z, e, r, row, count, rows, columns, block_columns, scale,
            HAS_BIAS, HAS_KEY_MASK, HAS_MASK, BLOCK,
        )  # fmt: skip
        p = tl.where(here, tl.exp(s - base[:, None]) * inverse[:, None], 0.0)
        tl.store(out + z * count * (BLOCK * BLOCK) + inside, p.to(out.dtype.element_ty))


@guarded
@triton.jit
def block_softmax_backward_kernel(
    indptr, out, grad, result, all_block_rows, count, scale, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """result = scale · p ∘ (g − Σ p ∘ g), where p is `out` and g is `grad`."""
    z, _, first, last, row = _block_softmax_rows(indptr, all_block_rows, BLOCK, BLOCK_R)
    inside = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK_R,), tl.float32)
    for e in range(first, last):
        at = (z * count + e) * (BLOCK * BLOCK) + inside
        total += tl.sum(tl.load(out + at).to(tl.float32) * tl.load(grad + at).to(tl.float32), 1)
    for e in range(first, last):
        at = (z * count + e) * (BLOCK * BLOCK) + inside
        p = tl.load(out + at).to(tl.float32)
        d = scale * p * (tl.load(grad + at).to(tl.float32) - total[:, None])
        tl.store(result + at, d.to(result.dtype.element_ty))
