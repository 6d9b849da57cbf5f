"""Matrix products. Those of float32, where tf32 is allowed, take each number as the sum of two of bfloat16:

    x = hi + lo with hi = bfloat16(x), lo = bfloat16(x − hi),  a b ≈ a_hi b_hi + a_hi b_lo + a_lo b_hi

They are added up in float32, so a b is wrong by about 2⁻¹⁷ of |a| |b|, where tf32 would be by 2⁻¹¹. And Hopper's matrix
units take bfloat16 either way round, but tf32 only one: three products are faster than one with a transposition.

PRECISION is "bf16x3" for that, else what `tl.dot` takes; an operand is then both of its parts, and only one is used.

Small matrices that all programs read are split or rounded once, before the launch: what is loaded as it is needed goes
straight to shared memory, where the right factor of a product is taken from; what is computed passes through registers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import cdiv, device_of

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _bfloat16(x):
    if INTERPRETED:
        # The interpreter multiplies no bfloat16 matrices, and cuts numbers off where a GPU rounds them: so they are
        # rounded here, and stay float32.
        x = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def split(x, PRECISION: tl.constexpr):
    """An operand in the two parts that products take."""
    hi = x
    lo = x
    if PRECISION == "bf16x3":
        hi = _bfloat16(x)
        lo = _bfloat16(x - hi.to(tl.float32))
    return hi, lo


@triton.jit
def load(at, apart, mask, PRECISION: tl.constexpr):
    """An operand out of one that `operands` returns; apart: how many elements its parts are from each other"""
    hi = tl.load(at, mask=mask, other=0.0)
    lo = hi
    if PRECISION == "bf16x3":
        lo = tl.load(at + apart, mask=mask, other=0.0)
        if INTERPRETED:
            hi = hi.to(tl.float32)
            lo = lo.to(tl.float32)
    return hi, lo


@triton.jit
def store(at, apart, x, mask):
    """Both parts of bf16x3, for `load`."""
    hi, lo = split(x, "bf16x3")
    tl.store(at, hi.to(tl.bfloat16), mask=mask)
    tl.store(at + apart, lo.to(tl.bfloat16), mask=mask)


@triton.jit
def transposed(a):
    return tl.trans(a[0]), tl.trans(a[1])


@triton.jit
def split_transpose(x, PRECISION: tl.constexpr):
    """xᵀ as an operand, for x from a load. The instruction that does nothing keeps the compiler from loading x in the
    order of the transpose: it would copy words of 4 bytes to few banks of shared memory."""
    if PRECISION == "bf16x3" and not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return transposed(split(x, PRECISION))


@triton.jit
def negated(a):
    return -a[0], -a[1]


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b, in float32; total = None leaves it out. a, b: what `split` returns"""
    if PRECISION == "bf16x3":
        total = tl.dot(a[0], b[1], total, input_precision="ieee")
        total = tl.dot(a[1], b[0], total, input_precision="ieee")
        total = tl.dot(a[0], b[0], total, input_precision="ieee")
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def less_product(a, b, total, PRECISION: tl.constexpr):
    """total − a b. Subtracting afterwards keeps the compiler from running the products of parts without waiting."""
    if PRECISION == "bf16x3":
        total = product(negated(a), b, total, PRECISION)
    else:
        total -= tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def chosen(items, which):
    """The one at a place that only the program knows, of a tuple of a kernel's arguments."""
    item = items[0]
    for i in tl.static_range(1, len(items)):
        item = tl.where(which == i, items[i], item)
    return item


@triton.jit
def _operands_kernel(matrices, outs, sizes, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    matrix = chosen(matrices, tl.program_id(1))
    out = chosen(outs, tl.program_id(1))
    size = chosen(sizes, tl.program_id(1))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(matrix + at, mask=at < size).to(tl.float32)
    if SPLIT:
        store(out + at, size, x, at < size)
    else:
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < size)


def operands(matrices: Sequence[Tensor], dtype: torch.dtype, precision: str) -> list[Tensor]:
    """Small matrices as `load` takes them: contiguous in this dtype or, for bf16x3, (2, …) bfloat16. In one launch."""
    matrices = [matrix.contiguous() for matrix in matrices]
    parts = precision == "bf16x3"
    if any(matrix.dtype != matrices[0].dtype for matrix in matrices):
        matrices = [matrix.to(dtype) for matrix in matrices]
    if not matrices or (matrices[0].dtype == dtype and not parts):
        return matrices
    shapes = [(2, *matrix.shape) if parts else matrix.shape for matrix in matrices]
    kind, device = torch.bfloat16 if parts else dtype, matrices[0].device
    outs = [torch.empty(shape, dtype=kind, device=device) for shape in shapes]
    sizes = [matrix.numel() for matrix in matrices]
    if max(sizes):
        with device_of(matrices[0]):
            _operands_kernel[(cdiv(max(sizes), 1024), len(sizes))](
                tuple(matrices), tuple(outs), tuple(sizes), SPLIT=parts, BLOCK=1024, num_warps=4
            )
    return outs
