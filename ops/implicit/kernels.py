"""An iteration of conjugate gradients on M + t_c L in three kernels, see `conjugate_gradients`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_programs, check_rows
from diffnet.ops.common.spans import choose_span, span_count, span_rows, sum_of_spans
from diffnet.ops.common.tiling import SIZES, cdiv, interpreted, power_of_2, processors
from diffnet.ops.implicit.reference import System
from diffnet.ops.sparse.spmm_kernels import spmm

# Channels of a program. With fewer channels there are more programs. Each program reads the sums of all spans of its
# mesh, so there should not be too many spans.
CHANNELS = 32
ELEMENTS = 2048  # of a tile
UNROLL = 4


def laplacian_product(system: System) -> Callable[[Tensor], Tensor]:
    """Return the function u (V, C) → L u."""
    return lambda u: spmm(system.csr, system.values[None], u[None])[0]


def iteration(system: System, u: Tensor, r: Tensor, p: Tensor, bound: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that does an iteration as `reference.iterate` does, in float32.

    It changes u, r and p in place. It takes the inner products of r with the preconditioned r, and returns the next.
    """
    csr, *dense, ptr = system
    values, diagonal, mass, time = (x.contiguous() for x in dense)
    (rows, channels), meshes = u.shape, len(ptr) - 1
    block_c = min(power_of_2(channels), 16 if interpreted(u) else CHANNELS)
    block_v = 16 if interpreted(u) else ELEMENTS // block_c
    span = choose_span(rows, block_v, processors(u))
    spans = span_count(rows, meshes, span)
    check_rows("implicit_diffusion", rows)
    check_programs("implicit_diffusion", spans, cdiv(channels, block_c))
    q = torch.empty_like(u)
    sums = u.new_empty(2, spans, channels)
    remaining = [torch.empty_like(bound), torch.empty_like(bound)]
    shape = (ptr, rows, meshes, span)
    matrix = (mass, diagonal, time)
    flags = {"ONE_MESH": meshes == 1, "BLOCK_V": block_v, "BLOCK_C": block_c}
    # Triton 3.6 and 3.7 fail to compile gathers with 64-bit indices for fewer rows than threads.
    warps = 4 if csr.indices.dtype == torch.int32 else min(4, cdiv(block_v, 32))
    grid = (spans, cdiv(channels, block_c))

    def step(before: Tensor) -> Tensor:
        after = remaining[before is remaining[0]]  # the buffer that isn't `before`
        implicit_solve_forward_multiply_kernel[grid](
            csr.indptr, csr.indices, csr.row_order, values, mass, time, p, q, sums, *shape, channels,
            ORDERED=len(csr.row_order) > 0, UNROLL=UNROLL, **flags, num_warps=warps,
        )  # fmt: skip
        implicit_solve_forward_update_kernel[grid](
            p, q, u, r, *matrix, before, bound, sums, *shape, spans, channels, **flags
        )
        implicit_solve_forward_direction_kernel[grid](
            p, r, *matrix, before, after, bound, sums, *shape, spans, channels, **flags
        )
        return after

    return step


@triton.jit
def _times(time, channels: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the channels of a program and their times."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return c, tl.load(time + c, mask=c < channels, other=0.0)


@triton.jit
def _elements(rows, live, c, channels: tl.constexpr):
    """Return the offsets of a tile of a (V, C) tensor, and the mask of the elements that exist."""
    return rows[:, None] * channels + c[None, :], live[:, None] & (c < channels)[None, :]


@triton.jit
def _remaining(before, bound, mesh, c, channels: tl.constexpr):
    """Return the inner products r · z of a mesh, and the mask of the channels that haven't stopped."""
    at = mesh.to(tl.int64) * channels + c
    known = tl.load(before + at, mask=c < channels, other=0.0)
    return known, known > tl.load(bound + at, mask=c < channels, other=0.0)


@launched
@triton.jit(do_not_specialize=SIZES)
def implicit_solve_forward_multiply_kernel(
    indptr, indices, row_order, values, mass, time, p, q, sums, ptr, rows_size, meshes, span, channels: tl.constexpr,
    ORDERED: tl.constexpr, UNROLL: tl.constexpr,
    ONE_MESH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """q = (M + t_c L) p in the rows of one span, and sums[0] = Σ p ∘ q over them."""
    index = tl.program_id(0)
    c, t = _times(time, channels, BLOCK_C)
    _, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    dot = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(first, last, BLOCK_V):
        i = row + tl.arange(0, BLOCK_V)
        r = i.to(tl.int64)
        if ORDERED:
            r = tl.load(row_order + i, mask=i < last, other=0).to(tl.int64)
        start = tl.load(indptr + i, mask=i < last, other=0)
        length = tl.load(indptr + i + 1, mask=i < last, other=0) - start
        total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        for j0 in range(0, tl.max(length, 0), UNROLL):
            for k in tl.static_range(UNROLL):  # unrolled, so that their loads overlap
                here = j0 + k < length
                column = tl.load(indices + start + j0 + k, mask=here, other=0).to(tl.int64)
                value = tl.load(values + start + j0 + k, mask=here, other=0.0)
                inside = here[:, None] & (c < channels)[None, :]
                total += value[:, None] * tl.load(p + column[:, None] * channels + c[None, :], mask=inside, other=0.0)
        at, inside = _elements(r, i < last, c, channels)
        own = tl.load(p + at, mask=inside, other=0.0)
        product = tl.load(mass + r, mask=i < last, other=0.0)[:, None] * own + t[None, :] * total
        tl.store(q + at, product, mask=inside)
        dot += tl.sum(tl.where(inside, own * product, 0.0), 0)
    tl.store(sums + index.to(tl.int64) * channels + c, dot, mask=c < channels)


@triton.jit
def _preconditioned(r, mass, diagonal, t, i, last):
    """Return z, rows i of r divided by the diagonal of M + t_c L; 0 without mass.

    L is positive semi-definite only up to rounding.
    """
    m = tl.load(mass + i, mask=i < last, other=0.0)[:, None]
    d = tl.load(diagonal + i, mask=i < last, other=0.0)[:, None]
    return tl.where(m > 0, r / tl.where(m > 0, m + t[None, :] * tl.maximum(d, 0.0), 1.0), 0.0)


@launched
@triton.jit(do_not_specialize=SIZES)
def implicit_solve_forward_update_kernel(
    p, q, u, r, mass, diagonal, time, before, bound, sums, ptr, rows_size, meshes, span, spans, channels: tl.constexpr,
    ONE_MESH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """u += α p and r −= α q in the rows of one span with α = (r · z) / (p · q), and sums[1] = Σ r ∘ z over them."""
    index = tl.program_id(0)
    c, t = _times(time, channels, BLOCK_C)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    curvature = sum_of_spans(sums, c, channels, 0, mesh, ptr, span, spans, False, BLOCK_C, 32)
    known, running = _remaining(before, bound, mesh, c, channels)
    alpha = tl.where(running, known / tl.where(running, curvature, 1.0), 0.0)[None, :]
    dot = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(first, last, BLOCK_V):
        i = row + tl.arange(0, BLOCK_V).to(tl.int64)
        at, inside = _elements(i, i < last, c, channels)
        direction = tl.load(p + at, mask=inside, other=0.0)
        tl.store(u + at, tl.load(u + at, mask=inside, other=0.0) + alpha * direction, mask=inside)
        rest = tl.load(r + at, mask=inside, other=0.0) - alpha * tl.load(q + at, mask=inside, other=0.0)
        tl.store(r + at, rest, mask=inside)
        dot += tl.sum(rest * _preconditioned(rest, mass, diagonal, t, i, last), 0)
    tl.store(sums + (spans + index).to(tl.int64) * channels + c, dot, mask=c < channels)


@launched
@triton.jit(do_not_specialize=SIZES)
def implicit_solve_forward_direction_kernel(
    p, r, mass, diagonal, time, before, after, bound, sums, ptr, rows_size, meshes, span, spans, channels: tl.constexpr,
    ONE_MESH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """p = z + β p in the rows of one span, where β is the new r · z over the one before. The new one is stored."""
    index = tl.program_id(0)
    c, t = _times(time, channels, BLOCK_C)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    new = sum_of_spans(sums, c, channels, 1, mesh, ptr, span, spans, False, BLOCK_C, 32)
    known, running = _remaining(before, bound, mesh, c, channels)
    new = tl.where(running, new, known)
    beta = tl.where(running, new / tl.where(running, known, 1.0), 0.0)[None, :]
    if first == tl.load(ptr + mesh):  # the first span of the mesh
        tl.store(after + mesh.to(tl.int64) * channels + c, new, mask=c < channels)
    for row in range(first, last, BLOCK_V):
        i = row + tl.arange(0, BLOCK_V).to(tl.int64)
        at, inside = _elements(i, i < last, c, channels)
        z = _preconditioned(tl.load(r + at, mask=inside, other=0.0), mass, diagonal, t, i, last)
        tl.store(p + at, z + beta * tl.load(p + at, mask=inside, other=0.0), mask=inside)
