"""The Triton kernels of dense times dense at the entries of a pattern, see `spmm_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import guarded
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.tiling import cdiv, power_of_2
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.pattern import PIECE
from diffnet.ops.sparse.spmm_kernels import (
    MAX_CHANNELS,
    PIECE_ENTRIES,
    has_second,
    order_flags,
    row_extent,
    stored_order,
)

MAX_ROWS = 256

# How a program reads the dense factor: the bytes that it reads at a time, for one entry of each row, and the number of
# entries of a row that it gathers at the same time. Both are powers of two.
GATHERED_BYTES = 4096
GATHERED_ENTRIES = 4
WARPS = 4


def sddmm(csr: CsrArrays, a: Tensor, b: Tensor) -> Tensor:
    """Compute `reference.sddmm`."""
    indptr, indices, pieces, *_ = csr
    sets, rows, channels, entries = max(len(a), len(b)), len(indptr) - 1, a.shape[2], len(indices)
    together = min(sets, 2) if len(b) == 1 else 1
    groups = cdiv(sets, together)
    block_r, block_c = _tile_sizes(b)
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


def _tile_sizes(dense: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and channels of a program."""
    channels = min(power_of_2(dense.shape[2]), MAX_CHANNELS)
    return min(GATHERED_BYTES // (channels * dense.element_size()), MAX_ROWS), channels


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
