"""Cross-entropy of each row of logits, and its gradient, which computes the softmax again instead of keeping it.

A program reads its rows two or three times, BLOCK_C classes at a time. Only the first read misses the nearest cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.tiling import SIZES, cdiv, interpreted, power_of_2

TILE = 2048  # logits that a program holds at once


@triton.jit
def _load(logits, at, step, c, live, c_size: tl.constexpr):
    inside = live[:, None] & (step + c < c_size)[None, :]
    return tl.load(logits + at + step, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _softmax_parts(logits, at, c, live, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the largest logit m of each row and Σ exp(z − m)."""
    largest = tl.full((BLOCK_V, BLOCK_C), -float("inf"), tl.float32)
    for step in range(0, c_size, BLOCK_C):
        largest = tl.maximum(largest, _load(logits, at, step, c, live, c_size))
    top = tl.where(live, tl.max(largest, axis=1), 0.0)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, c_size, BLOCK_C):
        total += tl.exp(_load(logits, at, step, c, live, c_size) - top[:, None])
    return top, tl.where(live, tl.sum(total, axis=1), 1.0)


@launched
@triton.jit(do_not_specialize=SIZES)
def cross_entropy_forward_kernel(
    logits, labels, out, rows_size, ignored, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The loss of each row: 0 for an ignored label, NaN for a label out of range."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.arange(0, BLOCK_C)
    live = rows < rows_size
    at = rows[:, None] * c_size + c[None, :]
    label = tl.load(labels + rows, mask=live, other=ignored)
    top, total = _softmax_parts(logits, at, c, live, c_size, BLOCK_V, BLOCK_C)
    known = (label >= 0) & (label < c_size)
    picked = tl.load(logits + rows * c_size + label, mask=live & known, other=float("nan")).to(tl.float32)
    loss = tl.log(total) - (picked - top)
    tl.store(out + rows, tl.where(label != ignored, loss, 0.0), mask=live)


@launched
@triton.jit(do_not_specialize=SIZES)
def cross_entropy_backward_kernel(
    grad, logits, labels, out, rows_size, ignored, c_size: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The gradient of the logits: 0 for an ignored label, NaN for a label out of range."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.arange(0, BLOCK_C)
    live = rows < rows_size
    at = rows[:, None] * c_size + c[None, :]
    label = tl.load(labels + rows, mask=live, other=ignored)
    top, total = _softmax_parts(logits, at, c, live, c_size, BLOCK_V, BLOCK_C)
    counts = label != ignored
    known = (label >= 0) & (label < c_size)
    g = tl.where(counts, tl.load(grad + rows, mask=live, other=0.0).to(tl.float32), 0.0)
    g = tl.where(counts & (known == 0), float("nan"), g)
    for step in range(0, c_size, BLOCK_C):
        softmax = tl.exp(_load(logits, at, step, c, live, c_size) - top[:, None]) / total[:, None]
        chosen = (step + c)[None, :] == label[:, None]
        result = tl.where(counts[:, None], (softmax - chosen.to(tl.float32)) * g[:, None], 0.0)
        inside = live[:, None] & (step + c < c_size)[None, :]
        tl.store(out + at + step, result.to(out.dtype.element_ty), mask=inside)


def _blocks(logits: Tensor) -> tuple[int, int]:
    """The rows and classes of a program's tile."""
    small = interpreted(logits)
    block_c = min(power_of_2(logits.shape[1]), 16 if small else 64)
    return 4 if small else TILE // block_c, block_c


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """logits (N, C), labels (N,) int → (N,) float32"""
    rows, c = logits.shape
    block_v, block_c = _blocks(logits)
    check_rows("cross_entropy", c)  # rows are counted in 64 bits
    check_programs("cross_entropy", cdiv(rows, block_v))
    logits = logits.contiguous()
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        cross_entropy_forward_kernel[(cdiv(rows, block_v),)](
            logits, labels.contiguous(), out, rows, ignored, c, BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4
        )
    return out


def cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """grad (N,) → (N, C) in the logits' dtype"""
    (rows, c), logits = logits.shape, logits.contiguous()
    out = torch.empty_like(logits)
    block_v, block_c = _blocks(logits)
    if logits.numel():
        cross_entropy_backward_kernel[(cdiv(rows, block_v),)](
            grad.contiguous(), logits, labels.contiguous(), out, rows, ignored, c,
            BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out
