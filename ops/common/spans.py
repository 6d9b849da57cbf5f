"""Spans: how programs share the rows of a packed ragged batch without reading anything back to the host.

A program serves one span, which is up to `span` consecutive rows of one mesh. Mesh b owns the spans from
ptr[b] // span + b up to ptr[b+1] // span + b, both included. Some spans are empty. The number of spans,
rows // span + meshes, depends on sizes that the host knows. docs/kernels.md derives this.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import MAX_INT32
from diffnet.ops.common.tiling import SIZES, cdiv, nvidia_options, starts_early

_MAX_INT32 = tl.constexpr(MAX_INT32)
MAX_SPAN = 2**18  # rows; a multiple of every block. Kernels add up to two spans to 32-bit row numbers.


def span_count(rows: int, meshes: int, span: int) -> int:
    """Return how many spans the host launches."""
    return rows // span + meshes if meshes else 0


def choose_span(rows: int, block: int, programs: int) -> int:
    """Return the rows of a span, a multiple of `block`, so that about `programs` spans cover all rows, or more."""
    return min(block * max(1, -(-rows // (block * max(programs, 1)))), MAX_SPAN)


@triton.jit
def span_rows(span_index, ptr, rows_size, meshes, span, ONE_MESH: tl.constexpr):
    """Return the mesh of a span and its rows first:last. An empty span has first ≥ last.

    Nothing checks the values of `ptr` on a GPU. Wrong values give wrong results, but no row outside of 0:rows_size.
    """
    mesh = span_index * 0  # a tensor, as the loop and callers need
    if not ONE_MESH:
        beyond = mesh + meshes
        while beyond - mesh > 1:
            middle = (mesh + beyond) // 2
            starts_here = (tl.load(ptr + middle) // span + middle).to(tl.int32) <= span_index
            mesh = tl.where(starts_here, middle, mesh)
            beyond = tl.where(starts_here, beyond, middle)
    start = tl.load(ptr + mesh).to(tl.int32)
    end = tl.load(ptr + mesh + 1).to(tl.int32)
    first = start + (span_index - (start // span + mesh)) * span
    return mesh, tl.maximum(first, 0), tl.minimum(tl.minimum(first + span, end), rows_size)


@triton.jit
def sum_of_spans(
    partial, cell, size: tl.constexpr, plane, mesh, ptr, span, spans, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Sum partial[plane, s, cell] over the nonempty spans s of a mesh, or over all spans (WHOLE), in a fixed order."""
    if WHOLE:
        first = mesh
        count = spans
    else:
        start = tl.load(ptr + mesh).to(tl.int32)
        end = tl.load(ptr + mesh + 1).to(tl.int32)
        first = tl.maximum(start // span + mesh, 0)  # wrong values of `ptr` stay inside, see `span_rows`
        count = tl.minimum((end - start + span - 1) // span, spans - first)
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, count, BLOCK_SPANS):
        step = offset + tl.arange(0, BLOCK_SPANS)
        place = (tl.cast(plane, tl.int64) * spans + first + step) * size
        live = (step < count)[:, None] & (cell < size)[None, :]
        total += tl.sum(tl.load(partial + place[:, None] + cell[None, :], mask=live, other=0.0), axis=0)
    return total


@launched
@triton.jit(do_not_specialize=SIZES)
def sum_spans_forward_kernel(
    partial, other, out, ptr, factor, whole, whole_out,
    meshes, span, spans, other_span, other_spans, whole_spans, programs, size: tl.constexpr, whole_size: tl.constexpr,
    PLANES: tl.constexpr, WHOLE: tl.constexpr, FACTOR: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """out[p, b] = factor Σ partial[p, s] over the spans s of mesh b. EARLY: see `tiling.starts_early`.

    From plane PLANES on, the planes of `other` are summed instead, which has other spans. If whole_size isn't 0, the
    programs from number `programs` on compute whole_out = Σ whole[s] over all its spans.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    if whole_size > 0:  # noqa: SIM102 - this is a constant, the next condition is not
        if program >= programs:
            cell = program - programs
            if whole_size > _MAX_INT32 - BLOCK:
                cell = cell.to(tl.int64)
            cell = cell * BLOCK + tl.arange(0, BLOCK)
            total = sum_of_spans(whole, cell, whole_size, 0, 0, ptr, span, whole_spans, True, BLOCK, BLOCK_SPANS)
            tl.store(whole_out + cell, total, mask=cell < whole_size)
            return
    blocks = tl.cdiv(size, BLOCK)
    plane = program // (blocks * meshes)  # not a second grid axis: that has at most 65535 programs
    mesh = program // blocks % meshes
    cell = program % blocks
    if size > _MAX_INT32 - BLOCK:
        cell = cell.to(tl.int64)
    cell = cell * BLOCK + tl.arange(0, BLOCK)
    is_other = plane >= PLANES
    source = tl.where(is_other, other, partial)
    source_span = tl.where(is_other, other_span, span)
    source_spans = tl.where(is_other, other_spans, spans)
    source_plane = plane - tl.where(is_other, PLANES, 0)
    total = sum_of_spans(
        source, cell, size, source_plane, mesh, ptr, source_span, source_spans, WHOLE, BLOCK, BLOCK_SPANS
    )
    if FACTOR:
        total *= tl.load(factor)
    place = (plane.to(tl.int64) * meshes + mesh) * size
    tl.store(out + place + cell, total, mask=cell < size)


class Unsummed(NamedTuple):
    """A sum over all spans that is still to be launched: partial (1, spans, N) and its empty result (N,), float32"""

    partial: Tensor
    total: Tensor


def sum_spans(
    partial: Tensor,
    ptr: Tensor | None,
    span: int,
    factor: Tensor | None = None,
    other: tuple[Tensor, int] | None = None,
    unsummed: Unsummed | None = None,
) -> Tensor:
    """Add up the results of the spans of each mesh, in a fixed order, times a factor: a tensor with one number.

    partial: (planes, spans, …) float32
    ptr: (B+1,); None means that all spans belong to one mesh
    span: rows of a span
    other: further planes with spans of their own, and the rows of these spans; summed in the same launch
    unsummed: another sum, computed in the same launch

    Returns (planes, B, …) float32, zeros for a mesh without rows; the planes of `other` come last.
    """
    planes, spans, *rest = partial.shape
    meshes = 1 if ptr is None else ptr.shape[0] - 1
    other_partial, other_span = (partial, span) if other is None else other
    other_spans, first = other_partial.shape[1], planes
    planes += 0 if other is None else other_partial.shape[0]
    out = torch.empty(planes, meshes, *rest, dtype=torch.float32, device=partial.device)
    size = math.prod(rest)
    whole, whole_out = unsummed or (partial, out)
    whole_spans, whole_size = whole.shape[1], whole_out.shape[0] if unsummed else 0
    # If there are many spans, a program takes fewer cells and loads more spans at a time.
    block, block_spans = (64, 64) if max(spans, other_spans, whole_spans) <= 64 else (32, 128)
    programs = cdiv(size, block) * meshes * planes
    if programs + whole_size:
        early = starts_early(partial)
        sum_spans_forward_kernel[(programs + cdiv(whole_size, block),)](
            partial, other_partial, out, partial if ptr is None else ptr, partial if factor is None else factor,
            whole, whole_out, meshes, span, spans, other_span, other_spans, whole_spans, programs, size, whole_size,
            PLANES=first, WHOLE=ptr is None, FACTOR=factor is not None,
            EARLY=early, BLOCK=block, BLOCK_SPANS=block_spans, num_warps=4,
            **nvidia_options(launch_pdl=early),
        )  # fmt: skip
    return out
