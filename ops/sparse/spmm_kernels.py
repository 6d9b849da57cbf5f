"""The Triton kernels of sparse times dense, and of dense times dense at the entries of a pattern.

A program computes a few rows and a tile of channels. The entries of a row are contiguous. The program steps through
them and gathers, for each entry, one row of the dense factor, which is contiguous as well. Sums are in float32 in the
order of the entries and without atomics, so results are the same in every run.

Rows may be stored in another order than their own, see `Pattern.with_row_order`. A row of a dense factor is wider than
a memory access. Reading it only once therefore matters, and the order of reading hardly does.

Offsets are 64-bit from the first product on, because rows × channels and sets × entries may exceed 2³¹.

On meshes, a program waits for memory three times in a row: for the extents of rows, for the columns of their entries,
and for the rows of the dense factor. Programs therefore go from tile to tile and load the first two a tile ahead.

A row of more than PIECE entries would keep one program busy after all others are done. Such rows are divided into
pieces, each computed by its own program, see `Pattern.long_pieces`. Meshes have few or none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import guarded
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.tiling import cdiv, nvidia_options, power_of_2, processors
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.pattern import PIECE

MAX_CHANNELS = 128  # of a program
PIECE_ENTRIES = 16  # entries of a piece that are gathered together

MAX_ROWS = 256  # of a program of `sddmm`

# How a program reads the dense factor: the bytes that it reads at a time, for one entry of each row, and the number of
# entries of a row that it gathers at the same time. Both are powers of two.
GATHERED_BYTES = 4096
GATHERED_ENTRIES = 4
WARPS = 4

# For more sets, the sum over the sets follows the product instead of being part of its unrolled loop.
MAX_UNROLLED_SETS = 8


def stored_order(csr: CsrArrays) -> Tensor:
    """Return the order that `row_extent` reads; empty if there is none."""
    return csr.row_order if len(csr.row_order) > 0 else csr.by_length


def order_flags(csr: CsrArrays) -> dict[str, bool]:
    """Return the flags of `row_extent`."""
    return {"ORDERED": len(csr.row_order) > 0, "BY_LENGTH": len(csr.by_length) > 0}


@triton.jit
def row_extent(
    indptr, order, tile, rows, ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the rows of a tile, their first entries, their lengths, and a mask of the rows to compute.

    Numbers from `rows` on are no rows. Long rows are computed in pieces, so here they are masked out and have length 0.

    order: with ORDERED, rows are stored in this order. With BY_LENGTH, rows are stored in their own order and taken in
        this one.
    """
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    if BY_LENGTH:
        r = tl.load(order + r, mask=r < rows, other=rows).to(tl.int32)
    start = tl.load(indptr + r, mask=r < rows, other=0)
    length = tl.load(indptr + r + 1, mask=r < rows, other=0) - start
    if ORDERED:
        r = tl.load(order + r, mask=r < rows, other=rows).to(tl.int32)
    mine = (r < rows) & (length <= LONG)
    return r, start, tl.where(mine, length, 0), mine


@triton.jit
def has_second(first, sets):
    """Return whether there is a set after the first one, (1,). The interpreter of Triton 3.9 reads scalars as int32."""
    return tl.full((1,), 1, tl.int32) + first < sets


class Walk(NamedTuple):
    """How the programs of `spmm`, of one warp each, share a multiprocessor.

    programs: the number of programs per multiprocessor
    registers: the number of registers per thread
    first, unroll: how many entries of a row are gathered at the same time, in the first step and in later ones
    """

    programs: int
    registers: int
    first: int = 7  # a vertex and its neighbors, on an average mesh
    unroll: int = 2


def spmm(csr: CsrArrays, values: Tensor, x: Tensor, reduce: bool = False, order: Tensor | None = None) -> Tensor:
    """Compute `reference.spmm`.

    order: (nnz,) for a transposed pattern, the position in `values` of each entry
    """
    indptr, indices, pieces, *_ = csr
    sets, rows, channels = len(values), len(indptr) - 1, x.shape[2]
    if reduce and sets > MAX_UNROLLED_SETS:
        return spmm(csr, values, x, False, order).sum(0, keepdim=True)
    # A program applies two sets, such as gradX and gradY, to each row that it gathers.
    together = sets if reduce else min(sets, 2) if len(x) == 1 else 1
    groups = 1 if reduce else cdiv(sets, together)
    walk = _walk(x, together, reduce, order is not None and len(stored_order(csr)) > 0)
    block_c = min(power_of_2(channels), MAX_CHANNELS) // 2 or 1
    block_r = 32 // cdiv(block_c * x.element_size(), 16)  # a thread gathers 16 bytes at a time
    multiprocessors = processors(x)
    programs = min(walk.programs, cdiv(cdiv(rows, block_r), multiprocessors))
    columns = cdiv(channels, 2 * block_c)
    check_rows("spmm", rows, x.shape[1])
    check_programs("spmm", max(groups * multiprocessors * programs, sets * len(pieces)), columns)
    out = x.new_empty(1 if reduce else sets, rows, channels)
    if out.numel() == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    values = values if values.stride(1) == 1 else values.contiguous()
    shape = values.stride(0), 0 if len(x) == 1 else x.stride(0)
    flags = {
        "channels": channels, "x_row_stride": x.stride(1),
        "TOGETHER": together, "REDUCE": reduce, "PERMUTED": order is not None, "BLOCK_C": block_c,
    }  # fmt: skip
    entry_order = indices if order is None else order
    spmm_forward_rows_kernel[(groups * multiprocessors * programs, columns)](
        indptr, indices, stored_order(csr), entry_order, values, x, out, rows, sets, *shape, multiprocessors, programs,
        **order_flags(csr), LONG=PIECE, BLOCK_R=block_r, FIRST=walk.first, UNROLL=walk.unroll, **flags,
        num_warps=1, **nvidia_options(maxnreg=walk.registers),
    )  # fmt: skip
    if len(pieces) > 0:
        partial = x.new_empty(len(out), len(pieces), channels, dtype=torch.float32)
        spmm_forward_pieces_kernel[(groups * len(pieces), columns)](
            pieces, indices, entry_order, values, x, partial, len(pieces), sets, *shape,
            BLOCK_E=PIECE_ENTRIES, **flags,
        )  # fmt: skip
        spmm_forward_add_pieces_kernel[(len(out) * len(pieces), columns)](
            pieces, indptr, partial, out, len(pieces), rows, channels, PIECE=PIECE, BLOCK_C=2 * block_c
        )
    return out


def _walk(x: Tensor, together: int, reduce: bool, ordered: bool) -> Walk:
    """Return the best that measurements found, see `benchmarks/results/sparse-h200/tiles`.

    Registers hold the loads in flight. With fewer registers, more programs wait for memory at the same time.

    ordered: whether both rows and entries have an order, which takes more registers
    """
    if reduce:
        return Walk(20, 96, max(8 // together, 1), max(4 // together, 1))
    if x.element_size() == 2 or (ordered and together == 1):
        return Walk(16, 128) if together == 2 else Walk(20, 96)
    return Walk(24, 80) if together == 2 else Walk(28, 72)


@triton.jit
def _halves(mask, c, channels: tl.constexpr, BLOCK_C: tl.constexpr):
    """Extend a mask of rows to the two ranges of channels that a program computes: c, and c + BLOCK_C."""
    low = mask
    high = mask
    if channels % (2 * BLOCK_C) != 0:
        low = mask & (c < channels)[None, :]
        high = mask & (c + BLOCK_C < channels)[None, :]
    return low, high


@triton.jit
def _add_entries(
    low0, high0, low1, high1, column, entry, here, c, order, values, x, value_stride, x_set_stride, second,
    channels: tl.constexpr, x_row_stride: tl.constexpr,
    TOGETHER: tl.constexpr, REDUCE: tl.constexpr, PERMUTED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the products of some entries to the sums for low and high channels, of the first and the second set.

    Each product is the value of an entry times a row of x.

    column: the rows of x
    second: whether there is a second set
    """
    if PERMUTED:
        entry = tl.load(order + entry, mask=here, other=0)
    at = x + c[None, :] + (column.to(tl.int64) * x_row_stride)[:, None]
    low, high = _halves(here[:, None], c, channels, BLOCK_C)
    if REDUCE:
        for s in tl.static_range(TOGETHER):
            v = tl.load(values + s * value_stride + entry, mask=here, other=0).to(tl.float32)[:, None]
            low0 += v * tl.load(at + s * x_set_stride, mask=low, other=0).to(tl.float32)
            high0 += v * tl.load(at + s * x_set_stride + BLOCK_C, mask=high, other=0).to(tl.float32)
    else:
        gathered_low = tl.load(at, mask=low, other=0).to(tl.float32)
        gathered_high = tl.load(at + BLOCK_C, mask=high, other=0).to(tl.float32)
        v = tl.load(values + entry, mask=here, other=0).to(tl.float32)[:, None]
        low0 += v * gathered_low
        high0 += v * gathered_high
        if TOGETHER == 2:
            v = tl.load(values + value_stride + entry, mask=here & second, other=0).to(tl.float32)[:, None]
            low1 += v * gathered_low
            high1 += v * gathered_high
    return low0, high0, low1, high1


@triton.jit
def _store_halves(at, low, high, mask, c, channels: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store sums past the cache, which should keep the rows of the dense factor instead."""
    below, above = _halves(mask, c, channels, BLOCK_C)
    tl.store(at, low.to(at.dtype.element_ty), mask=below, cache_modifier=".cs")
    tl.store(at + BLOCK_C, high.to(at.dtype.element_ty), mask=above, cache_modifier=".cs")


@guarded
@triton.jit
def spmm_forward_rows_kernel(
    indptr, indices, row_order, order, values, x, out, rows, sets, value_stride, x_set_stride,
    multiprocessors, programs, channels: tl.constexpr, x_row_stride: tl.constexpr,
    TOGETHER: tl.constexpr, REDUCE: tl.constexpr, PERMUTED: tl.constexpr,
    ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FIRST: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[s, r] = Σ values[s, e] x[s, indices[e]] over the entries e of row r.

    A program computes one set, two sets that share x (TOGETHER), or the sum of all sets (REDUCE).
    """
    stride = multiprocessors * programs
    index = tl.program_id(0) % stride
    first = (tl.program_id(0) // stride) * TOGETHER
    # The GPU assigns programs to multiprocessors in turn. The programs of one multiprocessor take neighboring tiles,
    # so that they share its cache.
    tile = (index % multiprocessors) * programs + index // multiprocessors
    c = tl.program_id(1) * (2 * BLOCK_C) + tl.arange(0, BLOCK_C)
    value_stride = tl.cast(value_stride, tl.int64)
    x_set_stride = tl.cast(x_set_stride, tl.int64)
    values += first * value_stride
    x += first * x_set_stride
    out += first.to(tl.int64) * rows * channels
    above = tl.cast(rows, tl.int64) * channels
    second = has_second(first, sets)
    r, start, length, mine = row_extent(indptr, row_order, tile, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
    column = tl.load(indices + start, mask=length > 0, other=0)
    r1, start1, length1, mine1 = row_extent(indptr, row_order, tile + stride, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
    for ahead in range(tile + 2 * stride, tl.cdiv(rows, BLOCK_R) + 2 * stride, stride):
        # Load the first columns of the next tile, which brings in the cache line of its other columns, and the extent
        # of the tile after that.
        column1 = tl.load(indices + start1, mask=length1 > 0, other=0)
        r2, start2, length2, mine2 = row_extent(indptr, row_order, ahead, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
        low0 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        high0, low1, high1 = low0, low0, low0
        for j in tl.static_range(FIRST):  # unrolled, so that their loads overlap
            if j > 0:
                column = tl.load(indices + start + j, mask=j < length, other=0)
            low0, high0, low1, high1 = _add_entries(
                low0, high0, low1, high1, column, start + j, j < length, c, order, values, x,
                value_stride, x_set_stride, second, channels, x_row_stride, TOGETHER, REDUCE, PERMUTED, BLOCK_C,
            )  # fmt: skip
        # Read the lengths again, from the nearest cache: Triton 3.6 and 3.7 hoist the maximum of `length` out of the
        # loop, where it is the maximum of the first tile.
        _, _, same_length, _ = row_extent(
            indptr, row_order, ahead - 2 * stride, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R
        )
        for j0 in range(FIRST, tl.max(same_length, 0), UNROLL):
            for u in tl.static_range(UNROLL):
                here = j0 + u < length
                column = tl.load(indices + start + j0 + u, mask=here, other=0)
                low0, high0, low1, high1 = _add_entries(
                    low0, high0, low1, high1, column, start + j0 + u, here, c, order, values, x,
                    value_stride, x_set_stride, second, channels, x_row_stride, TOGETHER, REDUCE, PERMUTED, BLOCK_C,
                )  # fmt: skip
        at = out + (r.to(tl.int64) * channels)[:, None] + c[None, :]
        _store_halves(at, low0, high0, mine[:, None], c, channels, BLOCK_C)
        if TOGETHER == 2 and not REDUCE:
            _store_halves(at + above, low1, high1, mine[:, None] & second, c, channels, BLOCK_C)
        r, start, length, mine, column = r1, start1, length1, mine1, column1
        r1, start1, length1, mine1 = r2, start2, length2, mine2


@guarded
@triton.jit
def spmm_forward_pieces_kernel(
    pieces, indices, order, values, x, partial, count, sets, value_stride, x_set_stride,
    channels: tl.constexpr, x_row_stride: tl.constexpr,
    TOGETHER: tl.constexpr, REDUCE: tl.constexpr, PERMUTED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial[s, p] = the sum of `spmm_forward_rows_kernel` over the entries of piece p only."""
    first = (tl.program_id(0) // count) * TOGETHER
    p = tl.program_id(0) % count
    c = tl.program_id(1) * (2 * BLOCK_C) + tl.arange(0, BLOCK_C)
    start = tl.load(pieces + 4 * p + 2)
    end = tl.load(pieces + 4 * p + 3)
    value_stride = tl.cast(value_stride, tl.int64)
    x_set_stride = tl.cast(x_set_stride, tl.int64)
    values += first * value_stride
    x += first * x_set_stride
    second = has_second(first, sets)
    low0 = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    high0, low1, high1 = low0, low0, low0
    for j in range(0, tl.cdiv(end - start, BLOCK_E)):
        entry = start + j * BLOCK_E + tl.arange(0, BLOCK_E)
        column = tl.load(indices + entry, mask=entry < end, other=0)
        low0, high0, low1, high1 = _add_entries(
            low0, high0, low1, high1, column, entry, entry < end, c, order, values, x,
            value_stride, x_set_stride, second, channels, x_row_stride, TOGETHER, REDUCE, PERMUTED, BLOCK_C,
        )  # fmt: skip
    at = partial + ((first.to(tl.int64) * count + p) * channels + c)[None, :]
    there = tl.full((1, 1), 1, tl.int1)
    _store_halves(at, tl.sum(low0, 0)[None, :], tl.sum(high0, 0)[None, :], there, c, channels, BLOCK_C)
    if TOGETHER == 2 and not REDUCE:
        at += tl.cast(count, tl.int64) * channels
        _store_halves(at, tl.sum(low1, 0)[None, :], tl.sum(high1, 0)[None, :], there & second, c, channels, BLOCK_C)


@guarded
@triton.jit
def spmm_forward_add_pieces_kernel(
    pieces, indptr, partial, out, count, rows, channels, PIECE: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """out[s, r] = the sum of the pieces of the long row r, in order. The program of its first piece computes it."""
    s = (tl.program_id(0) // count).to(tl.int64)
    p = tl.program_id(0) % count
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(pieces + 4 * p)
    at = tl.load(pieces + 4 * p + 1)
    start = tl.load(indptr + at)
    if tl.load(pieces + 4 * p + 2) == start:
        total = tl.zeros((BLOCK_C,), tl.float32)
        for q in range(p, p + tl.cdiv(tl.load(indptr + at + 1) - start, PIECE)):
            total += tl.load(partial + (s * count + q) * channels + c, mask=c < channels, other=0)
        tl.store(out + (s * rows + row) * channels + c, total.to(out.dtype.element_ty), mask=c < channels)


def sddmm(csr: CsrArrays, a: Tensor, b: Tensor) -> Tensor:
    """Compute `reference.sddmm`."""
    indptr, indices, pieces, *_ = csr
    sets, rows, channels, entries = max(len(a), len(b)), len(indptr) - 1, a.shape[2], len(indices)
    together = min(sets, 2) if len(b) == 1 else 1
    groups = cdiv(sets, together)
    block_c = min(power_of_2(channels), MAX_CHANNELS)
    block_r = min(GATHERED_BYTES // (block_c * b.element_size()), MAX_ROWS)
    check_rows("sddmm", rows, b.shape[1])
    check_programs("sddmm", max(groups * cdiv(rows, block_r), sets * len(pieces)))
    out = a.new_empty(sets, entries)
    if out.numel() == 0:
        return out
    a, b = (t if t.stride(2) == 1 else t.contiguous() for t in (a, b))
    strides = [stride for t in (a, b) for stride in (0 if len(t) == 1 else t.stride(0), t.stride(1))]
    flags = {"TOGETHER": together, "ONE_TILE": channels <= block_c, "BLOCK_C": block_c}
    sddmm_forward_rows_kernel[(groups * cdiv(rows, block_r),)](
        indptr, indices, stored_order(csr), a, b, out, rows, channels, sets, entries, *strides,
        **order_flags(csr), LONG=PIECE, BLOCK_R=block_r, UNROLL=GATHERED_ENTRIES, **flags,
        num_warps=WARPS,
    )  # fmt: skip
    if len(pieces) > 0:
        sddmm_forward_pieces_kernel[(sets * len(pieces),)](
            pieces, indices, a, b, out, len(pieces), channels, entries, *strides,
            BLOCK_E=PIECE_ENTRIES, BLOCK_C=block_c,
        )  # fmt: skip
    return out


@guarded
@triton.jit
def sddmm_forward_rows_kernel(
    indptr, indices, row_order, a, b, out, rows, channels, sets, entries,
    a_set_stride, a_row_stride, b_set_stride, b_row_stride,
    TOGETHER: tl.constexpr, ONE_TILE: tl.constexpr, ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[s, e] = a[s, r] · b[s, indices[e]] for the entries e of row r.

    A program computes one set, or two sets that share b (TOGETHER).
    """
    blocks = tl.cdiv(rows, BLOCK_R)
    first = ((tl.program_id(0) // blocks) * TOGETHER).to(tl.int64)
    r, start, length, _ = row_extent(
        indptr, row_order, tl.program_id(0) % blocks, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R
    )
    a_rows = a + first * a_set_stride + (r.to(tl.int64) * a_row_stride)[:, None, None]
    second = has_second(first, sets)
    c = tl.arange(0, BLOCK_C)[None, None, :]
    tile = (r < rows)[:, None, None] & (c < channels)
    if ONE_TILE:
        a0 = tl.load(a_rows + c, mask=tile, other=0).to(tl.float32)
        if TOGETHER == 2:
            a1 = tl.load(a_rows + a_set_stride + c, mask=tile & second, other=0).to(tl.float32)
    for j0 in range(0, tl.max(length, 0), UNROLL):
        j = j0 + tl.arange(0, UNROLL)[None, :]
        here = j < length[:, None]
        entry = start[:, None] + j
        row = b + first * b_set_stride + tl.load(indices + entry, mask=here, other=0).to(tl.int64) * b_row_stride
        dot0 = tl.zeros((BLOCK_R, UNROLL), tl.float32)
        dot1 = tl.zeros((BLOCK_R, UNROLL), tl.float32)
        if ONE_TILE:
            gathered = tl.load(row[:, :, None] + c, mask=here[:, :, None] & (c < channels), other=0).to(tl.float32)
            dot0 = tl.sum(a0 * gathered, 2)
            if TOGETHER == 2:
                dot1 = tl.sum(a1 * gathered, 2)
        else:
            for c0 in range(0, channels, BLOCK_C):
                k = c0 + c
                tile = (r < rows)[:, None, None] & (k < channels)
                gathered = tl.load(row[:, :, None] + k, mask=here[:, :, None] & (k < channels), other=0).to(tl.float32)
                dot0 += tl.sum(tl.load(a_rows + k, mask=tile, other=0).to(tl.float32) * gathered, 2)
                if TOGETHER == 2:
                    left = tl.load(a_rows + a_set_stride + k, mask=tile & second, other=0).to(tl.float32)
                    dot1 += tl.sum(left * gathered, 2)
        place = out + first * entries + entry
        tl.store(place, dot0.to(out.dtype.element_ty), mask=here)
        if TOGETHER == 2:
            tl.store(place + entries, dot1.to(out.dtype.element_ty), mask=here & second)


@guarded
@triton.jit
def sddmm_forward_pieces_kernel(
    pieces, indices, a, b, out, count, channels, entries, a_set_stride, a_row_stride, b_set_stride, b_row_stride,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the products of `sddmm_forward_rows_kernel` for the entries of one piece of a long row."""
    s = (tl.program_id(0) // count).to(tl.int64)
    p = tl.program_id(0) % count
    a_row = a + s * a_set_stride + tl.load(pieces + 4 * p) * a_row_stride
    start = tl.load(pieces + 4 * p + 2)
    end = tl.load(pieces + 4 * p + 3)
    for j in range(0, tl.cdiv(end - start, BLOCK_E)):
        entry = start + j * BLOCK_E + tl.arange(0, BLOCK_E)
        here = entry < end
        row = b + s * b_set_stride + tl.load(indices + entry, mask=here, other=0).to(tl.int64) * b_row_stride
        dot = tl.zeros((BLOCK_E,), tl.float32)
        for c0 in range(0, channels, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            left = tl.load(a_row + c, mask=c < channels, other=0).to(tl.float32)
            tile = here[:, None] & (c < channels)[None, :]
            dot += tl.sum(left[None, :] * tl.load(row[:, None] + c[None, :], mask=tile, other=0).to(tl.float32), 1)
        tl.store(out + s * entries + entry, dot.to(out.dtype.element_ty), mask=here)
