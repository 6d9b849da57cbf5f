"""Matrix products. Those of float32, where tf32 is allowed, take each number as the sum of two of bfloat16:

    x = hi + lo with hi = bfloat16(x), lo = bfloat16(x − hi),  a b ≈ a_hi b_hi + a_hi b_lo + a_lo b_hi

They are added up in float32, so a b is wrong by about 2⁻¹⁷ of |a| |b|, where tf32 would be by 2⁻¹¹. And Hopper's matrix
units take bfloat16 either way round, but tf32 only one: three products are faster than one with a transposition.

PRECISION is "bf16x3" for that, else what `tl.dot` takes; an operand is then both of its parts, and only one is used.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

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
def transposed(a):
    return tl.trans(a[0]), tl.trans(a[1])


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
