"""Spectral diffusion on packed ragged batches (Sharp et al. 2022, "Learned Diffusion", spectral acceleration).

Shapes: V packed vertices, B meshes, K eigenpairs, C channels; mesh b owns rows ptr[b]:ptr[b+1]. `lengths` are the
same extents as Python integers; passing them saves a read-back of `ptr` where B > 1. The kernels don't need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque, save_inputs
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.common.ragged import row_lengths


def to_spectral(
    x: Tensor,
    evecs: Tensor,
    mass: Tensor,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Project onto the basis: S = Φᵀ (m ∘ x) for each mesh.

    x (V, C), evecs (V, K), mass (V,), ptr (B+1,) int → (B, K, C); float32 from the kernels, whatever goes in
    """
    if use_kernels(backend, x, evecs, mass, matrix=True):
        dtype = compute_dtype(x, evecs)
        out: Tensor = _project(x.to(dtype), evecs.to(dtype), mass, ptr)
        return out
    weighted = x * mass[:, None]
    if len(ptr) == 2:
        return (evecs.mT @ weighted)[None]
    sizes = row_lengths(ptr, lengths)
    return torch.stack([e.mT @ w for e, w in zip(torch.split(evecs, sizes), torch.split(weighted, sizes), strict=True)])


def from_spectral(
    coefficients: Tensor,
    evecs: Tensor,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Evaluate coefficients at the vertices: Φ D for each mesh.

    coefficients (B, K, C), evecs (V, K), ptr (B+1,) int → (V, C)
    """
    if use_kernels(backend, coefficients, evecs, matrix=True):
        out: Tensor = _evaluate(coefficients.float(), evecs.to(compute_dtype(evecs)), None, ptr)
        return out
    if len(ptr) == 2:
        return evecs @ coefficients[0]
    sizes = row_lengths(ptr, lengths)
    return torch.cat([e @ d for e, d in zip(torch.split(evecs, sizes), coefficients, strict=True)])


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor, backend: Backend = "auto") -> Tensor:
    """Heat diffusion in the basis: D = exp(−λ tᵀ) ∘ S, one time per channel.

    spectrum (B, K, C), evals (B, K), time (C,) ≥ 0 → (B, K, C)
    """
    if use_kernels(backend, spectrum, evals, time):
        out: Tensor = _diffuse(spectrum.float(), evals, time)
        return out
    return torch.exp(-evals[..., None] * time) * spectrum


# The two operations are each other's gradients, in every argument; so these can be differentiated any number of times.


def _project_kernel(x: Tensor, basis: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    """Φᵀ (scale ∘ x) → (B, K, C) float32."""
    from diffnet.ops.spectral.kernels import project

    return project(x, basis, scale, ptr)


def _project_fake(x: Tensor, basis: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    return x.new_empty(len(ptr) - 1, basis.shape[1], x.shape[1], dtype=torch.float32)


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, basis, scale, ptr = ctx.saved_tensors
    need_x, need_basis, need_scale, _ = ctx.needs_input_grad
    grad = grad.float()
    return (
        _evaluate(grad, basis, scale, ptr) if need_x else None,
        _evaluate(grad.mT.contiguous(), x, scale, ptr) if need_basis else None,
        _row_dot(x, _evaluate(grad, basis, None, ptr), scale) if need_scale else None,
        None,
    )


def _evaluate_kernel(coefficients: Tensor, basis: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    """scale ∘ (Φ D) → (V, C) in the basis' dtype; the coefficients are float32."""
    from diffnet.ops.spectral.kernels import evaluate

    return evaluate(coefficients, basis, scale, ptr)


def _evaluate_fake(coefficients: Tensor, basis: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    return basis.new_empty(basis.shape[0], coefficients.shape[2])


def _evaluate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    coefficients, basis, scale, ptr = ctx.saved_tensors
    need_coefficients, need_basis, need_scale, _ = ctx.needs_input_grad
    grad = grad.to(basis.dtype)
    return (
        _project(grad, basis, scale, ptr) if need_coefficients else None,
        _evaluate(coefficients.mT.contiguous(), grad, scale, ptr) if need_basis else None,
        _row_dot(grad, _evaluate(coefficients, basis, None, ptr), scale) if need_scale else None,
        None,
    )


def _row_dot(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(1).to(like.dtype)


def _diffuse_kernel(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """exp(−λ tᵀ) ∘ S, float32."""
    from diffnet.ops.spectral.diffusion_kernels import diffuse

    return diffuse(spectrum, evals, time)


def _diffuse_fake(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    return torch.empty_like(spectrum, memory_format=torch.contiguous_format)


def _diffuse_gradients_kernel(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """dS (B, K, C) and dt (C,), float32."""
    from diffnet.ops.spectral.diffusion_kernels import diffuse_backward

    return diffuse_backward(grad, spectrum, evals, time)


def _diffuse_gradients_fake(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    empty = torch.empty_like(spectrum, memory_format=torch.contiguous_format)
    return empty, empty.new_empty(len(time))


_diffuse_gradients = opaque("diffnet::diffuse_backward", _diffuse_gradients_kernel, _diffuse_gradients_fake)


def _diffuse_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    spectrum, evals, time = ctx.saved_tensors
    need_evals = ctx.needs_input_grad[1]
    spectrum_grad, time_grad = _diffuse_gradients(grad, spectrum, evals, time)
    evals_grad = -(spectrum_grad * spectrum * time).sum(-1) if need_evals else None
    return spectrum_grad, evals_grad, time_grad


_project = differentiable("diffnet::project", _project_kernel, _project_fake, save_inputs, _project_backward)
_diffuse = differentiable("diffnet::diffuse", _diffuse_kernel, _diffuse_fake, save_inputs, _diffuse_backward)
_evaluate = differentiable("diffnet::evaluate", _evaluate_kernel, _evaluate_fake, save_inputs, _evaluate_backward)
