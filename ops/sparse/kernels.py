"""The Triton kernels for CSR patterns. Imported with the first use, since Triton may be missing.

A program serves a few rows at a time and a tile of channels: the entries of a row lie one after the other, so it steps
through them and for each gathers one row of the dense factor, which is contiguous. Sums are in float32, in the order of
the entries, with no atomics, so results don't change from run to run.

On meshes `spmm` waits for memory three times in a row: for where a row's entries are, for their columns, and for the
rows of the dense factor. Its programs stay and go from tile to tile, and the first two are there a tile ahead.

Rows of more than PIECE entries would keep one program busy while the others are done, so they are left out there and
computed piece by piece, each by a program of its own (`pieces`, see `Pattern.long_pieces`; few or none on a mesh).

Rows may be stored in another order than the matrix has them, see `Pattern.with_row_order`: rows of the dense factors
are wider than a memory access, so reading them once matters, and in which order hardly does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import cdiv, power_of_2, processors
from diffnet.ops.sparse.pattern import PIECE, CsrArrays

MAX_CHANNELS = 128
MAX_ROWS = 256
SOFTMAX_ROWS = 64
WINDOW = 16  # entries of a row that a softmax looks at together; a mesh's rows fit
LONG_WINDOW = 512
PIECE_ENTRIES = 16  # entries of a piece that are gathered together
# Beyond that many sets, their sum is taken after the product rather than inside its unrolled loop.
MAX_UNROLLED_SETS = 8


@dataclass(frozen=True)
class Walk:
    """How `spmm`'s programs, of one warp each, share a multiprocessor: how many it has, with so many registers for each
    thread, and how many entries of a row they gather at the same time, first and then."""

    programs: int
    registers: int
    first: int = 7  # a vertex and its neighbours, on the average mesh
    unroll: int = 2


@dataclass(frozen=True)
class Gathering:
    """How a program of `sddmm` reads the dense factor: so many bytes at a time, for one entry of each of its rows, and
    for so many entries at the same time; and its warps. Powers of two."""

    bytes: int = 4096
    unroll: int = 4
    warps: int = 4


def spmm(
    csr: CsrArrays,
    values: Tensor,
    x: Tensor,
    reduce: bool = False,
    order: Tensor | None = None,
    walk: Walk | None = None,
) -> Tensor:
    """See `reference.spmm`; order (nnz,) is where in values the entries' values are, for a transposed pattern."""
    indptr, indices, pieces, *_ = csr
    sets, rows, channels = len(values), len(indptr) - 1, x.shape[2]
    if reduce and sets > MAX_UNROLLED_SETS:
        return spmm(csr, values, x, False, order, walk).sum(0, keepdim=True)
    out = x.new_empty(1 if reduce else sets, rows, channels)
    if out.numel() == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    values = values if values.stride(1) == 1 else values.contiguous()
    # A program applies two sets to each row it gathers, as gradX and gradY are.
    together = sets if reduce else min(sets, 2) if len(x) == 1 else 1
    groups = 1 if reduce else cdiv(sets, together)
    walk = walk or _walk(x, together, reduce)
    block_c = min(power_of_2(channels), MAX_CHANNELS) // 2 or 1
    block_r = 32 // cdiv(block_c * x.element_size(), 16)  # a thread gathers 16 bytes at a time
    multiprocessors = processors(x)
    programs = min(walk.programs, cdiv(cdiv(rows, block_r), multiprocessors))
    columns = cdiv(channels, 2 * block_c)
    shape = values.stride(0), 0 if len(x) == 1 else x.stride(0)
    flags = {
        "channels": channels, "x_row_stride": x.stride(1),
        "TOGETHER": together, "REDUCE": reduce, "PERMUTED": order is not None, "BLOCK_C": block_c,
    }  # fmt: skip
    entry_order = indices if order is None else order
    _spmm_rows[(groups * multiprocessors * programs, columns)](
        indptr, indices, _order(csr), entry_order, values, x, out, rows, sets, *shape, multiprocessors, programs,
        **_ordered(csr), LONG=PIECE, BLOCK_R=block_r, FIRST=walk.first, UNROLL=walk.unroll, **flags,
        num_warps=1, maxnreg=walk.registers,
    )  # fmt: skip
    if len(pieces) > 0:
        partial = x.new_empty(len(out), len(pieces), channels, dtype=torch.float32)
        _spmm_pieces[(groups * len(pieces), columns)](
            pieces, indices, entry_order, values, x, partial, len(pieces), sets, *shape,
            BLOCK_E=PIECE_ENTRIES, **flags,
        )  # fmt: skip
        _add_pieces[(len(out) * len(pieces), columns)](
            pieces, indptr, partial, out, len(pieces), rows, channels, PIECE=PIECE, BLOCK_C=2 * block_c
        )
    return out


def _walk(x: Tensor, together: int, reduce: bool) -> Walk:
    """Found by `diffnet bench tune-spmm`: registers hold what is on its way; with fewer of them, more programs wait at
    the same time."""
    if reduce:
        return Walk(20, 96, max(8 // together, 1), max(4 // together, 1))
    if x.element_size() == 2:
        return Walk(16, 128) if together == 2 else Walk(20, 96)
    return Walk(24, 80) if together == 2 else Walk(28, 72)


def sddmm(csr: CsrArrays, a: Tensor, b: Tensor, gathering: Gathering = Gathering()) -> Tensor:
    """See `reference.sddmm`."""
    indptr, indices, pieces, *_ = csr
    sets, rows, channels, entries = max(len(a), len(b)), len(indptr) - 1, a.shape[2], len(indices)
    out = a.new_empty(sets, entries)
    if out.numel() == 0:
        return out
    a, b = (t if t.stride(2) == 1 else t.contiguous() for t in (a, b))
    together = min(sets, 2) if len(b) == 1 else 1
    groups = cdiv(sets, together)
    block_r, block_c = _tile(b, gathering)
    strides = [stride for t in (a, b) for stride in (0 if len(t) == 1 else t.stride(0), t.stride(1))]
    flags = {"TOGETHER": together, "ONE_TILE": channels <= block_c, "BLOCK_C": block_c}
    _sddmm_rows[(groups * cdiv(rows, block_r),)](
        indptr, indices, _order(csr), a, b, out, rows, channels, sets, entries, *strides,
        **_ordered(csr), LONG=PIECE, BLOCK_R=block_r, UNROLL=gathering.unroll, **flags,
        num_warps=gathering.warps,
    )  # fmt: skip
    if len(pieces) > 0:
        _sddmm_pieces[(sets * len(pieces),)](
            pieces, indices, a, b, out, len(pieces), channels, entries, *strides,
            BLOCK_E=PIECE_ENTRIES, BLOCK_C=block_c,
        )  # fmt: skip
    return out


def softmax(csr: CsrArrays, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """See `reference.softmax`."""
    indptr, _, pieces, *_ = csr
    scores = scores.contiguous()
    sets, entries = scores.shape
    out = torch.empty_like(scores)
    if out.numel() == 0:
        return out
    rows, block_r = len(indptr) - 1, SOFTMAX_ROWS
    mask = None if mask is None else mask.contiguous()
    taken = scores if mask is None else mask
    shape = (rows, entries, 0 if mask is None or len(mask) == 1 else entries, scale)
    _softmax[(sets * cdiv(rows, block_r),)](
        indptr, pieces, scores, taken, out, *shape,
        HAS_MASK=mask is not None, LONG=PIECE, LONG_ROWS=False, BLOCK_R=block_r, BLOCK_E=WINDOW,
    )  # fmt: skip
    if len(pieces) > 0:
        _softmax[(sets * len(pieces),)](
            indptr, pieces, scores, taken, out, len(pieces), *shape[1:],
            HAS_MASK=mask is not None, LONG=PIECE, LONG_ROWS=True, BLOCK_R=1, BLOCK_E=LONG_WINDOW,
        )  # fmt: skip
    return out


def softmax_backward(csr: CsrArrays, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """See `reference.softmax_backward`."""
    indptr, _, pieces, *_ = csr
    out, grad = out.contiguous(), grad.contiguous()
    sets, entries = out.shape
    result = torch.empty_like(out)
    if result.numel() == 0:
        return result
    rows, block_r = len(indptr) - 1, SOFTMAX_ROWS
    _softmax_backward[(sets * cdiv(rows, block_r),)](
        indptr, pieces, out, grad, result, rows, entries, scale,
        LONG=PIECE, LONG_ROWS=False, BLOCK_R=block_r, BLOCK_E=WINDOW,
    )  # fmt: skip
    if len(pieces) > 0:
        _softmax_backward[(sets * len(pieces),)](
            indptr, pieces, out, grad, result, len(pieces), entries, scale,
            LONG=PIECE, LONG_ROWS=True, BLOCK_R=1, BLOCK_E=LONG_WINDOW,
        )  # fmt: skip
    return result


def _order(csr: CsrArrays) -> Tensor:
    return csr.row_order if len(csr.row_order) > 0 else csr.by_length


def _ordered(csr: CsrArrays) -> dict[str, bool]:
    return {"ORDERED": len(csr.row_order) > 0, "BY_LENGTH": len(csr.by_length) > 0}


def _tile(dense: Tensor, gathering: Gathering) -> tuple[int, int]:
    """Rows and channels of a program."""
    channels = min(power_of_2(dense.shape[2]), MAX_CHANNELS)
    return min(gathering.bytes // (channels * dense.element_size()), MAX_ROWS), channels


# Offsets are 64-bit from the first product on: rows × channels and sets × entries may pass 2³¹.


@triton.jit
def _extent(
    indptr, order, tile, rows, ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The rows of a tile, of which those from `rows` on are none; where their entries start and how many they are; and
    which rows are computed here, which long ones aren't: they count as empty.

    order: of rows, which are stored so (ORDERED), or are stored in their own order and taken so (BY_LENGTH)
    """
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    if BY_LENGTH:
        r = tl.load(order + r, mask=r < rows, other=rows)
    start = tl.load(indptr + r, mask=r < rows, other=0)
    length = tl.load(indptr + r + 1, mask=r < rows, other=0) - start
    if ORDERED:
        r = tl.load(order + r, mask=r < rows, other=rows)
    mine = (r < rows) & (length <= LONG)
    return r, start, tl.where(mine, length, 0), mine


@triton.jit
def _halves(mask, c, channels: tl.constexpr, BLOCK_C: tl.constexpr):
    """A mask of rows for the two stretches of channels that a program serves: c, and those BLOCK_C above."""
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
    """The sums with a row of x, times its value, for each of some entries: low and high channels, first and second set.

    column: the entries' rows of x; second: whether there is a second set
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
    """Nothing is read soon enough that the cache should keep it rather than rows of the dense factor."""
    below, above = _halves(mask, c, channels, BLOCK_C)
    tl.store(at, low.to(at.dtype.element_ty), mask=below, cache_modifier=".cs")
    tl.store(at + BLOCK_C, high.to(at.dtype.element_ty), mask=above, cache_modifier=".cs")


@triton.jit
def _spmm_rows(
    indptr, indices, row_order, order, values, x, out, rows, sets, value_stride, x_set_stride,
    multiprocessors, programs, channels: tl.constexpr, x_row_stride: tl.constexpr,
    TOGETHER: tl.constexpr, REDUCE: tl.constexpr, PERMUTED: tl.constexpr,
    ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FIRST: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[s, r] = Σ values[s, e] x[s, indices[e]] over the entries e of row r, for sets one by one, two by two (which
    share x), or all of them summed (REDUCE)."""
    stride = multiprocessors * programs
    index = tl.program_id(0) % stride
    first = (tl.program_id(0) // stride) * TOGETHER
    # Programs are dealt out to multiprocessors in turn; so those of one take tiles side by side, which share a cache.
    tile = (index % multiprocessors) * programs + index // multiprocessors
    c = tl.program_id(1) * (2 * BLOCK_C) + tl.arange(0, BLOCK_C)
    value_stride = tl.cast(value_stride, tl.int64)
    x_set_stride = tl.cast(x_set_stride, tl.int64)
    values += first * value_stride
    x += first * x_set_stride
    out += first.to(tl.int64) * rows * channels
    above = tl.cast(rows, tl.int64) * channels
    second = first + 1 < sets
    r, start, length, mine = _extent(indptr, row_order, tile, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
    column = tl.load(indices + start, mask=length > 0, other=0)
    r1, start1, length1, mine1 = _extent(indptr, row_order, tile + stride, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
    for ahead in range(tile + 2 * stride, tl.cdiv(rows, BLOCK_R) + 2 * stride, stride):
        # Of the next tile, the first columns, and with them the cache line of the others and where they are beyond.
        column1 = tl.load(indices + start1, mask=length1 > 0, other=0)
        r2, start2, length2, mine2 = _extent(indptr, row_order, ahead, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
        low0 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        high0, low1, high1 = low0, low0, low0
        for j in tl.static_range(FIRST):  # their loads run at the same time
            if j > 0:
                column = tl.load(indices + start + j, mask=j < length, other=0)
            low0, high0, low1, high1 = _add_entries(
                low0, high0, low1, high1, column, start + j, j < length, c, order, values, x,
                value_stride, x_set_stride, second, channels, x_row_stride, TOGETHER, REDUCE, PERMUTED, BLOCK_C,
            )  # fmt: skip
        # Read again, from the nearest cache: Triton 3.6 and 3.7 take the maximum of `length` for what it was at first.
        _, _, same_length, _ = _extent(indptr, row_order, ahead - 2 * stride, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
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


@triton.jit
def _spmm_pieces(
    pieces, indices, order, values, x, partial, count, sets, value_stride, x_set_stride,
    channels: tl.constexpr, x_row_stride: tl.constexpr,
    TOGETHER: tl.constexpr, REDUCE: tl.constexpr, PERMUTED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial[s, p]: the same sum over the entries of piece p only."""
    first = (tl.program_id(0) // count) * TOGETHER
    p = tl.program_id(0) % count
    c = tl.program_id(1) * (2 * BLOCK_C) + tl.arange(0, BLOCK_C)
    start = tl.load(pieces + 4 * p + 2)
    end = tl.load(pieces + 4 * p + 3)
    value_stride = tl.cast(value_stride, tl.int64)
    x_set_stride = tl.cast(x_set_stride, tl.int64)
    values += first * value_stride
    x += first * x_set_stride
    second = first + 1 < sets
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


@triton.jit
def _add_pieces(
    pieces, indptr, partial, out, count, rows, channels, PIECE: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """out[s, r]: the sum of the pieces of the long row r, from first to last. The first piece's program does it."""
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


@triton.jit
def _sddmm_rows(
    indptr, indices, row_order, a, b, out, rows, channels, sets, entries,
    a_set_stride, a_row_stride, b_set_stride, b_row_stride,
    TOGETHER: tl.constexpr, ONE_TILE: tl.constexpr, ORDERED: tl.constexpr, BY_LENGTH: tl.constexpr, LONG: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[s, e] = a[s, r] · b[s, indices[e]] for the entries e of row r, for sets one by one, or two that share b."""
    blocks = tl.cdiv(rows, BLOCK_R)
    first = ((tl.program_id(0) // blocks) * TOGETHER).to(tl.int64)
    r, start, length, _ = _extent(indptr, row_order, tl.program_id(0) % blocks, rows, ORDERED, BY_LENGTH, LONG, BLOCK_R)
    a_rows = a + first * a_set_stride + (r.to(tl.int64) * a_row_stride)[:, None, None]
    second = first + 1 < sets
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


@triton.jit
def _sddmm_pieces(
    pieces, indices, a, b, out, count, channels, entries, a_set_stride, a_row_stride, b_set_stride, b_row_stride,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The same for the entries of one piece of a long row."""
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


@triton.jit
def _rows_of_program(indptr, pieces, rows, LONG: tl.constexpr, LONG_ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The set, first entries and lengths of the rows that a softmax program serves: BLOCK_R rows that aren't long, or
    with LONG_ROWS, where `rows` counts pieces, the long row whose first piece is the program's; lengths of others 0."""
    blocks = tl.cdiv(rows, BLOCK_R)
    s = (tl.program_id(0) // blocks).to(tl.int64)
    r = (tl.program_id(0) % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    if LONG_ROWS:
        at = tl.load(pieces + 4 * r + 1)
        start = tl.load(indptr + at).to(tl.int64)
        length = tl.load(indptr + at + 1).to(tl.int64) - start
        mine = start == tl.load(pieces + 4 * r + 2)
    else:
        start = tl.load(indptr + r, mask=r < rows, other=0).to(tl.int64)
        length = tl.load(indptr + r + 1, mask=r < rows, other=0).to(tl.int64) - start
        mine = length <= LONG
    return s, start, tl.where(mine, length, 0)


@triton.jit
def _softmax(
    indptr, pieces, scores, mask, out, rows, entries, mask_stride, scale,
    HAS_MASK: tl.constexpr, LONG: tl.constexpr, LONG_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Two passes over the entries, of which the second finds those of a short row in the cache: the largest score and
    the sum of exponentials below it, kept up window by window, then the quotients."""
    s, start, length = _rows_of_program(indptr, pieces, rows, LONG, LONG_ROWS, BLOCK_R)
    longest = tl.max(length, 0)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    base = tl.zeros((BLOCK_R,), tl.float32)  # the largest score, or 0 while there is none
    total = tl.zeros((BLOCK_R,), tl.float32)
    for j in range(0, tl.cdiv(longest, BLOCK_E)):
        offset = j * BLOCK_E + tl.arange(0, BLOCK_E)
        here = offset[None, :] < length[:, None]
        entry = start[:, None] + offset[None, :]
        if HAS_MASK:
            here = here & (tl.load(mask + s * mask_stride + entry, mask=here, other=0) != 0)
        x = tl.load(scores + s * entries + entry, mask=here, other=0).to(tl.float32) * scale
        x = tl.where(here, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        top = new_top
    inverse = 1 / tl.where(total > 0, total, 1.0)
    for j in range(0, tl.cdiv(longest, BLOCK_E)):
        offset = j * BLOCK_E + tl.arange(0, BLOCK_E)
        mine = offset[None, :] < length[:, None]
        here = mine
        entry = start[:, None] + offset[None, :]
        if HAS_MASK:
            here = here & (tl.load(mask + s * mask_stride + entry, mask=here, other=0) != 0)
        x = tl.load(scores + s * entries + entry, mask=here, other=0).to(tl.float32) * scale
        p = tl.exp(tl.where(here, x - base[:, None], float("-inf"))) * inverse[:, None]
        tl.store(out + s * entries + entry, p.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _softmax_backward(
    indptr, pieces, out, grad, result, rows, entries, scale,
    LONG: tl.constexpr, LONG_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    s, start, length = _rows_of_program(indptr, pieces, rows, LONG, LONG_ROWS, BLOCK_R)
    longest = tl.max(length, 0)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for j in range(0, tl.cdiv(longest, BLOCK_E)):
        offset = j * BLOCK_E + tl.arange(0, BLOCK_E)
        here = offset[None, :] < length[:, None]
        entry = s * entries + start[:, None] + offset[None, :]
        p = tl.load(out + entry, mask=here, other=0).to(tl.float32)
        g = tl.load(grad + entry, mask=here, other=0).to(tl.float32)
        total += tl.sum(p * g, 1)
    for j in range(0, tl.cdiv(longest, BLOCK_E)):
        offset = j * BLOCK_E + tl.arange(0, BLOCK_E)
        here = offset[None, :] < length[:, None]
        entry = s * entries + start[:, None] + offset[None, :]
        p = tl.load(out + entry, mask=here, other=0).to(tl.float32)
        g = tl.load(grad + entry, mask=here, other=0).to(tl.float32)
        tl.store(result + entry, (scale * p * (g - total[:, None])).to(result.dtype.element_ty), mask=here)
