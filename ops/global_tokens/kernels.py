"""Tokens of whole meshes and modulation by conditions, forward and backward, on packed ragged batches.

The forward gathers tokens over spans of rows, lets the tokens of each mesh attend to each other in one program, and
gives them back to the rows, which the modulation then scales and shifts. The backward has the same three steps in the
opposite order. Without tokens, each is one step. All sums are added up in a fixed order. `ops.global_tokens.op` has the
formulas.

Shapes: V rows, B meshes, N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launcher import launched
from diffnet.ops.common.matmul import product, split, transposed
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import choose_span, span_count, span_rows, sum_spans
from diffnet.ops.common.tiling import SIZES, has_large_shared_memory, interpreted, processors, tile
from diffnet.ops.global_tokens.parameters import Parameters, tokens_in
from diffnet.ops.mlp.weight_gradient_kernels import weight_gradients

PLANES = 6  # of a state: z, Q, K, V, y and A y, or the gradients of A y, Q, K, V and z


@triton.jit
def _load_rows(at, rows, columns, row_size, column_size):
    """Load a matrix with contiguous rows, zeros outside of it."""
    inside = (rows < row_size)[:, None] & (columns < column_size)[None, :]
    return tl.load(at + rows[:, None] * column_size + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(at, value, rows, columns, row_size, column_size):
    inside = (rows < row_size)[:, None] & (columns < column_size)[None, :]
    tl.store(at + rows[:, None] * column_size + columns[None, :], value.to(at.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_forward_gather_kernel(
    x, mass, share, share_bias, ptr, weights, partial, rows_size, meshes, span,
    n_size: tl.constexpr, c_size: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """w = softmax(S x + s), and partial[s] = [Σ m w x, Σ m w] over the rows of span s."""
    index = tl.program_id(0)
    _, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    shares = transposed(split(_load_rows(share, n, c, n_size, c_size).to(x.dtype.element_ty), PRECISION))
    bias = tl.load(share_bias + n, mask=n < n_size, other=-float("inf")).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    areas = tl.zeros((BLOCK_N,), tl.float32)
    for row in range(first, last, BLOCK_V):
        v = tl.arange(0, BLOCK_V)
        row64 = tl.cast(row, tl.int64)
        value = _load_rows(x + row64 * c_size, v, c, last - row, c_size)
        logits = product(split(value, PRECISION), shares, None, PRECISION) + bias
        w = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        w = (w / tl.sum(w, axis=1)[:, None]).to(x.dtype.element_ty)
        _store_rows(weights + row64 * n_size, w, v, n, last - row, n_size)
        m = tl.load(mass + row + v, mask=row + v < last, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(m))  # areas of a fine mesh are too small for float16
        largest = tl.where(largest > 0.0, largest, 1.0)
        weighted = w.to(tl.float32) * (m / largest)[:, None]
        areas += tl.sum(weighted, axis=0) * largest
        operand = transposed(split(weighted.to(x.dtype.element_ty), PRECISION))
        total += product(operand, split(value, PRECISION), None, PRECISION) * largest
    place = partial + index.to(tl.int64) * (n_size * c_size + n_size)
    _store_rows(place, total, n, c, n_size, c_size)
    tl.store(place + n_size * c_size + n, areas, mask=n < n_size)


@triton.jit
def _times(
    left, right, n, c, k_stride: tl.constexpr, c_stride: tl.constexpr, n_size: tl.constexpr, c_size: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Multiply a state (N, C) by a matrix (C, C) of parameters, whose element (k, c) is at k k_stride + c c_stride."""
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for step in range(0, c_size, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        a = _load_rows(left, n, k, n_size, c_size)
        inside = (k < c_size)[:, None] & (c < c_size)[None, :]
        b = tl.load(right + k[:, None] * k_stride + c[None, :] * c_stride, mask=inside, other=0.0).to(a.dtype)
        total = product(split(a, PRECISION), split(b, PRECISION), total, PRECISION)
    return total


@triton.jit
def _attention(q, k, n_size: tl.constexpr, scale, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr):
    """softmax(scale Q Kᵀ)"""
    scores = product(split(q, PRECISION), transposed(split(k, PRECISION)), None, PRECISION) * scale
    scores = tl.where((tl.arange(0, BLOCK_N) < n_size)[None, :], scores, -float("inf"))
    p = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return p / tl.sum(p, axis=1)[:, None]


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_forward_exchange_kernel(
    state, sums, projection, projection_bias, out, apart, scale, n_size: tl.constexpr, c_size: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The tokens z of a mesh, Q, K and V, y = softmax(scale Q Kᵀ) V and A y.

    apart: elements between two planes of the state
    """
    mesh = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    place = sums + mesh * (n_size * c_size + n_size)
    areas = tl.load(place + n_size * c_size + n, mask=n < n_size, other=1.0)
    z = _load_rows(place, n, c, n_size, c_size) / tl.where(areas > 0.0, areas, 1.0)[:, None]
    state += mesh * (n_size * c_size)
    _store_rows(state, z, n, c, n_size, c_size)
    tl.debug_barrier()
    for i in tl.static_range(3):
        weight = projection + i * c_size * c_size
        y = _times(state, weight, n, c, 1, c_size, n_size, c_size, PRECISION, BLOCK_N, BLOCK_K, BLOCK_C)
        y += tl.load(projection_bias + i * c_size + c, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
        _store_rows(state + (1 + i) * apart, y, n, c, n_size, c_size)
    tl.debug_barrier()
    q = _load_rows(state + apart, n, c, n_size, c_size)
    k = _load_rows(state + 2 * apart, n, c, n_size, c_size)
    v = _load_rows(state + 3 * apart, n, c, n_size, c_size)
    p = _attention(q, k, n_size, scale, PRECISION, BLOCK_N).to(q.dtype)
    y = product(split(p, PRECISION), split(v, PRECISION), None, PRECISION)
    _store_rows(state + 4 * apart, y, n, c, n_size, c_size)
    tl.debug_barrier()
    y = _times(state + 4 * apart, out, n, c, 1, c_size, n_size, c_size, PRECISION, BLOCK_N, BLOCK_K, BLOCK_C)
    _store_rows(state + 5 * apart, y, n, c, n_size, c_size)


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_forward_give_back_kernel(
    x, weights, returned, coefficients, ptr, out, rows_size, meshes, span,
    n_size: tl.constexpr, c_size: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(1 + γ) ∘ (x + w A y) + β at the rows of a span."""
    mesh, first, last = span_rows(tl.program_id(0), ptr, rows_size, meshes, span, ONE_MESH)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    if weights is not None:
        u = split(_load_rows(returned + mesh.to(tl.int64) * (n_size * c_size), n, c, n_size, c_size), PRECISION)
    if coefficients is not None:
        place = coefficients + mesh.to(tl.int64) * (2 * c_size) + c
        gain = 1.0 + tl.load(place, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(place + c_size, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
    v = tl.arange(0, BLOCK_V)
    for row in range(first, last, BLOCK_V):
        row64 = tl.cast(row, tl.int64)
        value = _load_rows(x + row64 * c_size, v, c, last - row, c_size).to(tl.float32)
        if weights is not None:
            w = _load_rows(weights + row64 * n_size, v, n, last - row, n_size)
            value = product(split(w, PRECISION), u, value, PRECISION)
        if coefficients is not None:
            value = value * gain + shift
        _store_rows(out + row64 * c_size, value, v, c, last - row, c_size)


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_backward_give_back_kernel(
    grad, x, weights, coefficients, ptr, x_grad, partial, rows_size, meshes, span,
    n_size: tl.constexpr, c_size: tl.constexpr, ONE_MESH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial[s] = [Σ w ⊗ g, Σ g ∘ x, Σ g] over the rows of span s, for the gradient g. Without tokens, dx, too."""
    index = tl.program_id(0)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    v = tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    scaled = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)  # reduced after the loop: reductions synchronize
    plain = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    if weights is None:
        place = coefficients + mesh.to(tl.int64) * (2 * c_size) + c
        gain = 1.0 + tl.load(place, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
    for row in range(first, last, BLOCK_V):
        row64 = tl.cast(row, tl.int64)
        g = _load_rows(grad + row64 * c_size, v, c, last - row, c_size)
        if weights is not None:
            w = _load_rows(weights + row64 * n_size, v, n, last - row, n_size)
            total = product(transposed(split(w, PRECISION)), split(g, PRECISION), total, PRECISION)
        else:
            _store_rows(x_grad + row64 * c_size, g.to(tl.float32) * gain, v, c, last - row, c_size)
        if coefficients is not None:
            value = _load_rows(x + row64 * c_size, v, c, last - row, c_size)
            scaled += g.to(tl.float32) * value.to(tl.float32)
            plain += g.to(tl.float32)
    place = partial + index.to(tl.int64) * ((n_size + 2) * c_size)
    if weights is not None:
        _store_rows(place, total, n, c, n_size, c_size)
    tl.store(place + n_size * c_size + c, tl.sum(scaled, axis=0), mask=c < c_size)
    tl.store(place + (n_size + 1) * c_size + c, tl.sum(plain, axis=0), mask=c < c_size)


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_backward_exchange_kernel(
    state, sums, projection, out, coefficients, grads, apart, scale, n_size: tl.constexpr, c_size: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradients of A y, Q, K, V and z, which are the planes of `grads`. The part of u in ∂L/∂γ joins the sums."""
    mesh = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    sums += mesh * ((n_size + 2) * c_size)
    state += mesh * (n_size * c_size)
    grads += mesh * (n_size * c_size)
    u_grad = _load_rows(sums, n, c, n_size, c_size)
    if coefficients is not None:
        u = _load_rows(state + 5 * apart, n, c, n_size, c_size)
        place = sums + n_size * c_size + c
        gain_grad = tl.load(place, mask=c < c_size, other=0.0) + tl.sum(u.to(tl.float32) * u_grad, axis=0)
        tl.store(place, gain_grad, mask=c < c_size)
        gain = 1.0 + tl.load(coefficients + mesh * (2 * c_size) + c, mask=c < c_size, other=0.0).to(tl.float32)
        u_grad *= gain[None, :]
    _store_rows(grads, u_grad, n, c, n_size, c_size)
    tl.debug_barrier()
    y_grad = _times(grads, out, n, c, c_size, 1, n_size, c_size, PRECISION, BLOCK_N, BLOCK_K, BLOCK_C)
    q = _load_rows(state + apart, n, c, n_size, c_size)
    k = _load_rows(state + 2 * apart, n, c, n_size, c_size)
    v = _load_rows(state + 3 * apart, n, c, n_size, c_size)
    p = _attention(q, k, n_size, scale, PRECISION, BLOCK_N)
    dy = split(y_grad.to(q.dtype), PRECISION)
    v_grad = product(transposed(split(p.to(q.dtype), PRECISION)), dy, None, PRECISION)
    p_grad = product(dy, transposed(split(v, PRECISION)), None, PRECISION)
    scores_grad = (p * (p_grad - tl.sum(p * p_grad, axis=1)[:, None]) * scale).to(q.dtype)
    ds = split(scores_grad, PRECISION)
    _store_rows(grads + apart, product(ds, split(k, PRECISION), None, PRECISION), n, c, n_size, c_size)
    k_grad = product(transposed(ds), split(q, PRECISION), None, PRECISION)
    _store_rows(grads + 2 * apart, k_grad, n, c, n_size, c_size)
    _store_rows(grads + 3 * apart, v_grad, n, c, n_size, c_size)
    tl.debug_barrier()
    z_grad = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for i in tl.static_range(3):
        left, right = grads + (1 + i) * apart, projection + i * c_size * c_size
        z_grad += _times(left, right, n, c, c_size, 1, n_size, c_size, PRECISION, BLOCK_N, BLOCK_K, BLOCK_C)
    _store_rows(grads + 4 * apart, z_grad, n, c, n_size, c_size)


@launched
@triton.jit(do_not_specialize=SIZES)
def global_tokens_backward_gather_kernel(
    grad, x, mass, weights, share, state, grads, areas, coefficients, ptr, x_grad, partial, apart,
    rows_size, meshes, span, n_size: tl.constexpr, c_size: tl.constexpr, ONE_MESH: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx at the rows of span s, and partial[s] = [dS, ds] over these rows."""
    index = tl.program_id(0)
    mesh, first, last = span_rows(index, ptr, rows_size, meshes, span, ONE_MESH)
    mesh = mesh.to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    v = tl.arange(0, BLOCK_V)
    if coefficients is not None:
        place = coefficients + mesh * (2 * c_size) + c
        gain = 1.0 + tl.load(place, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
    before = mesh * (n_size * c_size)
    z = _load_rows(state + before, n, c, n_size, c_size)
    z_grad = _load_rows(grads + 4 * apart + before, n, c, n_size, c_size)
    along = tl.sum(z.to(tl.float32) * z_grad.to(tl.float32), axis=1)[None, :]
    u = transposed(split(_load_rows(state + 5 * apart + before, n, c, n_size, c_size), PRECISION))
    shares = split(_load_rows(share, n, c, n_size, c_size).to(x.dtype.element_ty), PRECISION)
    dz = split(z_grad, PRECISION)
    area = tl.load(areas + mesh * (n_size * c_size + n_size) + n_size * c_size + n, mask=n < n_size, other=1.0)
    area = tl.where(area > 0.0, area, 1.0)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    bias_total = tl.zeros((BLOCK_N,), tl.float32)
    for row in range(first, last, BLOCK_V):
        row64 = tl.cast(row, tl.int64)
        g = _load_rows(grad + row64 * c_size, v, c, last - row, c_size).to(tl.float32)
        if coefficients is not None:
            g *= gain
        value = split(_load_rows(x + row64 * c_size, v, c, last - row, c_size), PRECISION)
        w = _load_rows(weights + row64 * n_size, v, n, last - row, n_size).to(tl.float32)
        m = tl.load(mass + row + v, mask=row + v < last, other=0.0).to(tl.float32)
        part = m[:, None] / area  # of a row in each token
        w_grad = (product(value, transposed(dz), None, PRECISION) - along) * part
        w_grad = product(split(g.to(x.dtype.element_ty), PRECISION), u, w_grad, PRECISION)
        logits_grad = (w * (w_grad - tl.sum(w * w_grad, axis=1)[:, None])).to(x.dtype.element_ty)
        dl = split(logits_grad, PRECISION)
        total = product(transposed(dl), value, total, PRECISION)
        bias_total += tl.sum(logits_grad.to(tl.float32), axis=0)
        share_of_row = w * part
        largest = tl.max(share_of_row)  # see the forward
        largest = tl.where(largest > 0.0, largest, 1.0)
        operand = split((share_of_row / largest).to(x.dtype.element_ty), PRECISION)
        g += product(operand, dz, None, PRECISION) * largest
        g = product(dl, shares, g, PRECISION)
        _store_rows(x_grad + row64 * c_size, g, v, c, last - row, c_size)
    place = partial + index.to(tl.int64) * (n_size * c_size + n_size)
    _store_rows(place, total, n, c, n_size, c_size)
    tl.store(place + n_size * c_size + n, bias_total, mask=n < n_size)


# Tiles of at most 32 rows and tokens: their products stay in registers, which Hopper's asynchronous units don't read.
# With 64 tokens in bfloat16, a program waited forever for these units (Triton 3.6).
MAX_TOKENS = 32
MAX_CHANNELS = 256


def fits(x: Tensor, tokens: int) -> bool:
    """Whether the kernels take this many tokens for x (V, C)."""
    most = MAX_CHANNELS if x.dtype != torch.float32 else MAX_CHANNELS // 2
    return tokens <= MAX_TOKENS and x.shape[1] <= most and (interpreted(x) or has_large_shared_memory(x))


def _launch(x: Tensor, ptr: Tensor, n: int) -> tuple[int, tuple[int, int, int], dict[str, Any], dict[str, Any]]:
    """The number of spans; the sizes of rows, meshes and a span; and the constants of kernels on rows and on meshes."""
    (rows, c), meshes = x.shape, ptr.shape[0] - 1
    small, warps = interpreted(x), 4 if c <= 128 and x.dtype != torch.float32 else 8
    block_v, block_k = (16, 16) if small else (32, 64 if c <= 128 else 32)
    span = choose_span(rows, block_v, processors(x))
    tiles = {"BLOCK_N": tile(n, MAX_TOKENS), "BLOCK_C": tile(c, MAX_CHANNELS)}
    all_kernels = {"n_size": n, "c_size": c, "PRECISION": dot_precision(x), **tiles, "num_warps": warps}
    on_rows = {"ONE_MESH": meshes == 1, "BLOCK_V": block_v, **all_kernels}
    return span_count(rows, meshes, span), (rows, meshes, span), on_rows, {"BLOCK_K": block_k, **all_kernels}


def forward(
    x: Tensor, mass: Tensor, ptr: Tensor, coefficients: Tensor | None, p: Parameters | None
) -> tuple[Tensor, list[Tensor]]:
    """x (V, C), mass (V,), ptr (B+1,), coefficients (B, 2C), all contiguous → (V, C), and what the backward needs

    With tokens, these are the weights (V, N), the sums over the rows of each mesh, and the state (PLANES, B, N, C).
    """
    n, c = tokens_in(p), x.shape[1]
    spans, sizes, on_rows, on_meshes = _launch(x, ptr, n)
    meshes, span = sizes[1:]
    out, weights, returned, results = torch.empty_like(x), None, None, list[Tensor]()
    if p is not None:
        weights, state = x.new_empty(x.shape[0], n), x.new_empty(PLANES, meshes, n, c)
        partial = x.new_empty(1, spans, n * (c + 1), dtype=torch.float32)
        if partial.numel():
            global_tokens_forward_gather_kernel[(spans,)](
                x, mass, p.share, p.share_bias, ptr, weights, partial, *sizes, **on_rows
            )
        sums = sum_spans(partial, ptr, span)[0]
        if state.numel():
            global_tokens_forward_exchange_kernel[(meshes,)](
                state, sums, p.projection, p.projection_bias, p.out, state[0].numel(), c**-0.5, **on_meshes
            )
        returned, results = state[5], [weights, sums, state]
    if out.numel():
        global_tokens_forward_give_back_kernel[(spans,)](
            x, weights, returned, coefficients, ptr, out, *sizes, **on_rows
        )
    return out, results


def backward(
    grad: Tensor,
    x: Tensor,
    mass: Tensor,
    ptr: Tensor,
    coefficients: Tensor | None,
    p: Parameters | None,
    results: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x, of the coefficients γ and β (B, 2C), and of the `Parameters`.

    grad: of the output, (V, C) contiguous and in the dtype of x. All gradients but the first are float32.
    results: see `forward`
    """
    n, c = tokens_in(p), x.shape[1]
    spans, sizes, on_rows, on_meshes = _launch(x, ptr, n)
    meshes, span = sizes[1:]
    weights = results[0] if p else None
    x_grad, partial = torch.empty_like(x), x.new_empty(1, spans, (n + 2) * c, dtype=torch.float32)
    if partial.numel():
        global_tokens_backward_give_back_kernel[(spans,)](
            grad, x, weights, coefficients, ptr, x_grad, partial, *sizes, **on_rows
        )
    of_mesh = sum_spans(partial, ptr, span)[0]
    of_coefficients = of_mesh.view(meshes, -1)[:, n * c :]
    if p is None:
        return x_grad, of_coefficients, []
    weights, sums, state = results
    grads, apart = torch.empty_like(state[1:]), state[0].numel()
    if meshes and c:
        global_tokens_backward_exchange_kernel[(meshes,)](
            state, of_mesh, p.projection, p.out, coefficients, grads, apart, c**-0.5, **on_meshes
        )
    of_rows = x.new_empty(1, spans, n * (c + 1), dtype=torch.float32)
    if x.numel():
        global_tokens_backward_gather_kernel[(spans,)](
            grad, x, mass, weights, p.share, state, grads, sums, coefficients, ptr, x_grad, of_rows, apart,
            *sizes, **on_rows,
        )  # fmt: skip
    # Q, K and V are layers on z, and A is one on y. Their gradients come one after another, then those of the biases.
    (z, y), (u, *of_z) = (state[i].view(-1, c) for i in (0, 4)), (g.view(-1, c) for g in grads[:4])
    unsummed = weight_gradients([z], [z, z, y], [*of_z, u], leave_sum=True).unsummed
    assert unsummed is not None
    of_share = sum_spans(of_rows, None, span, unsummed=unsummed).view(-1).split_with_sizes([n * c, n])
    of_projection, of_out, bias, _ = unsummed.total.split_with_sizes([3 * c * c, c * c, 3 * c, c])
    of_tokens = [of_share[0].view(n, c), of_share[1], of_projection.view(3 * c, c), bias, of_out.view(c, c)]
    return x_grad, of_coefficients, of_tokens
