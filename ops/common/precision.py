"""The arithmetic of an operation, chosen as PyTorch's own matrix products choose it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from diffnet.ops.common.compiler import constant
from diffnet.ops.common.tiling import multiplies_bfloat16


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that PyTorch's promotion gives for these tensors, with or without autocast."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return autocast's dtype if autocast is on for the tensors' device, else the promoted dtype of the tensors.

    Autocast leaves float64 as it is.
    """
    device = tensors[0].device.type
    is_left = tensors[0].is_meta or any(x.dtype == torch.float64 for x in tensors)
    if not is_left and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return promoted_dtype(*tensors)


def product_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the dtype of a product of two tensors, as of dense products: the promoted one, or autocast's dtype.

    Autocast leaves products of integers and bools as they are.
    """
    dtype = promoted_dtype(a, b)
    return compute_dtype(a, b) if dtype.is_floating_point else dtype


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which plain PyTorch adds up these tensors: the promoted one, but float32 for 16 bits."""
    return torch.promote_types(promoted_dtype(*tensors), torch.float32)


def scipy_array(values: Tensor) -> Any:
    """Return values as an array for SciPy. float16 and bfloat16 become float32, because SciPy has neither."""
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype. This is `x.to(dtype)`, which takes 1 µs of CPU time even if there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


@constant
def allows_tf32() -> bool:
    """Return whether PyTorch may multiply float32 matrices in tf32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def dot_precision(operand: Tensor) -> Literal["ieee", "bf16x3", "bf16x6"]:
    """Return how kernels multiply float32 matrices.

    `torch.set_float32_matmul_precision` decides, or its newer form `torch.backends.cuda.matmul.fp32_precision`. If tf32
    is allowed, each number is the sum of two bfloat16 numbers (bf16x3). If not, it is the sum of three, which is as
    accurate as float32 (bf16x6), see `ops.common.matmul`. Operands of 16 bits are multiplied as they are.
    """
    if operand.dtype != torch.float32:
        return _precision_of_16_bits(operand)
    if allows_tf32():
        return "bf16x3"
    return "bf16x6" if multiplies_bfloat16(operand) else "ieee"


def part_count(precision: str) -> int:
    """Return of how many bfloat16 numbers a number consists in products of this precision; 1 for no parts."""
    return {"bf16x6": 3, "bf16x3": 2}.get(precision, 1)


def empty_operand(like: Tensor, shape: Sequence[int], dtype: torch.dtype, precision: str) -> Tensor:
    """Return an empty tensor for a matrix of this shape as kernels load it (`matmul.load`).

    It has this shape and dtype or, if numbers have several parts, it is (parts, …) bfloat16.
    """
    parts = part_count(precision)
    return like.new_empty(shape, dtype=dtype) if parts == 1 else like.new_empty((parts, *shape), dtype=torch.bfloat16)


def empty_table(evecs: Tensor, d: Tensor, rotation: bool) -> Tensor:
    """Return an empty table of D, P and, with rotations, Q for d (B, K, C), as `empty_operand` does.

    It is what the kernels of gradient features read, in the arithmetic of products with evecs.
    """
    return empty_operand(evecs, (3 if rotation else 2, *d.shape), evecs.dtype, dot_precision(evecs))


def tf32_precision(operand: Tensor) -> Literal["ieee", "tf32"]:
    """Return how kernels on sparse blocks multiply. Their matrix units truncate float32 to tf32 if tf32 is allowed."""
    if operand.dtype != torch.float32:
        return _precision_of_16_bits(operand)
    return "tf32" if allows_tf32() else "ieee"


def _precision_of_16_bits(operand: Tensor) -> Literal["ieee"]:
    if _interpreter() and operand.dtype == torch.bfloat16:
        raise RuntimeError("Triton's interpreter multiplies no bfloat16 matrices; use float16 there")
    return "ieee"


@functools.cache
def _interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which products of tensors on this tensor's device have the dtype of their factors."""
    device = tensor.device.type
    on = not tensor.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


@contextmanager
def ieee_products() -> Iterator[None]:
    """A context in which PyTorch multiplies float32 matrices on a GPU without tf32, even if tf32 is allowed."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if before == "tf32":
        settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        if before == "tf32":
            settings.fp32_precision = before
