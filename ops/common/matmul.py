"""Matrix products in kernels. If tf32 is allowed, float32 numbers are split into two bfloat16 numbers (bf16x3).

PRECISION is "bf16x3" or what `tl.dot` takes. An operand is always a pair (hi, lo); only bf16x3 uses lo.
docs/kernels.md explains the split, its error, and why small matrices are split before the launch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import SIZES, cdiv, device_of
from diffnet.ops.common.launcher import launched

_MOST_MATRICES = 32  # that one launch converts
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
def split(x, PRECISION: tl.constexpr):
    """Split an operand into the pair that `product` takes."""
    hi = x
    lo = x
    if PRECISION == "bf16x3":
        hi = _bfloat16(x)
        lo = _bfloat16(x - hi.to(tl.float32))
    return hi, lo


@triton.jit
def load(at, apart, mask, PRECISION: tl.constexpr):
    """Load an operand that `operands` has written. `apart` is the distance between hi and lo, in elements."""
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
    """Store x as hi and lo of bf16x3, for `load`."""
    hi, lo = split(x, "bf16x3")
    tl.store(at, hi.to(tl.bfloat16), mask=mask)
    tl.store(at + apart, lo.to(tl.bfloat16), mask=mask)


@triton.jit
def transposed(a):
    return tl.trans(a[0]), tl.trans(a[1])


@triton.jit
def split_transpose(x, PRECISION: tl.constexpr):
    """Return xᵀ as an operand, for x from a load.

    The move instruction changes nothing. It keeps the compiler from loading x in the order of the transpose, which
    would copy words of 4 bytes to few banks of shared memory.
    """
    if PRECISION == "bf16x3" and not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return transposed(split(x, PRECISION))


@triton.jit
def negated(a):
    return -a[0], -a[1]


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b in float32. total may be None. a and b are pairs from `split` or `load`."""
    if PRECISION == "bf16x3":
        total = tl.dot(a[0], b[1], total, input_precision="ieee")
        total = tl.dot(a[1], b[0], total, input_precision="ieee")
        total = tl.dot(a[0], b[0], total, input_precision="ieee")
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def less_product(a, b, total, PRECISION: tl.constexpr):
    """Return total − a b. With bf16x3, a is negated: a later subtraction would keep the products from overlapping."""
    if PRECISION == "bf16x3":
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
def operands_forward_kernel(matrices, outs, sizes, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Convert one matrix of a tuple per program row: to `out`'s dtype, or to hi and lo (SPLIT)."""
    matrix = chosen(matrices, tl.program_id(1))
    out = chosen(outs, tl.program_id(1))
    size = chosen(sizes, tl.program_id(1))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # the table of many meshes may exceed 2³¹
    x = tl.load(matrix + at, mask=at < size).to(tl.float32)
    if SPLIT:
        store(out + at, size, x, at < size)
    else:
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < size)


class _Converted(threading.local):
    """What `converted_together` has converted in this thread: the dtype and precision, and by the id of each matrix
    its version and the result."""

    kind: tuple[torch.dtype, str] | None = None
    results: dict[int, tuple[int, Tensor]] = {}  # noqa: RUF012 - never changed, only replaced


_CONVERTED = _Converted()


@contextmanager
def converted_together(matrices: Sequence[Tensor], dtype: torch.dtype, precision: str) -> Iterator[None]:
    """Convert matrices as `operands` does. In the block and in this thread, `operands` returns these conversions."""
    before = _CONVERTED.kind, _CONVERTED.results
    outs: list[Tensor] = []
    for first in range(0, len(matrices), _MOST_MATRICES):
        outs += operands(matrices[first : first + _MOST_MATRICES], dtype, precision)
    _CONVERTED.results = {id(x): (x._version, out) for x, out in zip(matrices, outs, strict=True)}
    _CONVERTED.kind = dtype, precision
    try:
        yield
    finally:
        _CONVERTED.kind, _CONVERTED.results = before


def _known(matrices: Sequence[Tensor], dtype: torch.dtype, precision: str) -> list[Tensor] | None:
    """The conversions of `converted_together`, or None if some are missing or of matrices that have changed since."""
    if _CONVERTED.kind != (dtype, precision):
        return None
    outs = []
    for matrix in matrices:
        version, out = _CONVERTED.results.get(id(matrix), (-1, matrix))
        if version == -1 or version != matrix._version:
            return None
        outs.append(out.detach())  # a new object, because autograd writes to the outputs of an operator
    return outs


def operands(matrices: Sequence[Tensor], dtype: torch.dtype, precision: str) -> list[Tensor]:
    """Convert small matrices to what `load` takes, in one launch.

    They become contiguous tensors of this dtype or, for bf16x3, bfloat16 tensors (2, …) that hold hi and lo.
    """
    known = _known(matrices, dtype, precision)
    if known is not None:
        return known
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
            operands_forward_kernel[(cdiv(max(sizes), 1024), len(sizes))](
                tuple(matrices), tuple(outs), tuple(sizes), SPLIT=parts, BLOCK=1024, num_warps=4
            )
    return outs
