"""The backward of a block's MLP for Hopper: weights stay in shared memory, and tiles of rows in registers."""

# mypy: disable-error-code=attr-defined
# (the compiler turns integers into tensors, which a type checker does not know)

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.tiling import SIZES, aligned, cdiv, empty_planes, processors
from diffnet.ops.mlp.hopper_kernels import BARRIER, CHANNELS, OPERAND, PRODUCT, exchanged, keep_weight
from diffnet.ops.mlp.linear_kernels import threshold_and_scale


@gluon.jit
def _times(x, w, zeros):
    """Return x W. A thread has the same channels of the result as of x."""
    operand = gl.convert_layout(exchanged(x), OPERAND, assert_trivial=True)
    y = warpgroup_mma(operand, w, zeros, use_acc=False, is_async=True)
    y = warpgroup_mma_wait(0, deps=[y])
    return gl.convert_layout(exchanged(y), CHANNELS, assert_trivial=True)


@gluon.jit
def _walk(
    grad, w1, w2, w3, hidden1, hidden2, grad1, grad2, out, rows_size, plane_rows, keep_scale,
    grad_stride: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    tiles = gl.cdiv(rows_size, 64)
    step = 2 * gl.num_programs(0)
    start = gl.program_id(0) + GROUP * gl.num_programs(0)
    dtype: gl.constexpr = out.dtype.element_ty
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, CHANNELS))
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, CHANNELS))
    zeros = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    plane = plane_rows.to(gl.int64) * 128
    # With 64 bits, the compiler finds that addresses in a thread differ by constants, and keeps one of them.
    v64, c64 = v.to(gl.int64)[:, None], c.to(gl.int64)[None, :]
    at = v64 * 128 + c64
    grad_at = v64 * grad_stride + c64
    inside = (start * 64 + v < rows_size)[:, None]
    g = gl.load(grad + (start.to(gl.int64) * 64) * grad_stride + grad_at, mask=inside, other=0.0)
    for tile in range(start, tiles, step):
        place = (tile.to(gl.int64) * 64) * 128
        inside = (tile * 64 + v < rows_size)[:, None]
        h = gl.load(hidden2 + place + at, mask=inside, other=0.0)
        y = _times(g, w3, zeros)
        y = gl.where(h > 0.0, y * keep_scale, 0.0).to(dtype)
        h = gl.load(hidden1 + place + at, mask=inside, other=0.0)
        gl.store(grad2 + place + at, y, mask=inside)
        y = _times(y, w2, zeros)
        y = gl.where(h > 0.0, y * keep_scale, 0.0).to(dtype)
        gl.store(grad1 + place + at, y, mask=inside)
        if SKIP:
            g = gl.load(grad + (tile.to(gl.int64) * 64) * grad_stride + grad_at, mask=inside, other=0.0)
        z = _times(y, w1.index(0), zeros)
        if SKIP:
            z += g.to(gl.float32)
        gl.store(out + place + at, z.to(dtype), mask=inside)
        BARRIER()  # the next product would take registers that z still has
        later = tile + step
        inside_later = (later * 64 + v < rows_size)[:, None]
        g = gl.load(grad + (later.to(gl.int64) * 64) * grad_stride + grad_at, mask=inside_later, other=0.0)
        if PARTS > 1:
            z = _times(y, w1.index(1), zeros)
            gl.store(out + plane + place + at, z.to(dtype), mask=inside)
            BARRIER()
        if PARTS > 2:
            z = _times(y, w1.index(2), zeros)
            gl.store(out + plane + plane + place + at, z.to(dtype), mask=inside)


@launched
@gluon.jit(do_not_specialize=SIZES)
def mlp_backward_hopper_kernel(
    grad, weight1, weight2, weight3, hidden1, hidden2, grad1, grad2, out,
    rows_size, plane_rows, keep_scale, grad_stride: gl.constexpr,
    PARTS: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first two layers' outputs before their activations, and of the PARTS inputs."""
    dtype: gl.constexpr = out.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    w1 = gl.allocate_shared_memory(dtype, [PARTS, 128, 128], square)
    w2 = gl.allocate_shared_memory(dtype, [128, 128], square)
    w3 = gl.allocate_shared_memory(dtype, [128, 128], square)
    for i in gl.static_range(PARTS):
        keep_weight(w1.index(i), weight1 + i * 128, PARTS * 128, True)
    keep_weight(w2, weight2, 128, True)
    keep_weight(w3, weight3, 128, True)
    fence_async_shared()
    BARRIER()
    gl.warp_specialize(
        [
            (_walk, (grad, w1, w2, w3, hidden1, hidden2, grad1, grad2, out, rows_size, plane_rows, keep_scale,
                     grad_stride, 0, PARTS, SKIP)),
            (_walk, (grad, w1, w2, w3, hidden1, hidden2, grad1, grad2, out, rows_size, plane_rows, keep_scale,
                     grad_stride, 1, PARTS, SKIP)),
        ],
        [4],
        [240],
    )  # fmt: skip


def backward(
    grad: Tensor,
    parts: int,
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    skip: bool,
    dropout: float,
) -> tuple[Tensor, list[Tensor]]:
    """The same as `kernels.backward` for three layers of 128 channels, with gradients of all inputs."""
    rows, grad = grad.shape[0], aligned(grad)
    input_grads, plane_rows = empty_planes(grad, parts, rows, 128)
    first, second = grad.new_empty(rows, 128), grad.new_empty(rows, 128)
    if rows:
        mlp_backward_hopper_kernel[(min(processors(grad), cdiv(rows, 64)),)](
            grad, *weights, *(h.contiguous() for h in hidden),
            first, second, input_grads, rows, plane_rows, threshold_and_scale(dropout)[1], grad.stride(0),
            PARTS=parts, SKIP=skip, num_warps=4,
        )  # fmt: skip
    return input_grads, [first, second, grad]
