"""The sum of the spans of a projection, the diffusion of the result, and its products with A, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import SIZES, cdiv, device_of, interpreted, tile
from diffnet.ops.common.launcher import launched
from diffnet.ops.common.limits import check_matrix, check_rows
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import sum_of_spans, sum_spans
from diffnet.ops.gradient_features.coefficient_kernels import ROWS, add_product, store_plane
from diffnet.ops.gradient_features.table import empty_table

MOST_SPANS = 72  # of a mesh. Each program of the kernel reads a whole row of all spans, so more take too long.


@launched
@triton.jit(do_not_specialize=SIZES)
def diffusion_features_forward_table_kernel(
    partial, evals, time, a_re, a_im, ptr, factor, spectrum, diffused, table, meshes, span, spans,
    k_size: tl.constexpr, c_size: tl.constexpr,
    FACTOR: tl.constexpr, ROTATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Sum `partial` over the spans of each mesh to S, diffuse it to D, and write the planes of `table`.

    A program computes rows of one mesh. The programs of the first column of tiles write S and D.
    """
    blocks = tl.cdiv(k_size, BLOCK_V)
    mesh = tl.program_id(0) // blocks
    first_row = (tl.program_id(0) % blocks) * BLOCK_V
    rows = first_row + tl.arange(0, BLOCK_V)
    in_rows = (rows < k_size)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mesh_rows = mesh.to(tl.int64) * k_size
    value = tl.load(evals + mesh_rows + rows, mask=rows < k_size, other=0.0).to(tl.float32)[:, None]
    at = (mesh_rows + rows)[:, None] * c_size
    plane = (mesh * 0 + meshes).to(tl.int64) * k_size * c_size
    size: tl.constexpr = k_size * c_size
    flat = tl.arange(0, BLOCK_V * BLOCK_K)
    flat_row = first_row + flat // BLOCK_K
    p = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    q = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(0, c_size, BLOCK_K):
        column = step + flat % BLOCK_K
        cell = tl.where((flat_row < k_size) & (column < c_size), flat_row * c_size + column, size)
        total = sum_of_spans(
            partial, cell, size, mesh * 0, mesh, ptr, span, spans, False, BLOCK_V * BLOCK_K, BLOCK_SPANS
        )
        s = tl.reshape(total, (BLOCK_V, BLOCK_K))
        if FACTOR:
            s *= tl.load(factor)
        k = step + tl.arange(0, BLOCK_K)
        t = tl.load(time + k, mask=k < c_size, other=0.0).to(tl.float32)[None, :]
        d = tl.exp(-value * tl.where(t < 0.0, 0.0, t)) * s  # lets NaN through
        if tl.program_id(1) == 0:
            inside = in_rows & (k < c_size)[None, :]
            place = at + k[None, :]
            tl.store(spectrum + place, s, mask=inside)
            tl.store(diffused + place, d, mask=inside)
            store_plane(table, place, 0, plane, d, inside, ROTATION, PRECISION)
        p = add_product(d, a_re, c, k, p, c_size)
        if ROTATION:
            q = add_product(d, a_im, c, k, q, c_size)
    inside = in_rows & (c < c_size)[None, :]
    store_plane(table, at + c[None, :], 1, plane, p, inside, ROTATION, PRECISION)
    if ROTATION:
        store_plane(table, at + c[None, :], 2, plane, q, inside, ROTATION, PRECISION)


def diffused_table(
    partial: Tensor,
    span: int,
    factor: Tensor | None,
    ptr: Tensor,
    evals: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    evecs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """S = factor Σ partial over the spans of each mesh, D = exp(−λ tᵀ) ∘ S with t = max(time, 0), and their table

    partial (1, spans, K, C) float32, evals (B, K), time (C,), a_re, a_im (C, C), evecs (V, K)
    → two (B, K, C) float32, and D, P = D A_reᵀ and Q = D A_imᵀ, see `empty_table`
    """
    meshes, k, c = len(ptr) - 1, *partial.shape[2:]
    check_rows("spectral_gradient_features", meshes * k)
    check_matrix("spectral_gradient_features", c, c)
    if len(evecs) // span > MOST_SPANS:
        partial, span, factor = sum_spans(partial, ptr, span, factor), len(evecs) + 1, None  # one span of each mesh
    spectrum = torch.empty(meshes, k, c, dtype=torch.float32, device=partial.device)
    diffused = torch.empty_like(spectrum)
    table = empty_table(evecs, diffused, a_im is not None)
    if spectrum.numel():
        small = interpreted(partial)
        block_k, block_c = (16, 16) if small else (tile(c, 64), tile(c, 32))
        with device_of(partial):
            diffusion_features_forward_table_kernel[(cdiv(k, ROWS) * meshes, cdiv(c, block_c))](
                partial, evals.contiguous(), time.contiguous(), a_re.contiguous(),
                a_re if a_im is None else a_im.contiguous(), ptr, partial if factor is None else factor,
                spectrum, diffused, table, meshes, span, partial.shape[1], k, c,
                FACTOR=factor is not None, ROTATION=a_im is not None, PRECISION=dot_precision(evecs),
                BLOCK_V=ROWS, BLOCK_K=block_k, BLOCK_C=block_c, BLOCK_SPANS=64 if small else 16, num_warps=8,
            )  # fmt: skip
    return spectrum, diffused, table
