"""A layer of 256 channels for Hopper: weights stay in shared memory, and two groups of warps take turns.

All products are of blocks of 128 channels, as in `hopper_kernels`. A group has three half tiles of rows in shared
memory: both that it multiplies, and the next one.
"""

# mypy: disable-error-code=attr-defined
# (the compiler turns integers into tensors, which a type checker does not know)

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.tiling import SIZES, aligned, empty_planes, processors
from diffnet.ops.mlp.hopper_kernels import (
    BARRIER,
    CHANNELS,
    PRODUCT,
    activated,
    exchanged,
    keep_weight,
    load_rows,
)
from diffnet.ops.mlp.linear_kernels import threshold_and_scale, word_count


@gluon.jit
def _start(kept, slot, w, half: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Start the product that gives half of a tile's columns."""
    y = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    for k in gl.static_range(2):
        block = w.index(2 * half + k)
        if not TRANSPOSED:
            block = block.permute([1, 0])
        y = warpgroup_mma(kept.index((slot + k) % 3), block, y, use_acc=k > 0, is_async=True)
    return y


@gluon.jit
def _walk(
    x, kept, w, bias, other, seed, out, start, programs, rows_size, other_rows, threshold, keep_scale,
    x_stride: gl.constexpr, other_stride: gl.constexpr, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr, BIAS: gl.constexpr, RELU: gl.constexpr, WORDS: gl.constexpr,
    MASKED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute every 2·programs-th tile of 64 rows."""
    tiles = gl.cdiv(rows_size, 64)
    step = 2 * programs
    start += GROUP * programs
    dtype: gl.constexpr = out.dtype.element_ty
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, CHANNELS))
    low, high = seed, seed
    if WORDS > 0:
        low, high = gl.load(seed).to(gl.uint32), gl.load(seed + 1).to(gl.uint32)
    v64, c64 = v.to(gl.int64)[:, None], c.to(gl.int64)[None, :]
    load_rows(kept.index(0), x, x_stride, start, rows_size)
    load_rows(kept.index(1), x + 128, x_stride, start, rows_size)
    async_copy.commit_group()
    load_rows(kept.index(2), x, x_stride, start + step, rows_size)
    async_copy.commit_group()
    slot = start - start
    for tile in range(start, tiles, step):
        rows = tile * 64 + v
        tile64 = tile.to(gl.int64) * 64
        async_copy.wait_group(1)
        fence_async_shared()
        BARRIER()
        y = _start(kept, slot, w, 0, TRANSPOSED)
        later = _start(kept, slot, w, 1, TRANSPOSED)
        for half in gl.static_range(2):
            if MASKED or RESIDUAL:
                from_other = other + half * 128 + tile64 * other_stride + (v64 * other_stride + c64)
                h = gl.load(from_other, mask=(rows < other_rows)[:, None], other=0.0)
            if half == 0:
                y = warpgroup_mma_wait(2, deps=[y])
            else:
                y = warpgroup_mma_wait(0, deps=[later])
                BARRIER()  # all warps have multiplied
                load_rows(kept.index(slot), x + 128, x_stride, tile + step, rows_size)
                async_copy.commit_group()
                load_rows(kept.index((slot + 1) % 3), x, x_stride, tile + 2 * step, rows_size)
                async_copy.commit_group()
            y = gl.convert_layout(exchanged(y), CHANNELS, assert_trivial=True)
            if RELU:
                y = activated(y, bias, low, high, rows, half * 128 + c, threshold, keep_scale, BIAS, WORDS)
            elif BIAS:
                y += gl.load(bias + half * 128 + c).to(gl.float32)[None, :]
            if MASKED:
                y = gl.where(h > 0.0, y * keep_scale, 0.0)
            if RESIDUAL:
                y += h.to(gl.float32)
            gl.store(out + half * 128 + tile64 * 256 + (v64 * 256 + c64), y.to(dtype), mask=(rows < rows_size)[:, None])
        slot = (slot + 2) % 3


@launched
@gluon.jit(do_not_specialize=SIZES)
def mlp_forward_linear_hopper_kernel(
    x, weight, bias, other, seed, out, rows_size, plane_rows, threshold, keep_scale, programs,
    x_stride: gl.constexpr, other_stride: gl.constexpr, PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr, BIAS: gl.constexpr, RELU: gl.constexpr, WORDS: gl.constexpr,
    MASKED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The same as `linear_kernels.mlp_forward_linear_kernel` for one input. `other` is the mask or the residual.

    Each of PARTS matrices has its own programs. The first has `programs`, more than the others if it gets a residual,
    so that all end at the same time.
    """
    start, part, other_rows = gl.program_id(0), 0, rows_size
    later_parts: gl.constexpr = PARTS - 1 if PARTS > 1 else 1
    if start >= programs:
        start -= programs
        programs = (gl.num_programs(0) - programs) // later_parts
        part = 1 + start // programs
        start = start % programs
        other_rows = 0
    weight += part * 256
    out += part * plane_rows.to(gl.int64) * 256
    dtype: gl.constexpr = out.dtype.element_ty
    w = gl.allocate_shared_memory(dtype, [4, 128, 128], gl.NVMMASharedLayout.get_default_for([128, 128], dtype))
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    kept1 = gl.allocate_shared_memory(dtype, [3, 64, 128], flat)
    kept2 = gl.allocate_shared_memory(dtype, [3, 64, 128], flat)
    stride: gl.constexpr = PARTS * 256
    for half in gl.static_range(2):
        for k in gl.static_range(2):
            if TRANSPOSED:
                keep_weight(w.index(2 * half + k), weight + k * 128 * stride + half * 128, stride, False, True)
            else:
                keep_weight(w.index(2 * half + k), weight + half * 128 * stride + k * 128, stride, True, False)
    fence_async_shared()
    BARRIER()
    gl.warp_specialize(
        [
            (_walk, (x, kept1, w, bias, other, seed, out, start, programs, rows_size, other_rows, threshold, keep_scale,
                     x_stride, other_stride, 0, TRANSPOSED, BIAS, RELU, WORDS, MASKED, RESIDUAL)),
            (_walk, (x, kept2, w, bias, other, seed, out, start, programs, rows_size, other_rows, threshold, keep_scale,
                     x_stride, other_stride, 1, TRANSPOSED, BIAS, RELU, WORDS, MASKED, RESIDUAL)),
        ],
        [4],
        [240],
    )  # fmt: skip


def layer(
    x: Tensor,
    weight: Tensor,
    transposed: bool,
    parts: int,
    bias: Tensor | None,
    residual: Tensor | None,
    hidden: Tensor | None,
    activation: bool,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """The same as `linear_kernels.launch` for one input of 256 channels and for parts of 256 channels."""
    x, other = aligned(x), residual if hidden is None else hidden
    other = x if other is None else aligned(other)
    out, plane_rows = empty_planes(x, parts, len(x), 256)
    if len(x):
        programs = processors(x)
        # A part with a residual takes 5/3 of the time of another one.
        first = programs * 5 // (3 * parts + 2) if residual is not None else programs // parts
        programs = first + (programs - first) // max(parts - 1, 1) * (parts - 1)
        mlp_forward_linear_hopper_kernel[(programs,)](
            x, weight, weight if bias is None else bias.contiguous(), other, weight if seed is None else seed, out,
            len(x), plane_rows, *threshold_and_scale(dropout), first, x.stride(0), other.stride(0),
            PARTS=parts, TRANSPOSED=transposed, BIAS=bias is not None, RELU=activation,
            WORDS=word_count(dropout) if activation else 0, MASKED=hidden is not None, RESIDUAL=residual is not None,
            num_warps=4,
        )  # fmt: skip
    return out
