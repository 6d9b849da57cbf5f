"""Matrix products in kernels. On matrix units, a float32 number is the sum of two or three bfloat16 numbers.

PRECISION is "bf16x6" (three parts), "bf16x3" (two parts) or what `tl.dot` takes (one part). An operand is a tuple of
its parts, the largest first. docs/kernels.md explains the parts, their error, and why small matrices are split before
the launch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq, is_cuda

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.precision import empty_operand, part_count
from diffnet.ops.common.tiling import SIZES, cdiv

MAX_MATRICES = 32  # that one launch converts
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _bfloat16(x):
    if INTERPRETED:
        # The interpreter multiplies no bfloat16 matrices, and it truncates where a GPU rounds. So the numbers are
        # rounded here and stay float32.
        x = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _truncated(x):
    """Return the upper 16 bits of x. Rounding would make infinities of the largest numbers."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def split(x, PRECISION: tl.constexpr):
    """Split an operand into the parts that `product` takes."""
    if PRECISION == "bf16x6":
        hi = _truncated(x)
        rest = x - hi
        mid = _bfloat16(rest)
        return _bfloat16(hi), mid, _bfloat16(rest - mid.to(tl.float32))
    elif PRECISION == "bf16x3":  # noqa: RET505 - Triton also compiles code after a return
        hi = _bfloat16(x)
        return hi, _bfloat16(x - hi.to(tl.float32))
    else:
        return (x,)


@triton.jit
def _load_part(at, mask, PRECISION: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0)
    if INTERPRETED and (PRECISION == "bf16x3" or PRECISION == "bf16x6"):
        x = x.to(tl.float32)
    return x


@triton.jit
def load(at, apart, mask, PRECISION: tl.constexpr):
    """Load an operand that `operands` has written. `apart` is the distance between its parts, in elements."""
    hi = _load_part(at, mask, PRECISION)
    if PRECISION == "bf16x6":
        return hi, _load_part(at + apart, mask, PRECISION), _load_part(at + apart + apart, mask, PRECISION)
    elif PRECISION == "bf16x3":  # noqa: RET505 - Triton also compiles code after a return
        return hi, _load_part(at + apart, mask, PRECISION)
    else:
        return (hi,)


@triton.jit
def store(at, apart, x, mask, PRECISION: tl.constexpr):
    """Store x in parts for `load`, or as it is if it has one part."""
    parts = split(x, PRECISION)
    for i in tl.static_range(len(parts)):
        tl.store(at + i * apart, parts[i].to(at.dtype.element_ty), mask=mask)


@triton.jit
def transposed(a):
    if len(a) == 3:
        return tl.trans(a[0]), tl.trans(a[1]), tl.trans(a[2])
    elif len(a) == 2:  # noqa: RET505
        return tl.trans(a[0]), tl.trans(a[1])
    else:
        return (tl.trans(a[0]),)


@triton.jit
def split_transpose(x, PRECISION: tl.constexpr):
    """Return xᵀ as an operand, for x from a load.

    The move instruction changes nothing. It keeps the compiler from loading x in the order of the transpose, which
    would copy words of 4 bytes to few banks of shared memory.
    """
    if (PRECISION == "bf16x3" or PRECISION == "bf16x6") and not INTERPRETED and is_cuda():
        pure: tl.constexpr = cuda_capability_geq(10)  # there, Triton 3.6 and 3.7 pipeline no other instructions
        x = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=pure, pack=1)
    return transposed(split(x, PRECISION))


@triton.jit
def negated(a):
    """Return −a for an operand of two parts. `less_product` subtracts products of the others."""
    return -a[0], -a[1]


@triton.jit
def _product_of_three_parts(a, b):
    """Return a b, to which three parts of a float32 number contribute. The smallest products come first.

    A float32 product of an infinity is infinite. Here its products with the smaller parts may be NaN or have another
    sign, so they don't count unless they are finite.
    """
    y = tl.dot(a[2], b[0])
    y = tl.dot(a[1], b[1], y)
    y = tl.dot(a[0], b[2], y)
    y = tl.dot(a[1], b[0], y)
    y = tl.dot(a[0], b[1], y)
    y = tl.where(tl.abs(y) < float("inf"), y, 0.0)  # false for NaN
    return tl.dot(a[0], b[0], y)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b in float32. total may be None. a and b are operands from `split` or `load`."""
    if PRECISION == "bf16x6":
        # Matrix units cut off bits of a sum. So `total` is added outside of them, where it is rounded.
        y = _product_of_three_parts(a, b)
        if total is None:
            total = y
        else:
            total += y
    elif PRECISION == "bf16x3":
        total = tl.dot(a[0], b[1], total, input_precision="ieee")
        total = tl.dot(a[1], b[0], total, input_precision="ieee")
        total = tl.dot(a[0], b[0], total, input_precision="ieee")
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def less_product(a, b, total, PRECISION: tl.constexpr):
    """Return total − a b. With bf16x3, a is negated: a later subtraction would keep the products from overlapping."""
    if PRECISION == "bf16x6":
        total -= _product_of_three_parts(a, b)
    elif PRECISION == "bf16x3":
        total = product(negated(a), b, total, PRECISION)
    else:
        total -= tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def chosen(items, which):
    """Return items[which] for a tuple of kernel arguments and an index that is known at run time only."""
    item = items[0]
    for i in tl.static_range(1, len(items)):
        item = tl.where(which == i, items[i], item)
    return item


@launched
@triton.jit(do_not_specialize=SIZES)
def operands_forward_kernel(matrices, outs, sizes, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """Convert matrices to parts in the dtype of `outs`. Each row of programs converts one matrix."""
    which = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # the table of many meshes may exceed 2³¹
    size = chosen(sizes, which)
    x = tl.load(chosen(matrices, which) + at, mask=at < size).to(tl.float32)
    store(chosen(outs, which) + at, size, x, at < size, PRECISION)


def operands(matrices: Sequence[Tensor], dtype: torch.dtype, precision: str) -> list[Tensor]:
    """Convert small matrices for `load`, MAX_MATRICES in a launch. See `precision.empty_operand` for the results."""
    matrices = [matrix.contiguous() for matrix in matrices]
    if any(matrix.dtype != matrices[0].dtype for matrix in matrices):
        matrices = [matrix.to(dtype) for matrix in matrices]
    if not matrices or (matrices[0].dtype == dtype and part_count(precision) == 1):
        return matrices
    outs = [empty_operand(matrix, matrix.shape, dtype, precision) for matrix in matrices]
    for first in range(0, len(matrices), MAX_MATRICES):
        part = slice(first, first + MAX_MATRICES)
        sizes = [matrix.numel() for matrix in matrices[part]]
        if max(sizes):
            operands_forward_kernel[(cdiv(max(sizes), 1024), len(sizes))](
                tuple(matrices[part]), tuple(outs[part]), tuple(sizes), PRECISION=precision, BLOCK=1024, num_warps=4
            )
    return outs
