"""The Triton kernels of softmax over the entries of each row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import guarded
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.tiling import cdiv
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.pattern import PIECE

ROWS = 64  # rows of a program
WINDOW = 16  # entries of a row that are read together; a row of a mesh fits
LONG_WINDOW = 512  # the same for a long row


def softmax(csr: CsrArrays, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute `reference.softmax`."""
    scores = scores.contiguous()
    out, entries = torch.empty_like(scores), scores.shape[1]
    mask = None if mask is None else mask.contiguous()
    mask_stride = 0 if mask is None or len(mask) == 1 else entries
    inputs = [scores, scores if mask is None else mask, out]
    _launch(sparse_softmax_forward_kernel, csr, inputs, [mask_stride, scale], {"HAS_MASK": mask is not None})
    return out


def softmax_backward(csr: CsrArrays, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Compute `reference.softmax_backward`."""
    out = out.contiguous()
    result = torch.empty_like(out)
    _launch(sparse_softmax_backward_kernel, csr, [out, grad.contiguous(), result], [scale], {})
    return result


def _launch(kernel: Any, csr: CsrArrays, tensors: list[Tensor], numbers: list[float], flags: dict[str, bool]) -> None:
    """Launch a kernel for the short rows, and once more if there are long rows."""
    (sets, entries), rows, pieces = tensors[0].shape, len(csr.indptr) - 1, len(csr.long_pieces)
    check_rows("sparse_softmax", rows)
    check_programs("sparse_softmax", sets * max(cdiv(rows, ROWS), pieces))
    for count, long_rows, block_r, window in ((rows, False, ROWS, WINDOW), (pieces, True, 1, LONG_WINDOW)):
        if count > 0 and tensors[0].numel() > 0:
            kernel[(sets * cdiv(count, block_r),)](
                csr.indptr, csr.long_pieces, *tensors, count, entries, *numbers,
                **flags, LONG=PIECE, LONG_ROWS=long_rows, BLOCK_R=block_r, BLOCK_E=window,
            )  # fmt: skip


@triton.jit
def _softmax_rows(indptr, pieces, rows, LONG: tl.constexpr, LONG_ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the set of a program, and the first entries and the lengths of its rows.

    A program computes BLOCK_R rows; long rows get length 0. With LONG_ROWS there is one program for each piece, `rows`
    is the number of pieces, and the program of a row's first piece computes the whole row; the others get length 0.
    """
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


@guarded
@triton.jit
def sparse_softmax_forward_kernel(
    indptr, pieces, scores, mask, out, rows, entries, mask_stride, scale,
    HAS_MASK: tl.constexpr, LONG: tl.constexpr, LONG_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the softmax in two passes over the entries.

    The first pass keeps the largest score and the sum of exponentials relative to it, window by window. The second
    pass computes the quotients; it finds the entries of a short row in the cache.
    """
    s, start, length = _softmax_rows(indptr, pieces, rows, LONG, LONG_ROWS, BLOCK_R)
    longest = tl.max(length, 0)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    base = tl.zeros((BLOCK_R,), tl.float32)  # the largest score, or 0 if there is none yet
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
    inverse = 1 / tl.where(total == 0, 1.0, total)  # NaN if a visible score is NaN or +∞
    for j in range(0, tl.cdiv(longest, BLOCK_E)):
        offset = j * BLOCK_E + tl.arange(0, BLOCK_E)
        mine = offset[None, :] < length[:, None]
        here = mine
        entry = start[:, None] + offset[None, :]
        if HAS_MASK:
            here = here & (tl.load(mask + s * mask_stride + entry, mask=here, other=0) != 0)
        x = tl.load(scores + s * entries + entry, mask=here, other=0).to(tl.float32) * scale
        p = tl.exp(tl.where(here, x - base[:, None], float("-inf"))) * inverse[:, None]
        p = tl.where(here, p, 0.0)  # hidden entries of a row with NaN
        tl.store(out + s * entries + entry, p.to(out.dtype.element_ty), mask=mine)


@guarded
@triton.jit
def sparse_softmax_backward_kernel(
    indptr, pieces, out, grad, result, rows, entries, scale,
    LONG: tl.constexpr, LONG_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """result = scale · p ∘ (g − Σ p ∘ g), where p is `out` and g is `grad`."""
    s, start, length = _softmax_rows(indptr, pieces, rows, LONG, LONG_ROWS, BLOCK_R)
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
