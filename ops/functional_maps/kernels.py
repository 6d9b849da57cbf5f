"""Inverse Cholesky factors of many small matrices, one program for each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs
from diffnet.ops.common.tiling import SIZES

BLOCK = 32


@launched
@triton.jit(do_not_specialize=SIZES)
def functional_map_forward_factor_kernel(matrices, out, rows_size, plane_rows, BLOCK: tl.constexpr):
    """L⁻¹ of A = L Lᵀ by Gaussian elimination of [A, I] without pivoting. Rows are divided by √pivot at the end.

    After step j, the left matrix is needed only after column j, and the right matrix has changed only up to column j.
    One matrix holds both parts.
    A pivot that is not above 0 gives NaN.
    """
    matrix = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK)
    rows, columns = r[:, None], r[None, :]
    inside = (rows < rows_size) & (columns < rows_size)
    at = rows * rows_size + columns
    a = tl.load(matrices + matrix * plane_rows * rows_size + at, mask=inside, other=0.0)
    scale = tl.full((BLOCK,), 1.0, a.dtype)
    for j in range(rows_size):
        row = tl.sum(tl.where(rows == j, a, 0.0), axis=0)
        pivot = tl.sum(tl.where(r == j, row, 0.0), axis=0)
        pivot = tl.where(pivot > 0, pivot, float("nan"))
        factors = tl.where(r > j, row * (1.0 / pivot), 0.0)  # the rest of A stays symmetric
        row = tl.where(r == j, 1.0, row)  # the diagonal of I
        a = tl.where((columns == j) & (rows > j), 0.0, a) - factors[:, None] * row[None, :]
        scale = tl.where(r == j, 1.0 / tl.sqrt(pivot), scale)
    x = tl.where(rows == columns, 1.0, tl.where(rows > columns, a, 0.0)) * scale[:, None]
    tl.store(out + matrix * rows_size * rows_size + at, x, mask=inside)


def inverse_factors(panel: Tensor) -> Tensor:
    """The inverses of the Cholesky factors of the first rows of a panel: (N, at least S, S) contiguous → (N, S, S)."""
    count, plane_rows, size = panel.shape
    check_programs("functional_map", count)
    out = panel.new_empty(count, size, size)
    if count:
        functional_map_forward_factor_kernel[(count,)](panel, out, size, plane_rows, BLOCK=BLOCK, num_warps=1)
    return out
