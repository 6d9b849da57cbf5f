"""Shared parts of the kernels for CSR patterns: the rows of a program.

A program computes a few rows and a tile of channels. The entries of a row are contiguous. The program steps through
them and gathers, for each entry, one row of the dense factor, which is contiguous as well. Sums are in float32 in the
order of the entries and without atomics, so results are the same in every run.

Rows may be stored in another order than their own, see `Pattern.with_row_order`. A row of a dense factor is wider than
a memory access. Reading it only once therefore matters, and the order of reading hardly does.

Offsets are 64-bit from the first product on, because rows × channels and sets × entries may exceed 2³¹.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.sparse.csr import CsrArrays

MAX_CHANNELS = 128  # of a program
PIECE_ENTRIES = 16  # entries of a piece that are gathered together


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
