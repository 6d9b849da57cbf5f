"""Cross-entropy in plain PyTorch: the CPU path, and the reference for the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffnet.ops.common.precision import sum_dtype


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int = -1) -> Tensor:
    """The loss of each row in float32 or float64. On a GPU, a label out of range gives NaN and no device error."""
    precise = logits.to(sum_dtype(logits))
    labels = labels.long()
    if logits.device.type == "cpu":
        return F.cross_entropy(precise, labels, ignore_index=ignored, reduction="none")
    if logits.shape[1] == 0:  # PyTorch would stop the GPU
        return precise.sum(1) + torch.where(labels == ignored, 0.0, float("nan"))
    known = ((labels >= 0) & (labels < logits.shape[1])) | (labels == ignored)
    losses = F.cross_entropy(precise, torch.where(known, labels, 0), ignore_index=ignored, reduction="none")
    # A product also makes the gradient NaN.
    return losses * torch.where(known, 1.0, float("nan"))
