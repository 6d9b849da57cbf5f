"""The arithmetic of an operation, chosen as PyTorch's own matrix products choose it."""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor

from diffnet.ops.common.compiler import constant


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return autocast's dtype if autocast is on for the tensors' device, else the promoted dtype of the tensors."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@constant
def allows_tf32() -> bool:
    """Whether PyTorch may multiply float32 matrices in tf32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def dot_precision(operand: Tensor) -> Literal["ieee", "bf16x3"]:
    """How kernels multiply float32 matrices.

    `torch.set_float32_matmul_precision` decides, or its newer form `torch.backends.cuda.matmul.fp32_precision`. If tf32
    is allowed, each number is taken as the sum of two bfloat16 numbers, see `ops.common.matmul`. Narrower operands are
    multiplied as they are.
    """
    return "bf16x3" if tf32_precision(operand) == "tf32" else "ieee"


def tf32_precision(operand: Tensor) -> Literal["ieee", "tf32"]:
    """The same for kernels on sparse blocks, where the matrix units truncate float32 to tf32."""
    if operand.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton's interpreter multiplies no bfloat16 matrices; use float16 there")
    return "tf32" if operand.dtype == torch.float32 and allows_tf32() else "ieee"
