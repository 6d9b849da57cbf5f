"""A block's MLP for Hopper: weights stay in shared memory, and two groups of warps take turns.

One group's products run while the other group draws random numbers and writes. In the forward, the next rows arrive
meanwhile. In the backward, tiles of rows stay in registers. It reads which hidden units are above 0, a bit for each.
"""

# mypy: disable-error-code=attr-defined
# (the compiler turns integers into tensors, which a type checker does not know)

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.language import PropagateNan

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.tiling import SIZES, aligned, cdiv, empty_planes, processors
from diffnet.ops.mlp.dropout_kernels import draw, mix, threshold_and_scale, word_count

BARRIER = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7

# Of every eight columns that a matrix unit returns, a thread has two neighbors. If bits 1 and 2 of a column's number
# are exchanged with bits 3 and 4, a thread has eight neighbors, which one instruction stores.
CHANNELS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
WORDS_OF_ROWS = gl.constexpr(  # the four words of a row, each in one thread
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
BY_WORD = gl.constexpr(  # CHANNELS, with the columns of a word in the second and the last dimension
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 16, 4, 2],
    )
)
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
_NAN = gl.constexpr(PropagateNan.ALL)
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def exchanged(x):
    """Exchange bits 1 and 2 of the column's number with bits 3 and 4."""
    rows: gl.constexpr = x.shape[0]
    return x.reshape([rows, 2, 2, 2, 2, 2, 2, 2]).permute([0, 1, 2, 5, 6, 3, 4, 7]).reshape([rows, 128])


_mix, _draw = gluon.jit(mix.fn), gluon.jit(draw.fn)  # kernels in Triton and in Gluon drop the same units for a seed


@gluon.jit
def keep_weight(kept, weight, stride: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Copy a matrix (128, 128) to shared memory. ROWS, COLUMNS: whether these are in exchanged order"""
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, LOADED))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, LOADED))
    if ROWS:
        n = (n & 0x61) | ((n & 6) << 2) | ((n & 24) >> 2)
    w = gl.load(weight + n[:, None] * stride + k[None, :])
    if COLUMNS:
        kept.store(exchanged(w))
    else:
        kept.store(w)


@gluon.jit
def zero():
    """Return 0 in a way that the compiler does not see through.

    Addresses of weights that depend on it are computed in each tile. Else all 40 would stay in registers, and others
    would be written to memory. With this and the order of bits in words, the forward takes 18 % less time.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_x(kept, x, stride: gl.constexpr, tile, rows_size):
    """Start to copy a tile of rows to shared memory. It is a group of copies by itself."""
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, LOADED))
    at = x + (tile.to(gl.int64) * 64) * stride + (v.to(gl.int64)[:, None] * stride + c.to(gl.int64)[None, :])
    hopper.async_copy.async_copy_global_to_shared(kept, at, mask=(tile * 64 + v < rows_size)[:, None])
    hopper.async_copy.commit_group()


@gluon.jit
def _dropped(low, high, tile, threshold, BLOCK: gl.constexpr, WORDS: gl.constexpr):
    """The same as `dropout_kernels.dropped` for a block of a tile. Four neighboring threads draw one each for all."""
    rows = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_OF_ROWS))
    by_row = _mix(_mix(rows.to(gl.uint32) ^ low) ^ high)
    columns = BLOCK * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS_OF_ROWS))
    by_column = _mix(_mix(columns.to(gl.uint32) ^ high) ^ low)
    word = _draw(by_row[:, None] + by_column[None, :], threshold, WORDS)
    word = gl.convert_layout(word, gl.SliceLayout(1, gl.SliceLayout(3, BY_WORD)))
    word = word[:, None, :, None].broadcast_to(64, 16, 4, 2).reshape([64, 128])
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
    word = gl.convert_layout(word, CHANNELS, assert_trivial=True) >> (c // 8 % 4 * 2)[None, :]
    return word & (1 << (c // 32 * 8 + c % 2))[None, :] != 0  # so the bit of a register is a constant


@gluon.jit
def activated(
    y, bias, low, high, tile, threshold, keep_scale,
    BLOCK: gl.constexpr, BIAS: gl.constexpr, RELU: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """The same as `linear_kernels.activated` for a tile of 64 rows and a block of 128 columns."""
    if BIAS:
        c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
        y += gl.load(bias + BLOCK * 128 + c).to(gl.float32)[None, :]
    if WORDS > 0:  # ahead of ReLU, because the compiler would convert y to 16 bits before it chooses
        y = gl.where(_dropped(low, high, tile, threshold, BLOCK, WORDS), 0.0, y)
    if RELU:
        y = gl.maximum(y, 0.0, propagate_nan=_NAN)
    return y * keep_scale if WORDS > 0 else y


@gluon.jit
def _signs(h, c):
    """Return whether numbers are above 0, as a bit of a word for each of the 32 columns of a row in a thread."""
    bits = (h > 0.0).to(gl.int32) << (c // 32 * 8 + c % 8)[None, :]
    return gl.convert_layout(gl.sum(gl.sum(bits.reshape([64, 4, 4, 8]), 3), 1), WORDS_OF_ROWS, assert_trivial=True)


@gluon.jit
def _masked(y, words, c, keep_scale):
    """Return y · keep_scale where `_signs` found a number above 0, else 0."""
    for _ in gl.static_range(5):
        words = gl.join(words, words)
    words = words.reshape([64, 4, 4, 8]).permute([0, 2, 1, 3]).reshape([64, 128])
    words = gl.convert_layout(words, CHANNELS, assert_trivial=True)
    return gl.where(words & (1 << (c // 32 * 8 + c % 8))[None, :] != 0, y, 0.0) * keep_scale


@gluon.jit
def _start(x, w, zeros):
    """Start x W."""
    operand = gl.convert_layout(exchanged(x), OPERAND, assert_trivial=True)
    return hopper.warpgroup_mma(operand, w, zeros, use_acc=False, is_async=True)


@gluon.jit
def _end(y):
    """Wait for a product x W. A thread has the same channels of the result as of x."""
    y = hopper.warpgroup_mma_wait(0, deps=[y])
    return gl.convert_layout(exchanged(y), CHANNELS, assert_trivial=True)


@gluon.jit
def _walk(
    kept_x, start, first, second, third, w, bias1, bias2, bias3, residual, seeds, hidden1, hidden2, signs, out,
    rows_size, threshold, keep_scale,
    first_stride: gl.constexpr, second_stride: gl.constexpr, third_stride: gl.constexpr, residual_stride: gl.constexpr,
    INPUTS: gl.constexpr, BIAS: gl.constexpr, WORDS: gl.constexpr, RESIDUAL: gl.constexpr, SKIP: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """Compute every 2·programs-th tile of 64 rows. The first input goes to registers, the others to shared memory."""
    step = 2 * gl.num_programs(0)
    dtype: gl.constexpr = out.dtype.element_ty
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, CHANNELS))
    low1, high1 = gl.load(seeds).to(gl.uint32), gl.load(seeds + 1).to(gl.uint32)
    low2, high2 = gl.load(seeds + 2).to(gl.uint32), gl.load(seeds + 3).to(gl.uint32)
    zeros = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    v64, c64 = v.to(gl.int64)[:, None], c.to(gl.int64)[None, :]
    at = v64 * 128 + c64
    words_v = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_OF_ROWS))
    signs_at = words_v[:, None] * 8 + gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS_OF_ROWS))[None, :]
    inside = (start * 64 + v < rows_size)[:, None]
    first_at = first + (start.to(gl.int64) * 64) * first_stride
    x = gl.load(first_at + (v64 * first_stride + c64), mask=inside, other=0.0)
    if INPUTS > 1:
        load_x(kept_x.index(0), second, second_stride, start, rows_size)
    if INPUTS > 2:
        load_x(kept_x.index(1), third, third_stride, start, rows_size)
    for tile in range(start, gl.cdiv(rows_size, 64), step):
        inside = (tile * 64 + v < rows_size)[:, None]
        place = (tile.to(gl.int64) * 64) * 128
        signs_of_tile = signs + tile.to(gl.int64) * 512 + signs_at
        with_signs = (tile * 64 + words_v < rows_size)[:, None]
        later = tile + step
        later_at = first + (later.to(gl.int64) * 64) * first_stride
        inside_later = (later * 64 + v < rows_size)[:, None]
        hopper.async_copy.wait_group(0)
        hopper.fence_async_shared()
        BARRIER()
        base = zero()
        y = _start(x, w.index(base).permute([1, 0]), zeros)
        for i in gl.static_range(1, INPUTS):
            y = hopper.warpgroup_mma(kept_x.index(i - 1), w.index(base + i).permute([1, 0]), y, is_async=True)
        y = hopper.warpgroup_mma_wait(0, deps=[y])
        BARRIER()  # all warps have multiplied the inputs
        if INPUTS > 1:
            load_x(kept_x.index(0), second, second_stride, later, rows_size)
        if INPUTS > 2:
            load_x(kept_x.index(1), third, third_stride, later, rows_size)
        added = x
        if SKIP:
            x = gl.load(later_at + (v64 * first_stride + c64), mask=inside_later, other=0.0)
        y = gl.convert_layout(exchanged(y), CHANNELS, assert_trivial=True)
        h = activated(y, bias1, low1, high1, tile, threshold, keep_scale, 0, BIAS, True, WORDS).to(dtype)
        y = _start(h, w.index(base + INPUTS).permute([1, 0]), zeros)
        if KEEP:
            gl.store(hidden1 + place + at, h, mask=inside)
            gl.store(signs_of_tile, _signs(h, c), mask=with_signs)
        y = _end(y)
        h = activated(y, bias2, low2, high2, tile, threshold, keep_scale, 0, BIAS, True, WORDS).to(dtype)
        y = _start(h, w.index(base + INPUTS + 1).permute([1, 0]), zeros)
        if KEEP:
            gl.store(hidden2 + place + at, h, mask=inside)
            gl.store(signs_of_tile + 4, _signs(h, c), mask=with_signs)
        if not SKIP:
            x = gl.load(later_at + (v64 * first_stride + c64), mask=inside_later, other=0.0)
        if RESIDUAL and not SKIP:
            from_residual = residual + (tile.to(gl.int64) * 64) * residual_stride
            added = gl.load(from_residual + v64 * residual_stride + c64, mask=inside, other=0.0)
        y = _end(y)
        y = activated(y, bias3, low2, high2, tile, threshold, keep_scale, 0, BIAS, False, 0)
        if RESIDUAL:
            y += added.to(gl.float32)
        gl.store(out + place + at, y.to(dtype), mask=inside)


@launched
@gluon.jit(do_not_specialize=SIZES)
def mlp_forward_hopper_kernel(
    first, second, third, weight1, weight2, weight3, bias1, bias2, bias3, residual, seeds, hidden1, hidden2, signs, out,
    rows_size, threshold, keep_scale,
    first_stride: gl.constexpr, second_stride: gl.constexpr, third_stride: gl.constexpr, residual_stride: gl.constexpr,
    INPUTS: gl.constexpr, BIAS: gl.constexpr, WORDS: gl.constexpr, RESIDUAL: gl.constexpr, SKIP: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """Compute all three layers for C = 128 and numbers of 16 bits.

    SKIP: the first input is the residual and stays in registers, which takes 8 % less time. KEEP: write the hidden
    layers and their signs. With signs, this kernel takes 10 % more time, and the backward's 21 % less.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    w = gl.allocate_shared_memory(dtype, [INPUTS + 2, 128, 128], square)
    slots: gl.constexpr = INPUTS - 1 if INPUTS > 1 else 1
    kept_x = gl.allocate_shared_memory(dtype, [slots, 64, 128], flat)
    other_x = gl.allocate_shared_memory(dtype, [slots, 64, 128], flat)
    for i in gl.static_range(INPUTS):
        keep_weight(w.index(i), weight1 + i * 128, INPUTS * 128, True, i == 0)
    keep_weight(w.index(INPUTS), weight2, 128, True, True)
    keep_weight(w.index(INPUTS + 1), weight3, 128, True, True)
    hopper.fence_async_shared()
    BARRIER()
    group1, group2 = (kept_x, gl.program_id(0)), (other_x, gl.program_id(0) + gl.num_programs(0))
    read = first, second, third, w, bias1, bias2, bias3, residual, seeds
    written = hidden1, hidden2, signs, out, rows_size, threshold, keep_scale
    both = read + written
    strides: gl.constexpr = first_stride, second_stride, third_stride, residual_stride
    flags: gl.constexpr = INPUTS, BIAS, WORDS, RESIDUAL, SKIP, KEEP
    gl.warp_specialize([(_walk, group1 + both + strides + flags), (_walk, group2 + both + strides + flags)], [4], [240])


def forward(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    residual: Tensor | None,
    dropout: float,
    seeds: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """The same as `kernels.forward` for three layers of 128 channels."""
    rows, parts = inputs[0].shape[0], len(inputs)
    skip = residual is inputs[0]
    inputs = [aligned(x) for x in inputs]
    first, second, third = (*inputs, *inputs[:1], *inputs[:1])[:3]
    added = first if residual is None else aligned(residual)
    outs = [first.new_empty(rows, 128) for _ in range(3 if keep else 1)]
    outs += [first.new_empty(rows, 8, dtype=torch.int32)] if keep else []
    if rows:
        w1, w2, w3 = weights
        b1, b2, b3 = (bias.contiguous() for bias in biases) if biases else (w1, w2, w3)
        mlp_forward_hopper_kernel[(min(processors(first), cdiv(rows, 64)),)](
            first, second, third, w1, w2, w3, b1, b2, b3, added, w1 if seeds is None else seeds.contiguous(),
            outs[1 % len(outs)], outs[2 % len(outs)], outs[-1], outs[0], rows, *threshold_and_scale(dropout),
            first.stride(0), second.stride(0), third.stride(0), added.stride(0),
            INPUTS=parts, BIAS=bool(biases), WORDS=word_count(dropout), RESIDUAL=residual is not None, SKIP=skip,
            KEEP=keep, num_warps=4,
        )  # fmt: skip
    return outs


@gluon.jit
def _walk_back(
    start, grad, w, signs, grad1, grad2, out, rows_size, plane_rows, keep_scale,
    grad_stride: gl.constexpr, PARTS: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    step = 2 * gl.num_programs(0)
    dtype: gl.constexpr = out.dtype.element_ty
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, CHANNELS))
    zeros = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    plane = plane_rows.to(gl.int64) * 128
    # With 64 bits, the compiler finds that addresses in a thread differ by constants, and keeps one of them.
    v64, c64 = v.to(gl.int64)[:, None], c.to(gl.int64)[None, :]
    at = v64 * 128 + c64
    words_v = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_OF_ROWS))
    signs_at = words_v[:, None] * 8 + gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS_OF_ROWS))[None, :]
    grad_at = v64 * grad_stride + c64
    inside = (start * 64 + v < rows_size)[:, None]
    g = gl.load(grad + (start.to(gl.int64) * 64) * grad_stride + grad_at, mask=inside, other=0.0)
    for tile in range(start, gl.cdiv(rows_size, 64), step):
        place = (tile.to(gl.int64) * 64) * 128
        signs_of_tile = signs + tile.to(gl.int64) * 512 + signs_at
        with_signs = (tile * 64 + words_v < rows_size)[:, None]
        signs1 = gl.load(signs_of_tile, mask=with_signs, other=0)
        signs2 = gl.load(signs_of_tile + 4, mask=with_signs, other=0)
        inside = (tile * 64 + v < rows_size)[:, None]
        base = zero()
        y = _start(g, w.index(base + PARTS + 1), zeros)
        y = _end(y)
        y = _masked(y, signs2, c, keep_scale).to(dtype)
        z = _start(y, w.index(base + PARTS), zeros)
        gl.store(grad2 + place + at, y, mask=inside)
        y = _end(z)
        y = _masked(y, signs1, c, keep_scale).to(dtype)
        z = _start(y, w.index(base), zeros)
        gl.store(grad1 + place + at, y, mask=inside)
        added = g  # takes 6 % less time than reading it again
        later = tile + step
        inside_later = (later * 64 + v < rows_size)[:, None]
        g = gl.load(grad + (later.to(gl.int64) * 64) * grad_stride + grad_at, mask=inside_later, other=0.0)
        z = _end(z)
        if SKIP:
            z += added.to(gl.float32)
        gl.store(out + place + at, z.to(dtype), mask=inside)
        BARRIER()  # the next product would take registers that z still has
        if PARTS > 1:
            z = _end(_start(y, w.index(base + 1), zeros))
            gl.store(out + plane + place + at, z.to(dtype), mask=inside)
            BARRIER()
        if PARTS > 2:
            z = _end(_start(y, w.index(base + 2), zeros))
            gl.store(out + plane + plane + place + at, z.to(dtype), mask=inside)


@launched
@gluon.jit(do_not_specialize=SIZES)
def mlp_backward_hopper_kernel(
    grad, weight1, weight2, weight3, signs, grad1, grad2, out,
    rows_size, plane_rows, keep_scale, grad_stride: gl.constexpr,
    PARTS: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first two layers' outputs before their activations, and of the PARTS inputs."""
    dtype: gl.constexpr = out.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    w = gl.allocate_shared_memory(dtype, [PARTS + 2, 128, 128], square)
    for i in gl.static_range(PARTS):
        keep_weight(w.index(i), weight1 + i * 128, PARTS * 128, True, True)
    keep_weight(w.index(PARTS), weight2, 128, True, True)
    keep_weight(w.index(PARTS + 1), weight3, 128, True, True)
    hopper.fence_async_shared()
    BARRIER()
    both = grad, w, signs, grad1, grad2, out, rows_size, plane_rows, keep_scale
    flags: gl.constexpr = grad_stride, PARTS, SKIP
    group1, group2 = (gl.program_id(0),), (gl.program_id(0) + gl.num_programs(0),)
    gl.warp_specialize([(_walk_back, group1 + both + flags), (_walk_back, group2 + both + flags)], [4], [240])


def backward(
    grad: Tensor, parts: int, weights: Sequence[Tensor], hidden: Sequence[Tensor], skip: bool, dropout: float
) -> tuple[Tensor, list[Tensor]]:
    """The same as `kernels.backward` for three layers of 128 channels, with gradients of all inputs."""
    rows, grad = grad.shape[0], aligned(grad)
    input_grads, plane_rows = empty_planes(grad, parts, rows, 128)
    first, second = grad.new_empty(rows, 128), grad.new_empty(rows, 128)
    if rows:
        mlp_backward_hopper_kernel[(min(processors(grad), cdiv(rows, 64)),)](
            grad, *weights, hidden[-1].contiguous(),
            first, second, input_grads, rows, plane_rows, threshold_and_scale(dropout)[1], grad.stride(0),
            PARTS=parts, SKIP=skip, num_warps=4,
        )  # fmt: skip
    return input_grads, [first, second, grad]
