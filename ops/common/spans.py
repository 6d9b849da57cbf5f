"""How programs share out the rows of a packed ragged batch, with nothing read back to the host.

A program serves one *span*: up to `span` consecutive rows of one mesh. Mesh b owns the spans ptr[b] // span + b up to
ptr[b+1] // span + b + 1. That is one for every `span` rows begun, and now and then one too many, which is empty; so the
rows // span + meshes spans of a batch are known to the host, and no table is needed to find a span's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from diffnet.ops.common.launch import cdiv, device_of, starts_early


def span_count(rows: int, meshes: int, span: int) -> int:
    """How many spans the host has to launch."""
    return rows // span + meshes if meshes else 0


def choose_span(rows: int, block: int, programs: int) -> int:
    """Rows of a span, a multiple of `block`, such that about `programs` of them cover all rows."""
    return block * max(1, -(-rows // (block * max(programs, 1))))


@triton.jit
def span_rows(span_index, ptr, meshes, span, ONE_MESH: tl.constexpr):
    """The mesh that a span belongs to, and its rows first:last (first ≥ last where it is empty)."""
    if ONE_MESH:
        mesh = span_index * 0
    else:
        mesh = span_index * 0
        beyond = mesh + meshes
        while beyond - mesh > 1:
            middle = (mesh + beyond) // 2
            starts_here = (tl.load(ptr + middle) // span + middle).to(tl.int32) <= span_index
            mesh = tl.where(starts_here, middle, mesh)
            beyond = tl.where(starts_here, beyond, middle)
    start = tl.load(ptr + mesh).to(tl.int32)
    end = tl.load(ptr + mesh + 1).to(tl.int32)
    first = start + (span_index - (start // span + mesh)) * span
    return mesh, first, tl.minimum(first + span, end)


@triton.jit
def sum_of_spans(
    partial, cell, size: tl.constexpr, plane, mesh, ptr, span, spans, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Σ partial[plane, s, cell] over the spans s of a mesh that hold rows, or all (WHOLE), always in the same order."""
    if WHOLE:
        first = mesh
        count = spans
    else:
        start = tl.load(ptr + mesh).to(tl.int32)
        end = tl.load(ptr + mesh + 1).to(tl.int32)
        first = start // span + mesh
        count = (end - start + span - 1) // span
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, count, BLOCK_SPANS):
        step = offset + tl.arange(0, BLOCK_SPANS)
        place = (plane.to(tl.int64) * spans + first + step) * size
        live = (step < count)[:, None] & (cell < size)[None, :]
        total += tl.sum(tl.load(partial + place[:, None] + cell[None, :], mask=live, other=0.0), axis=0)
    return total


@triton.jit
def _sum_spans_kernel(
    partial, out, ptr, meshes, span, spans, factor, size: tl.constexpr, WHOLE: tl.constexpr, FACTOR: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """out[p, b] = factor Σ partial[p, s] over the spans s of mesh b. EARLY: see `tiling.starts_early`."""
    if EARLY:
        gdc_wait()
    blocks = tl.cdiv(size, BLOCK)
    mesh = tl.program_id(0) // blocks  # not on a grid's second axis, which ends at 65535
    cell = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    plane = tl.program_id(1)
    total = sum_of_spans(partial, cell, size, plane, mesh, ptr, span, spans, WHOLE, BLOCK, BLOCK_SPANS)
    if FACTOR:
        total *= tl.load(factor)
    place = (plane.to(tl.int64) * meshes + mesh) * size
    tl.store(out + place + cell, total, mask=cell < size)


def sum_spans(partial: Tensor, ptr: Tensor | None, span: int, factor: Tensor | None = None) -> Tensor:
    """Add up what the spans of each mesh wrote: partial (planes, spans, …) float32 → (planes, B, …), times `factor`.

    A mesh without rows gives zeros. ptr = None takes all spans for those of one mesh. The order of the sums is fixed,
    so results are the same in every run.
    """
    planes, spans, *rest = partial.shape
    meshes = 1 if ptr is None else len(ptr) - 1
    out = torch.empty(planes, meshes, *rest, dtype=torch.float32, device=partial.device)
    if out.numel():
        # Fewer cells and more of their spans at a time, where these are many: then nothing is waited for twice.
        block, block_spans = (64, 64) if spans <= 64 else (32, 128)
        size = out[0, 0].numel()
        early = starts_early(partial)
        with device_of(partial):
            _sum_spans_kernel[(cdiv(size, block) * meshes, planes)](
                partial, out, partial if ptr is None else ptr, meshes, span, spans,
                partial if factor is None else factor, size, WHOLE=ptr is None, FACTOR=factor is not None,
                EARLY=early, BLOCK=block, BLOCK_SPANS=block_spans, num_warps=4, launch_pdl=early,
            )  # fmt: skip
    return out
