"""Triton kernels of solves with a level of fronts.

A solve reads the factor once and computes little, so its speed is that of memory. Fronts of a level differ in size. A
program reads no more of the arrays than its front fills, which is a third on surfaces. Sums have a fixed order, and no
atomics are used, so results are the same in every run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs
from diffnet.ops.common.tiling import cdiv, power_of_2
from diffnet.ops.fronts.reference import FrontLevel

ROWS = 16  # of a program
INNER = 16  # rows or columns that a program sums up at once
WARPS = 1  # many small programs hide the latency of their reads
FRONT_SIZES = ("fronts_size", "width", "height", "tiles", "count")  # other levels compile nothing new


def forward(level: FrontLevel, right: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `reference.forward`. Empty places of the results are not written."""
    (fronts, width), height, count = level.own.shape, level.border.shape[1], right.shape[1]
    own, passed = right.new_empty(fronts, width, count), right.new_empty(fronts * height, count)
    arguments = right, updates, level.own, level.own_size, level.border_size, level.child_rows, level.coupling
    _launch(fronts_forward_kernel, fronts, max(height, 1), [*arguments, own, passed], level, count)
    return own, passed


def backward(level: FrontLevel, own: Tensor, x: Tensor) -> None:
    """Compute `reference.backward`."""
    (fronts, width), count = level.own.shape, x.shape[1]
    arguments = level.own, level.border, level.own_size, level.border_size, level.inverse, level.coupling, own, x
    _launch(fronts_backward_kernel, fronts, width, [*arguments], level, count)


def _launch(kernel: Any, fronts: int, rows: int, tensors: list[Tensor], level: FrontLevel, count: int) -> None:
    tiles = cdiv(rows, ROWS)
    check_programs("a solve with fronts", fronts * tiles)
    kernel[(fronts * tiles,)](
        *tensors, fronts, level.own.shape[1], level.border.shape[1], tiles, count,
        COUNT=power_of_2(count), ROWS=ROWS, INNER=INNER, num_warps=WARPS,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=FRONT_SIZES)
def fronts_forward_kernel(
    right, updates, own, own_size, border_size, child_rows, coupling, collected, passed,
    fronts_size, width, height, tiles, count,
    COUNT: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the updates of a front. The front's first tile stores the collected right-hand sides."""
    f, tile, t_size, r_size = _front(own_size, border_size, tiles)
    if (tile == 0) | (tile * ROWS < r_size):
        c = tl.arange(0, COUNT)
        r = tile * ROWS + tl.arange(0, ROWS)
        first = child_rows + f * (width + height)
        second = first + fronts_size * (width + height)
        sums = tl.zeros((ROWS, INNER, COUNT), tl.float64)
        for start in range(0, t_size, INNER):
            t = start + tl.arange(0, INNER)
            mine = t < t_size
            rhs = _rows(right, tl.load(own + f * width + t, mask=mine, other=-1), c, count)
            rhs += _rows(updates, tl.load(first + t, mask=mine, other=-1), c, count)
            rhs += _rows(updates, tl.load(second + t, mask=mine, other=-1), c, count)
            if tile == 0:
                at = collected + (f * width + t)[:, None] * count + c[None, :]
                tl.store(at, rhs, mask=mine[:, None] & (c < count)[None, :])
            at = coupling + (f * height + r)[:, None] * width + t[None, :]
            factor = tl.load(at, mask=(r < r_size)[:, None] & mine[None, :], other=0.0)
            sums += factor[:, :, None] * rhs[None, :, :]
        given = _rows(updates, tl.load(first + width + r, mask=r < r_size, other=-1), c, count)
        given += _rows(updates, tl.load(second + width + r, mask=r < r_size, other=-1), c, count)
        at = passed + (f * height + r)[:, None] * count + c[None, :]
        tl.store(at, given - tl.sum(sums, 1), mask=(r < r_size)[:, None] & (c < count)[None, :])


@launched
@triton.jit(do_not_specialize=FRONT_SIZES)
def fronts_backward_kernel(
    own, border, own_size, border_size, inverse, coupling, collected, x,
    fronts_size, width, height, tiles, count,
    COUNT: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the solution at a front's own vertices."""
    f, tile, t_size, r_size = _front(own_size, border_size, tiles)
    if tile * ROWS < t_size:
        c = tl.arange(0, COUNT)
        t = tile * ROWS + tl.arange(0, ROWS)
        mine = t < t_size
        sums = tl.zeros((INNER, ROWS, COUNT), tl.float64)
        for start in range(0, t_size, INNER):
            k = start + tl.arange(0, INNER)
            at = inverse + (f * width + k)[:, None] * width + t[None, :]
            factor = tl.load(at, mask=(k < t_size)[:, None] & mine[None, :], other=0.0)
            at = collected + (f * width + k)[:, None] * count + c[None, :]
            rhs = tl.load(at, mask=(k < t_size)[:, None] & (c < count)[None, :], other=0.0)
            sums += factor[:, :, None] * rhs[:, None, :]
        for start in range(0, r_size, INNER):
            k = start + tl.arange(0, INNER)
            at = coupling + (f * height + k)[:, None] * width + t[None, :]
            factor = tl.load(at, mask=(k < r_size)[:, None] & mine[None, :], other=0.0)
            known = _rows(x, tl.load(border + f * height + k, mask=k < r_size, other=-1), c, count)
            sums -= factor[:, :, None] * known[:, None, :]
        v = tl.load(own + f * width + t, mask=mine, other=0).to(tl.int64)
        tl.store(x + v[:, None] * count + c[None, :], tl.sum(sums, 0), mask=mine[:, None] & (c < count)[None, :])


@triton.jit
def _front(own_size, border_size, tiles):
    """Return the front and the tile of a program, and the numbers of the front's own vertices and of its border."""
    f = (tl.program_id(0) // tiles).to(tl.int64)
    return f, tl.program_id(0) % tiles, tl.load(own_size + f), tl.load(border_size + f)


@triton.jit
def _rows(of, index, c, count):
    """Load rows by index, zeros where the index is −1."""
    at = of + index.to(tl.int64)[:, None] * count + c[None, :]
    return tl.load(at, mask=(index >= 0)[:, None] & (c < count)[None, :], other=0.0)
