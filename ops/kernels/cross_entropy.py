"""Cross-entropy of each row of logits, and its gradient, which takes the softmax again rather than keep it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.kernels.tiling import cdiv, device_of, interpreted, power_of_2

TILE = 4096  # logits that a program holds, or one row


@triton.jit
def _cross_entropy_kernel(
    logits, labels, grad, out, rows_size, ignored, classes: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
):  # fmt: skip
    """out: losses (rows,), or the gradient of the logits for that of the losses, grad"""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_CLASSES)
    there = rows < rows_size
    at = rows[:, None] * classes + c[None, :]
    inside = there[:, None] & (c < classes)[None, :]
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    label = tl.load(labels + rows, mask=there, other=ignored)
    counts = label != ignored
    largest = tl.max(x, axis=1)
    shifted = x - tl.where(there, largest, 0.0)[:, None]
    exponents = tl.exp(shifted)
    total = tl.sum(exponents, axis=1)
    chosen = c[None, :] == label[:, None]
    if BACKWARD:
        g = tl.where(counts, tl.load(grad + rows, mask=there, other=0.0).to(tl.float32), 0.0)
        softmax = exponents / tl.where(there, total, 1.0)[:, None]
        result = tl.where(counts[:, None], (softmax - chosen.to(tl.float32)) * g[:, None], 0.0)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    else:
        picked = tl.sum(tl.where(chosen, shifted, 0.0), axis=1)
        # A label of no class has no loss.
        known = (label >= 0) & (label < classes)
        loss = tl.where(known, tl.log(tl.where(there, total, 1.0)) - picked, float("nan"))
        tl.store(out + rows, tl.where(counts, loss, 0.0), mask=there)


def _launch(logits: Tensor, labels: Tensor, grad: Tensor | None, out: Tensor, ignored: int) -> None:
    rows, classes = logits.shape
    block_classes = power_of_2(classes)
    block_rows = max(1, min(TILE // block_classes, 4 if interpreted(logits) else 64))
    if logits.numel():
        with device_of(logits):
            _cross_entropy_kernel[(cdiv(rows, block_rows),)](
                logits, labels, logits if grad is None else grad, out, rows, ignored, classes,
                BACKWARD=grad is not None, BLOCK_ROWS=block_rows, BLOCK_CLASSES=block_classes,
                num_warps=4 if block_classes <= TILE else 16,
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
