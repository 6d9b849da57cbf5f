"""Heat diffusion of coefficients: D = exp(−λ tᵀ) ∘ S in one kernel, and its gradients in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.common.launch import cdiv, device_of, interpreted


@triton.jit
def _diffuse_kernel(
    spectrum, evals, time, grad, out, time_partial, rows_size, c_size: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows are those of all meshes' spectra. Backward: out = dS, and Σ −λ ∘ dD ∘ D over the rows of this program."""
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < rows_size)[:, None] & (c < c_size)[None, :]
    at = rows.to(tl.int64)[:, None] * c_size + c[None, :]
    value = tl.load(evals + rows, mask=rows < rows_size, other=0.0).to(tl.float32)[:, None]
    t = tl.load(time + c, mask=c < c_size, other=0.0).to(tl.float32)[None, :]
    s = tl.load(spectrum + at, mask=inside, other=0.0)
    decay = tl.exp(-value * t)
    if BACKWARD:
        g = tl.load(grad + at, mask=inside, other=0.0) * decay
        tl.store(out + at, g, mask=inside)
        total = tl.sum(-value * g * s, axis=0)
        tl.store(time_partial + tl.program_id(0).to(tl.int64) * c_size + c, total, mask=c < c_size)
    else:
        tl.store(out + at, decay * s, mask=inside)


def _launch(spectrum: Tensor, evals: Tensor, time: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    meshes, k, c = spectrum.shape
    spectrum, evals, time = spectrum.contiguous(), evals.contiguous(), time.contiguous()
    grad = grad if grad is None else grad.contiguous()
    block_v, block_c = (16, 16) if interpreted(spectrum) else (32, 64)
    out = torch.empty_like(spectrum)
    blocks = cdiv(meshes * k, block_v)
    time_partial = torch.empty(0 if grad is None else blocks, c, dtype=torch.float32, device=spectrum.device)
    if out.numel():
        with device_of(spectrum):
            _diffuse_kernel[(blocks, cdiv(c, block_c))](
                spectrum, evals, time, spectrum if grad is None else grad, out, time_partial, meshes * k, c,
                BACKWARD=grad is not None, BLOCK_V=block_v, BLOCK_C=block_c, num_warps=4,
            )  # fmt: skip
    return out, time_partial


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """D = exp(−λ tᵀ) ∘ S: spectrum (B, K, C) float32, evals (B, K), time (C,) → (B, K, C) float32"""
    return _launch(spectrum, evals, time, None)[0]


def diffuse_backward(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """dS (B, K, C) and dt (C,), float32"""
    spectrum_grad, time_partial = _launch(spectrum, evals, time, grad)
    return spectrum_grad, time_partial.sum(0)
