"""The arithmetic that operations compute in, as PyTorch's own matrix products choose it."""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor

from diffnet.ops.common.backend import KERNEL_DTYPES, Backend, use_triton
from diffnet.ops.common.compiler import constant


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on for the tensors' device, else the widest among theirs."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def use_matrix_kernels(backend: Backend, *tensors: Tensor) -> bool:
    """`use_triton` for kernels that are mostly matrix products: "auto" leaves float32 where tf32 isn't allowed to
    PyTorch, since matrix units don't take it, and without them cuBLAS is hard to beat. Raises ValueError where
    "triton" is asked to compute in float64."""
    if not use_triton(backend, *tensors):
        return False
    dtype = compute_dtype(*tensors)
    if backend == "triton" and dtype not in KERNEL_DTYPES:
        raise ValueError(f"backend 'triton' computes in {', '.join(map(str, KERNEL_DTYPES))}, got {dtype}")
    return backend == "triton" or dtype != torch.float32 or _tf32()


@constant
def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def dot_precision(operand: Tensor) -> Literal["ieee", "bf16x3"]:
    """How kernels multiply float32: `torch.set_float32_matmul_precision` decides, or its newer form
    `torch.backends.cuda.matmul.fp32_precision`. Where they allow tf32, each number is taken as the sum of two bfloat16
    numbers, see `kernels.products`. Narrower operands are taken as they are.
    """
    return "bf16x3" if tf32_precision(operand) == "tf32" else "ieee"


def tf32_precision(operand: Tensor) -> Literal["ieee", "tf32"]:
    """The same for kernels that leave it to the matrix units to cut float32 off to tf32: those on sparse blocks."""
    if operand.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton's interpreter multiplies no bfloat16 matrices; float16 it does")
    return "tf32" if operand.dtype == torch.float32 and _tf32() else "ieee"
