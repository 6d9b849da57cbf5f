"""A layer of 256 channels for Hopper: weights stay in shared memory, and two groups of warps take turns.

All products are of blocks of 128 channels, as in `hopper_kernels`. A group has three half tiles of rows in shared
memory: both that it multiplies, and the next one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.tiling import SIZES
from diffnet.ops.mlp.hopper_kernels import BARRIER, CHANNELS, PRODUCT, activated, exchanged, keep_weight, load_x, zero


@gluon.jit
def _walk(
    kept, start, step, x, w, bias, other, low, high, out, rows_size, rows_of_other, threshold, keep_scale,
    x_stride: gl.constexpr, other_stride: gl.constexpr, TRANSPOSED: gl.constexpr,
    BIAS: gl.constexpr, RELU: gl.constexpr, WORDS: gl.constexpr, MASKED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute every step-th tile of 64 rows. The first half of its columns is written during the second product."""
    c64 = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS)).to(gl.int64)[None, :]
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, CHANNELS))
    load_x(kept.index(0), x, x_stride, start, rows_size)
    load_x(kept.index(1), x + 128, x_stride, start, rows_size)
    load_x(kept.index(2), x, x_stride, start + step, rows_size)
    zeros = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    slot = start - start
    for tile in range(start, gl.cdiv(rows_size, 64), step):
        rows, rows64 = tile * 64 + v, (gl.cast(tile, gl.int64) * 64 + v.to(gl.int64))[:, None]
        y, later, base = zeros, zeros, zero()
        for k in gl.static_range(2):
            hopper.async_copy.wait_group(2 - k)
            hopper.fence_async_shared()
            BARRIER()
            half_rows, first, second = kept.index((slot + k) % 3), w.index(base + k), w.index(base + k + 2)
            if not TRANSPOSED:
                first, second = first.permute([1, 0]), second.permute([1, 0])
            y = hopper.warpgroup_mma(half_rows, first, y, use_acc=k > 0, is_async=True)
            later = hopper.warpgroup_mma(half_rows, second, later, use_acc=k > 0, is_async=True)
        for half in gl.static_range(2):
            columns = half * 128 + c64
            if MASKED or RESIDUAL:
                h = gl.load(other + rows64 * other_stride + columns, mask=(rows < rows_of_other)[:, None], other=0.0)
            if half == 0:
                y = hopper.warpgroup_mma_wait(1, deps=[y])
            else:
                y = hopper.warpgroup_mma_wait(0, deps=[later])
                BARRIER()  # all warps have multiplied
                load_x(kept.index(slot), x + 128, x_stride, tile + step, rows_size)
                load_x(kept.index((slot + 1) % 3), x, x_stride, tile + 2 * step, rows_size)
            y = gl.convert_layout(exchanged(y), CHANNELS, assert_trivial=True)
            y = activated(y, bias, low, high, tile, threshold, keep_scale, half, BIAS, RELU, WORDS)
            if MASKED:
                y = gl.where(h > 0.0, y * keep_scale, 0.0)
            if RESIDUAL:
                y += h.to(gl.float32)
            gl.store(out + rows64 * 256 + columns, y.to(out.dtype.element_ty), mask=(rows < rows_size)[:, None])
        slot = (slot + 2) % 3


@launched
@gluon.jit(do_not_specialize=SIZES)
def mlp_forward_linear_hopper_kernel(
    x, second, third, weight, bias, residual, hidden, seed, out, rows_size, plane_rows, threshold, keep_scale,
    in_size: gl.constexpr, out_size: gl.constexpr, part_size: gl.constexpr,
    x_stride: gl.constexpr, second_stride: gl.constexpr, third_stride: gl.constexpr, residual_stride: gl.constexpr,
    INPUTS: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr, RELU: gl.constexpr, WORDS: gl.constexpr,
    MASKED: gl.constexpr, RESIDUAL: gl.constexpr,
    PRECISION: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    """The same as `linear_kernels.mlp_forward_linear_kernel` for one input and parts of 256 channels.

    Each part has its own programs. One with a residual takes 5/3 of the time of another one, and has more programs.
    """
    parts: gl.constexpr = out_size // part_size
    later_parts: gl.constexpr = parts - 1 if parts > 1 else 1
    start, part, rows_of_other = gl.program_id(0), 0, rows_size
    programs = gl.num_programs(0) * 5 // (3 * parts + 2) if RESIDUAL else gl.num_programs(0) // parts
    if start >= programs:
        start -= programs
        part = 1 + start % later_parts
        programs = (gl.num_programs(0) - programs - part) // later_parts + 1
        start, rows_of_other = start // later_parts, 0
    out += part * plane_rows.to(gl.int64) * 256
    dtype: gl.constexpr = out.dtype.element_ty
    w = gl.allocate_shared_memory(dtype, [4, 128, 128], gl.NVMMASharedLayout.get_default_for([128, 128], dtype))
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    kept = gl.allocate_shared_memory(dtype, [3, 64, 128], flat)
    next_kept = gl.allocate_shared_memory(dtype, [3, 64, 128], flat)
    for i in gl.static_range(4):  # half of the outputs, half of the inputs
        row, column = (i % 2 * 128, part * 256 + i // 2 * 128) if TRANSPOSED else (i // 2 * 128, i % 2 * 128)
        keep_weight(w.index(i), weight + row * out_size + column, out_size, not TRANSPOSED, TRANSPOSED)
    hopper.fence_async_shared()
    BARRIER()
    low, high = gl.load(seed).to(gl.uint32), gl.load(seed + 1).to(gl.uint32)
    other = hidden if MASKED else residual
    other_stride: gl.constexpr = 256 if MASKED else residual_stride
    both = 2 * programs, x, w, bias, other, low, high, out, rows_size, rows_of_other, threshold, keep_scale
    flags: gl.constexpr = x_stride, other_stride, TRANSPOSED, BIAS, RELU, WORDS, MASKED, RESIDUAL
    group1, group2 = (kept, start), (next_kept, start + programs)
    gl.warp_specialize([(_walk, group1 + both + flags), (_walk, group2 + both + flags)], [4], [240])
