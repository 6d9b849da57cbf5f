"""Cross-entropy of each row of logits, and its gradient, which takes the softmax again rather than keep it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import cdiv, device_of, interpreted, power_of_2

TILE = 2048  # logits that a program holds at once


@triton.jit
def _cross_entropy_kernel(
    logits, labels, grad, out, rows_size, ignored, classes: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
):  # fmt: skip
    """out: losses (rows,), or the gradient of the logits for that of the losses, grad

    Rows are read two or three times, some classes at a time, but only once from further away than the nearest cache.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    some = tl.arange(0, BLOCK_CLASSES)
    there = rows < rows_size
    at = rows[:, None] * classes + some[None, :]
    label = tl.load(labels + rows, mask=there, other=ignored)
    counts = label != ignored

    largest = tl.full((BLOCK_ROWS, BLOCK_CLASSES), -float("inf"), tl.float32)
    for c in range(0, classes, BLOCK_CLASSES):
        largest = tl.maximum(largest, _load(logits, at, c, some, there, classes))
    top = tl.where(there, tl.max(largest, axis=1), 0.0)
    total = tl.zeros((BLOCK_ROWS, BLOCK_CLASSES), tl.float32)
    for c in range(0, classes, BLOCK_CLASSES):
        total += tl.exp(_load(logits, at, c, some, there, classes) - top[:, None])
    totals = tl.where(there, tl.sum(total, axis=1), 1.0)

    if BACKWARD:
        g = tl.where(counts, tl.load(grad + rows, mask=there, other=0.0).to(tl.float32), 0.0)
        for c in range(0, classes, BLOCK_CLASSES):
            softmax = tl.exp(_load(logits, at, c, some, there, classes) - top[:, None]) / totals[:, None]
            chosen = (c + some)[None, :] == label[:, None]
            result = tl.where(counts[:, None], (softmax - chosen.to(tl.float32)) * g[:, None], 0.0)
            inside = there[:, None] & (c + some < classes)[None, :]
            tl.store(out + at + c, result.to(out.dtype.element_ty), mask=inside)
    else:
        # A label of no class has no loss.
        known = (label >= 0) & (label < classes)
        picked = tl.load(logits + rows * classes + label, mask=there & known, other=float("nan")).to(tl.float32)
        loss = tl.log(totals) - (picked - top)
        tl.store(out + rows, tl.where(counts, loss, 0.0), mask=there)


@triton.jit
def _load(logits, at, c, some, there, classes: tl.constexpr):
    inside = there[:, None] & (c + some < classes)[None, :]
    return tl.load(logits + at + c, mask=inside, other=-float("inf")).to(tl.float32)


def _launch(logits: Tensor, labels: Tensor, grad: Tensor | None, out: Tensor, ignored: int) -> None:
    rows, classes = logits.shape
    small = interpreted(logits)
    block_classes = min(power_of_2(classes), 16 if small else 64)
    block_rows = 4 if small else TILE // block_classes
    if logits.numel():
        with device_of(logits):
            _cross_entropy_kernel[(cdiv(rows, block_rows),)](
                logits, labels, logits if grad is None else grad, out, rows, ignored, classes,
                BACKWARD=grad is not None, BLOCK_ROWS=block_rows, BLOCK_CLASSES=block_classes, num_warps=4,
            )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """logits (N, C), labels (N,) int → (N,) float32"""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _launch(logits.contiguous(), labels.contiguous(), None, out, ignored)
    return out


def cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """grad (N,) → (N, C) in the logits' dtype"""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    _launch(logits, labels.contiguous(), grad.contiguous(), out, ignored)
    return out
